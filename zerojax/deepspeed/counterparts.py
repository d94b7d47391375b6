"""The options of DeepSpeed's configuration, and what takes the place of each of them."""

from __future__ import annotations

import dataclasses
import difflib
import enum
from typing import Any

RELEASE = "0.19.8"  # of DeepSpeed, whose configuration classes the table below was compared with


class OptionOutcome(enum.Enum):
    """What becomes of an option. Those that a reader has to act on come first."""

    UNKNOWN = "unknown"
    LOST = "lost"
    CLOSE = "close"
    MAPPED = "mapped"
    UNNEEDED = "not needed"
    OFF = "off"

    @property
    def meaning(self) -> str:
        """What the outcome says about an option, in a few words."""
        return _MEANINGS[self]


_MEANINGS = {
    OptionOutcome.UNKNOWN: "DeepSpeed has no such option",
    OptionOutcome.LOST: "no counterpart, with what that costs",
    OptionOutcome.CLOSE: "a counterpart that differs",
    OptionOutcome.MAPPED: "a counterpart with the same effect",
    OptionOutcome.UNNEEDED: "no counterpart, and nothing is lost",
    OptionOutcome.OFF: "without effect in DeepSpeed too",
}


@dataclasses.dataclass(frozen=True)
class Counterpart:
    """What takes the place of an option.

    Attributes:
        outcome: whether there is a counterpart.
        text: the counterpart, or why there is none and what that costs.
        off: values with which the option has no effect, so that nothing is lost.
    """

    outcome: OptionOutcome
    text: str
    off: tuple[Any, ...] = ()

    def given(self, value: Any) -> Counterpart:
        """The counterpart of the option with this value."""
        if self.outcome is OptionOutcome.LOST and any(value == off and type(value) is type(off) for off in self.off):
            return Counterpart(OptionOutcome.OFF, "has no effect with this value")
        return self


def mapped(text: str) -> Counterpart:
    """The option has a counterpart with the same effect."""
    return Counterpart(OptionOutcome.MAPPED, text)


def close(text: str) -> Counterpart:
    """The option has a counterpart, and the text says how that differs."""
    return Counterpart(OptionOutcome.CLOSE, text)


def unneeded(text: str) -> Counterpart:
    """The option has no counterpart, and nothing is lost."""
    return Counterpart(OptionOutcome.UNNEEDED, text)


def lost(text: str, *off: Any) -> Counterpart:
    """The option has no counterpart, and the text says what is lost."""
    return Counterpart(OptionOutcome.LOST, text, (None, *(off or (False,))))


def _block(name: str, counterpart: Counterpart) -> dict[str, Counterpart]:
    return {name: counterpart, f"{name}.*": counterpart}


_BATCH = {
    "train_batch_size": mapped("the rows of a batch over all devices: `batch_size`"),
    "train_micro_batch_size_per_gpu": mapped("batch_size / num_microbatches / devices"),
    "gradient_accumulation_steps": mapped("train_step(num_microbatches=); one call runs all microbatches"),
    "managed_gradient_accumulation": lost("one call of the step is always one update", True),
    "gradient_clipping": mapped("train_step(clip_norm=); 0 turns it off"),
    "dataloader_drop_last": unneeded("the caller makes the batches; zero.pad_batch pads the last of an evaluation"),
    "gradient_allreduce_op": lost("gradients are averaged; for 'sum' multiply the loss by the devices", "mean"),
    "prescale_gradients": unneeded("gradients are divided before they are summed; only fp16 sums could tell"),
    "gradient_predivide_factor": unneeded("the mean does not depend on it; only fp16 sums could overflow otherwise"),
    "communication_data_type": mapped("Precision(reduce_dtype=)"),
    "seq_parallel_communication_data_type": unneeded("there is no sequence parallelism of its own"),
    "disable_allgather": unneeded("an all-gather is one collective of the compiler"),
    "data_types.grad_accum_dtype": close("gradients are accumulated in fp32"),
    "data_types.param_dtype": lost("the precision decides; pass Zero(precision=zerojax.Precision(...))", "auto"),
    "data_types.buffer_dtype": unneeded("variables that are no parameters keep the dtype that the model gives them"),
    "data_types.keep_in_fp32_modules": lost("name them: Zero(dtypes={'*norm*/scale': 'float32'})", "auto", []),
}

_PRECISION = {
    "bf16.enabled": mapped("Zero(precision=): fp32 master parameters, bf16 computation"),
    "bf16.immediate_grad_update": unneeded("gradients are accumulated as they are computed in any case"),
    "bf16.check_grad_overflow": close("a step whose gradient is not finite is skipped in any case"),
    "bf16.bf16_master_weights_and_grads": mapped("Precision(param_dtype=bfloat16)"),
    "bf16.bf16_optimizer_states": close("moments have the dtype of the master parameters, with this option or without"),
    "fp16.enabled": mapped("Zero(precision=): fp32 master parameters, fp16 computation, a dynamic loss scale"),
    "fp16.auto_cast": close("the batch is cast in any case, lest products be in fp32: Precision(cast_inputs=)"),
    "fp16.loss_scale": close("0 is dynamic. Another number is the first scale, which never doubles but halves if a step"
                             " is skipped"),
    "fp16.initial_scale_power": mapped("Precision(initial_scale=2**power)"),
    "fp16.loss_scale_window": mapped("Precision(growth_interval=)"),
    "fp16.hysteresis": close("the scale halves at each skipped step, as with hysteresis 1"),
    "fp16.consecutive_hysteresis": unneeded("there is no hysteresis"),
    "fp16.min_loss_scale": close("the least scale is 1"),
    "fp16.fp16_master_weights_and_grads": mapped("Precision(param_dtype=float16)"),
    "torch_autocast.enabled": close("Zero(precision=): weights are cast before the loss, not operation by operation"),
    "torch_autocast.dtype": mapped("Precision(compute_dtype=, reduce_dtype=)"),
    "torch_autocast.lower_precision_safe_modules": lost("name the others: Zero(dtypes={'*/head/*': 'float32'})", []),
}  # fmt: skip

_ZERO_OPTIONS = {
    "stage": mapped("Zero(stage=)"),
    "contiguous_gradients": unneeded("the compiler places gradients, and its memory does not fragment in a step"),
    "reduce_scatter": unneeded("gradients are always reduce-scattered at stages 2 and 3"),
    "reduce_bucket_size": close("train_step(bucket_bytes=): these elements in bytes. Larger leaves are cut, and with"
                                " none given, leaves move whole"),
    "use_multi_rank_bucket_allreduce": unneeded("each collective is over all devices"),
    "allgather_partitions": unneeded("an all-gather, never a series of broadcasts"),
    "allgather_bucket_size": close("train_step(bucket_bytes=), at stages 1 and 2; the larger of the two buckets"),
    "overlap_comm": unneeded("the compiler overlaps reductions with the backward pass at any stage"),
    "compute_grad_norm": unneeded("the norm is one of the step's metrics, and costs one all-reduce of a scalar"),
    "load_from_fp32_weights": unneeded("checkpoints hold parameters in param_dtype, once"),
    "elastic_checkpoint": unneeded("a checkpoint is restored onto any number of devices and any stage"),
    "sub_group_size": unneeded("the update is one program over all shards"),
    "stage3_prefetch_bucket_size": close("train_step(prefetch=): counts units, not elements; 0 is 0, all else is 1"),
    "stage3_param_persistence_threshold": unneeded("small leaves are gathered together with their unit"),
    "stage3_model_persistence_threshold": unneeded("see stage3_param_persistence_threshold"),
    "stage3_max_live_parameters": unneeded("at most prefetch + 1 units are gathered at any time"),
    "stage3_max_reuse_distance": unneeded("only the last unit stays gathered until its backward pass"),
    "stage3_gather_16bit_weights_on_model_save": unneeded("`zerojax checkpoint export` writes full weights"),
    "stage3_gather_fp16_weights_on_model_save": unneeded("`zerojax checkpoint export` writes full weights"),
    "stage3_module_granularity_threshold": lost("name larger units: Zero(units=['layers/*'])", 0),
    "stage3_use_all_reduce_for_fetch_params": unneeded("a unit is gathered in one all-gather"),
    "stage3_allgather_sequential": unneeded("leaves are gathered into their place, without a flat buffer"),
    "ignore_unused_parameters": unneeded("a parameter that the loss does not use has the gradient 0"),
    "legacy_stage1": unneeded("there is one stage 1"),
    "round_robin_gradients": unneeded("it is for gradients that are copied to host memory"),
    "parameter_alignment": unneeded("there are no flat buffers"),
    "zero_hpz_partition_size": lost("no second copy of the weights within a node. zerojax.make_mesh(replica=) keeps"
                                    " gathers within a node too, but replicates the optimizer state over nodes", 1, 0),
    "zero_quantized_weights": lost("weights are gathered in compute_dtype: twice the bytes of int8"),
    "zero_quantized_nontrainable_weights": lost("frozen leaves travel in the dtype of the model: give it int8 or fp8"),
    "zero_quantized_gradients": lost("gradients are reduced in reduce_dtype, with more bytes and no rounding to int4"),
    "memory_efficient_linear": unneeded("remat decides what is saved"),
    "pipeline_loading_checkpoint": unneeded("each device reads its own shards"),
    "override_module_apply": unneeded("zero.init creates any model sharded"),
    "log_trace_cache_warnings": unneeded("units come from a trace of the loss, which cannot go stale"),
    "enable_sanity_checks": mapped("train_step(audit='error') checks the compiled program"),
    "save_muon_momentum_buffer_in_memory": unneeded("optimizer state is always in device memory"),
    "leaf_module.classes": lost("name the unit by paths: Zero(units=['*/experts'])", []),
    "leaf_module.names": lost("name the unit by paths: Zero(units=['*/experts'])", []),
    "leaf_module.name_suffixes": lost("name the unit by paths: Zero(units=['*/experts'])", []),
    "zenflow": lost("optimizer state stays on the devices, and every update is complete", {}),
    "zenflow.*": lost("optimizer state stays on the devices, and every update is complete"),
    "offload_param.device": lost("parameters stay in device memory; Zero(offload=) moves them", "none"),
    "offload_optimizer.device": lost("optimizer state stays in device memory; Zero(offload=) moves it", "none"),
    "offload_optimizer.ratio": unneeded("see offload_optimizer.device"),
    "offload_optimizer.super_offload": unneeded("see offload_optimizer.device"),
    "cpu_offload": lost("optimizer state stays in device memory; Zero(offload=) moves it"),
    "cpu_offload_param": lost("parameters stay in device memory; Zero(offload=) moves them"),
    "cpu_offload_params": lost("parameters stay in device memory; Zero(offload=) moves them"),
    "cpu_offload_use_pin_memory": unneeded("see cpu_offload"),
    "mics_shard_size": mapped("zerojax.make_mesh(replica=devices / size); removed from DeepSpeed 0.19"),
    "mics_hierarchical_params_gather": unneeded("gathers never leave a group of shards; removed from DeepSpeed 0.19"),
    "zeropp_loco_param": lost("see zero_quantized_gradients; removed from DeepSpeed 0.19", {}),
    "zeropp_loco_param.*": lost("see zero_quantized_gradients; removed from DeepSpeed 0.19"),
}  # fmt: skip

_OFFLOAD_DETAILS = {
    "offload_param": ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"),
    "offload_optimizer": ("nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init",
                          "cpuadam_cores_perc", "pipeline"),
}  # fmt: skip

_ACTIVATIONS = {
    "activation_checkpointing.partition_activations": mapped("Remat(partition_inputs=True), with a `model` axis"),
    "activation_checkpointing.cpu_checkpointing": mapped("Remat(offload_inputs=True)"),
    "activation_checkpointing.number_checkpoints": unneeded("each unit saves its inputs; their number is that of the"
                                                            " layers"),
    "activation_checkpointing.contiguous_memory_optimization": unneeded("the compiler places activations"),
    "activation_checkpointing.synchronize_checkpoint_boundary": unneeded("a step is one program"),
    "activation_checkpointing.profile": mapped("zerojax.fit(profile=(first, last))"),
}  # fmt: skip

_OPTIMIZER = {
    "optimizer.type": mapped("`optimizer`, an optax transformation"),
    "optimizer.params.lr": mapped("learning_rate"),
    "optimizer.params.betas": mapped("b1 and b2"),
    "optimizer.params.eps": mapped("eps"),
    "optimizer.params.weight_decay": mapped("weight_decay, for all parameters; pass your own optimizer for a mask"),
    "optimizer.params.momentum": mapped("momentum"),
    "optimizer.params.nesterov": mapped("nesterov"),
    "optimizer.params.initial_accumulator_value": mapped("initial_accumulator_value"),
    "optimizer.params.adam_w_mode": mapped("false adds the decay to the gradient, before the moments"),
    "optimizer.params.bias_correction": lost("moments are always corrected", True),
    "optimizer.params.amsgrad": lost("pass optax.amsgrad yourself"),
    "optimizer.params.maximize": lost("return the negative of the loss"),
    "optimizer.params.dampening": lost("optax.sgd has none", 0, 0.0),
    "optimizer.params.lr_decay": lost("optax.adagrad has none; pass a schedule", 0, 0.0),
    "optimizer.params.max_coeff": lost("optax does not limit the trust ratio of LAMB"),
    "optimizer.params.min_coeff": lost("optax does not limit the trust ratio of LAMB"),
    "optimizer.params.eps_inside_sqrt": lost("optax.lamb adds eps outside of the root"),
    "optimizer.params.max_grad_norm": lost("DeepSpeed refuses it; use gradient_clipping", 0, 0.0),
    **{f"optimizer.params.{name}": unneeded("the update is one compiled program") for name in
       ("torch_adam", "foreach", "fused", "capturable", "differentiable", "set_grad_none", "fp32_optimizer_states",
        "adamw_mode")},
    "optimizer.legacy_fusion": unneeded("the update is one compiled program"),
    "scheduler.type": mapped("a schedule of `optimizer`"),
    "scheduler.params.warmup_min_lr": mapped("the learning rate of the first update"),
    "scheduler.params.warmup_max_lr": mapped("the learning rate after the warmup"),
    "scheduler.params.warmup_num_steps": mapped("updates of the warmup"),
    "scheduler.params.warmup_type": mapped("'log' or 'linear'"),
    "scheduler.params.total_num_steps": mapped("updates until the end of the decay"),
    "scheduler.params.warmup_min_ratio": mapped("where the warmup of the cosine starts, relative to the learning rate"),
    "scheduler.params.cos_min_ratio": mapped("where the cosine ends, relative to the learning rate"),
    "scheduler.params.last_batch_iteration": unneeded("checkpoints hold the count of updates"),
    "zero_allow_untested_optimizer": unneeded("any optax transformation runs on sharded arrays"),
    "zero_force_ds_cpu_optimizer": unneeded("updates run on the devices"),
}  # fmt: skip

_WHOLE_BLOCKS = {
    "aio": unneeded("nothing is swapped to NVMe"),
    "tensorboard": close("zerojax.fit writes TensorBoard's files into the directory of the run: zerojax[track]"),
    "wandb": close("zerojax.fit uses wandb if the script has started a run, or with WANDB_PROJECT"),
    "csv_monitor": close("zerojax.fit writes metrics.jsonl"),
    "comet": lost("pass a writer: zerojax.fit(writers=[...])"),
    "flops_profiler": close("zerojax.fit(profile=(first, last)); `zerojax plan` counts flops"),
    "comms_logger": close("zerojax.audit_step counts the bytes that a compiled step sends"),
    "timers": close("zerojax.fit measures the rate of steps without waiting for them"),
    "autotuning": close("`zerojax plan --auto` looks for the fastest settings that fit"),
    "compile": unneeded("a step is always compiled as a whole"),
    "checkpoint": close("zero.checkpoints: asynchronous, sharded, and restored onto any mesh"),
    "datastates_ckpt": unneeded("zero.checkpoints saves in the background"),
    "data_efficiency": lost("choose the rows in your own data pipeline", {}),
    "curriculum_learning": lost("choose the rows in your own data pipeline; removed from DeepSpeed 0.19", {}),
    "progressive_layer_drop": lost("drop layers in the model; removed from DeepSpeed 0.19", {}),
    "random_ltd": lost("drop tokens in the model", {}),
    "hybrid_engine": lost("generation is left to the caller: state.model() returns the current weights", {}),
    "pipeline": lost("there is no pipeline parallelism", {}),
    "expert_parallel": lost("divide experts over the `model` axis: Zero(partition_specs=)", {}),
    "weight_quantization": lost("give the model int8 or fp8 leaves and freeze them: Zero(frozen=)", {}),
    "compression_training": lost("there is no compression; removed from DeepSpeed 0.19", {}),
    "quantize_training": lost("there is no quantization in training; removed from DeepSpeed 0.19", {}),
    "eigenvalue": unneeded("it belongs to quantize_training; removed from DeepSpeed 0.19"),
    "sparse_attention": lost("attention is up to the model; removed from DeepSpeed 0.19", {}),
    "elasticity": close("zero.num_microbatches fits the batch to the devices that are left"),
    "nebula": close("zero.checkpoints(copy_to=) copies to remote storage; removed from DeepSpeed 0.19"),
    "amp": lost("use bf16 or fp16; removed from DeepSpeed 0.19", {}),
}

_OTHER_OPTIONS = {
    "tensor_parallel.autotp_size": close("zerojax.make_mesh(model=); the model or Zero(partition_specs=) names dims"),
    "tensor_parallel.*": lost("Zero(partition_specs={'*/up/kernel': P(None, 'model')}) divides leaves", None, {}),
    "sequence_parallel_size": lost("there is no sequence parallelism", 1),
    "steps_per_print": mapped("zerojax.fit(log_every=)"),
    "wall_clock_breakdown": mapped("zerojax.fit(profile=(first, last)) records a trace"),
    "memory_breakdown": close("plan.txt in the directory of a run, and `zerojax plan`"),
    "dump_state": close("print(zero.explain(state))"),
    "disable_python_gc": unneeded("a step is one call into a compiled program"),
    "vocabulary_size": unneeded("DeepSpeed only warns with it"),
    "use_data_before_expert_parallelism": unneeded("the axes of the mesh have a fixed order"),
    "sparse_gradients": unneeded("the rows of an embedding travel, not its table; removed from DeepSpeed 0.19"),
    "graph_harvesting": unneeded("a step is one program; removed from DeepSpeed 0.19"),
    "log_level": unneeded("logging.getLogger('zerojax')"),
}  # fmt: skip

COUNTERPARTS: dict[str, Counterpart] = {
    **_BATCH,
    **_PRECISION,
    **{f"zero_optimization.{name}": counterpart for name, counterpart in _ZERO_OPTIONS.items()},
    **{f"zero_optimization.{block}.{name}": unneeded(f"see {block}.device")
       for block, names in _OFFLOAD_DETAILS.items() for name in names},
    **_ACTIVATIONS,
    **_OPTIMIZER,
    **{path: each for name, counterpart in _WHOLE_BLOCKS.items() for path, each in _block(name, counterpart).items()},
    **_OTHER_OPTIONS,
}  # fmt: skip

# Other names of the same options: DeepSpeed accepts both.
ALIASES = {
    "bfloat16": "bf16",
    "zero_optimization.allgather_size": "zero_optimization.allgather_bucket_size",
    **{f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in
       ("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
        "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
        "use_all_reduce_for_fetch_params", "allgather_sequential")},
}  # fmt: skip


def counterpart_of(path: str) -> Counterpart:
    """The counterpart of an option by its path, such as 'fp16.enabled'. That of an unknown one names the nearest."""
    block = path
    while True:
        if (name := path if block == path else f"{block}.*") in COUNTERPARTS:
            return COUNTERPARTS[name]
        if "." not in block:
            break
        block = block.rpartition(".")[0]
    names = [name for name in COUNTERPARTS if not name.endswith("*")]
    nearest = difflib.get_close_matches(path, names, n=1, cutoff=0.7)
    text = f"not an option of DeepSpeed {RELEASE}" + (f"; did you mean {nearest[0]}?" if nearest else "")
    return Counterpart(OptionOutcome.UNKNOWN, text)
