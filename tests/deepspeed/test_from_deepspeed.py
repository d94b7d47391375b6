"""`from_deepspeed`: the mapped configuration trains as DeepSpeed's would, and no option of it is dropped in silence."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.deepspeed.counterparts import RELEASE, OptionOutcome, counterpart_of
from zerojax.deepspeed.optimizers import optimizer_of

pytestmark = pytest.mark.filterwarnings("ignore:from_deepspeed:UserWarning")

# All fields of the configuration classes of DeepSpeed 0.19.8 for ZeRO (with its blocks), fp16 and bf16, under the names
# that a file has.
KEYS = {
    "zero_optimization": """stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
        allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights
        elastic_checkpoint zenflow sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload
        stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
        stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save
        stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
        stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients
        parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
        zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply
        log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory""",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization.offload_optimizer": """device nvme_path buffer_count pin_memory pipeline_read pipeline_write
        fast_init ratio super_offload cpuadam_cores_perc""",
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "zero_optimization.zenflow": """topk_ratio select_strategy select_interval update_interval overlap_step offload
        auto_ratio full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch""",
    "fp16": """enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale fp16_master_weights_and_grads""",
    "bf16": """enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states""",
    "activation_checkpointing": """partition_activations number_checkpoints contiguous_memory_optimization
        synchronize_checkpoint_boundary profile cpu_checkpointing""",
}
# Options outside of these blocks, some of each other block, and those that 0.19 refuses because they were removed.
OTHERS = """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    gradient_clipping dataloader_drop_last gradient_allreduce_op prescale_gradients gradient_predivide_factor
    communication_data_type seq_parallel_communication_data_type disable_allgather steps_per_print
    wall_clock_breakdown memory_breakdown dump_state disable_python_gc vocabulary_size log_level
    use_data_before_expert_parallelism zero_allow_untested_optimizer zero_force_ds_cpu_optimizer optimizer.type
    scheduler.type torch_autocast.enabled torch_autocast.dtype torch_autocast.lower_precision_safe_modules
    data_types.grad_accum_dtype data_types.param_dtype data_types.buffer_dtype data_types.keep_in_fp32_modules
    aio.block_size tensorboard.enabled wandb.project csv_monitor.enabled comet.enabled flops_profiler.enabled
    comms_logger.enabled timers.throughput.enabled autotuning.enabled compile.deepcompile checkpoint.tag_validation
    datastates_ckpt data_efficiency.enabled hybrid_engine.enabled pipeline.stages expert_parallel.enabled
    weight_quantization.enabled tensor_parallel.autotp_size tensor_parallel.tp.tp_size
    nebula.enabled compression_training.weight_quantization amp.enabled quantize_training.enabled sparse_gradients
    eigenvalue.enabled sparse_attention.mode elasticity.enabled graph_harvesting curriculum_learning.enabled
    progressive_layer_drop.enabled zero_optimization.mics_shard_size zero_optimization.zeropp_loco_param.err_beta
    zero_optimization.mics_hierarchical_params_gather"""
ALL = [f"{block}.{name}" for block, names in KEYS.items() for name in names.split()] + OTHERS.split()


def config(**options):
    return {"train_batch_size": 32, **options}


def outcomes(mapping):
    return {option.path: option.outcome for option in mapping.options}


@pytest.mark.parametrize("path", ALL)
def test_every_option_of_the_release_is_named(path):
    assert RELEASE == "0.19.8"
    counterpart = counterpart_of(path)
    assert counterpart.outcome is not OptionOutcome.UNKNOWN and len(counterpart.text) > 8


def test_no_option_is_dropped():
    """A configuration with every option of the release, each of which the result and its text list."""
    given = config(fp16={"enabled": True}, scheduler={"type": "WarmupLR"}, optimizer={"type": "Adam"})
    for path in ALL:
        *blocks, name = path.split(".")
        inner = given
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner.setdefault(name, {} if name == "zenflow" else None)
    mapping = zerojax.from_deepspeed(given)
    listed = {option.path for option in mapping.options}
    assert set(ALL) - listed <= {"zero_optimization.zenflow"}  # the block itself, whose options are listed
    assert OptionOutcome.UNKNOWN not in outcomes(mapping).values()
    assert all(path in repr(mapping) for path in listed)


def plain_losses(tx, batches, clip_norm):
    """The losses of a step on one device, written by hand; two microbatches, averaged."""
    params, losses = create(jax.random.key(0)), []
    clipped = optax.chain(optax.clip_by_global_norm(clip_norm), tx)
    opt_state = clipped.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        halves = [{name: jnp.split(value, 2)[i] for name, value in batch.items()} for i in range(2)]
        results = [jax.value_and_grad(loss)(params, half) for half in halves]
        grads = jax.tree.map(lambda a, b: (a + b) / 2, results[0][1], results[1][1])
        updates, opt_state = clipped.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, (results[0][0] + results[1][0]) / 2

    for batch in batches:
        params, opt_state, value = step(params, opt_state, batch)
        losses.append(float(value))
    return losses


def create(key):
    one, two = jax.random.split(key)
    return {"in": jax.random.normal(one, (8, 16)) / 3, "out": jax.random.normal(two, (16, 8)) / 4}


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["in"]) @ params["out"] - batch["y"]) ** 2)


def batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        x = rng.standard_normal((32, 8), np.float32)
        yield {"x": x, "y": 3 * np.roll(x, 1, axis=1)}


def test_a_mapped_configuration_trains_as_the_step_written_by_hand(tmp_path):
    """AdamW, clipping that is active, accumulation, and a schedule whose values were written by hand."""
    file = tmp_path / "ds_config.json"
    given = {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 3, "total_num_steps": 8, "warmup_type": "linear", "warmup_max_lr": 0.02},
        },
    }
    file.write_text(json.dumps(given))
    ds = zerojax.from_deepspeed(file)
    zero = zerojax.Zero(zerojax.make_mesh(**ds.make_mesh), **ds.zero)
    state = zero.init(lambda key: create(jax.random.key(0)), ds.optimizer)
    step, found, rates, norms = zero.train_step(loss, **ds.train_step), [], [], []
    for batch in batches(8):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
        rates.append(float(metrics["learning_rate"]))
        norms.append(float(metrics["grad_norm"]))
    by_hand = [0.0, 0.0, 0.02 / 3, 0.04 / 3, 0.02, 0.016, 0.012, 0.008]
    np.testing.assert_allclose(rates, by_hand, rtol=1e-6)
    tx = optax.adamw(lambda count: jnp.asarray(by_hand)[count], b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.1)
    np.testing.assert_allclose(found, plain_losses(tx, batches(8), 0.5), rtol=1e-5)
    assert min(norms) > 0.5 and found[-1] < 0.98 * found[0]


# The learning rates of the first ten updates, as the classes of DeepSpeed 0.19.8 set them.
SCHEDULES = [
    ({"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.02, "warmup_min_lr": 0.001}},
     [0.001, 0.001, 0.0105, 0.0160571, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02]),
    ({"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
     [0.0, 0.0, 0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01, 0.01, 0.01]),
    ({"type": "WarmupDecayLR", "params": {"total_num_steps": 8, "warmup_num_steps": 3}},
     [0.0, 0.0, 0.00063093, 0.001, 0.001, 0.0008, 0.0006, 0.0004, 0.0002, 0.0]),
    ({"type": "WarmupCosineLR",
      "params": {"total_num_steps": 8, "warmup_num_steps": 3, "cos_min_ratio": 0.1, "warmup_min_ratio": 0.2}},
     [0.0, 0.002, 0.00704744, 0.01, 0.00914058, 0.00689058, 0.00410942, 0.00185942, 0.001, 0.001]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("scheduler", "want"), SCHEDULES, ids=lambda each: str(each.get("type", "")) if isinstance(each, dict) else ""
)
def test_schedules_have_the_learning_rates_of_deepspeed(scheduler, want):
    ds = zerojax.from_deepspeed(config(optimizer={"type": "Adam", "params": {"lr": 0.01}}, scheduler=scheduler))
    np.testing.assert_allclose([float(ds.schedule(i)) for i in range(10)], want, rtol=1e-5, atol=1e-9)


def torch_adam(g, p, step, memory, decay, decoupled):
    """Adam in the formulas of its paper, with eps outside of the root; the decay as AdamW or as an L2 penalty."""
    g = g if decoupled else g + decay * p
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    memory["v"] = 0.99 * memory.get("v", 0) + 0.01 * g * g
    m, v = memory["m"] / (1 - 0.9**step), memory["v"] / (1 - 0.99**step)
    return p - 0.1 * (m / (np.sqrt(v) + 1e-3) + (decay * p if decoupled else 0))


def torch_sgd(g, p, step, memory):
    g = g + 0.2 * p
    memory["m"] = 0.9 * memory.get("m", 0) + g
    return p - 0.1 * (g + 0.9 * memory["m"])


def torch_lion(g, p, step, memory):
    m = memory.get("m", 0)
    memory["m"] = 0.99 * m + 0.01 * g
    return p - 0.1 * (np.sign(0.9 * m + 0.1 * g) + 0.2 * p)


ADAM = {"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-3, "weight_decay": 0.2}
UPDATES = {
    "Adam": (ADAM, lambda *args: torch_adam(*args, 0.2, True)),
    "Adam with L2": (ADAM | {"adam_w_mode": False}, lambda *args: torch_adam(*args, 0.2, False)),
    "SGD": ({"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.2}, torch_sgd),
    "Lion": ({"lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.2}, torch_lion),
}


@pytest.mark.parametrize("name", UPDATES)
def test_optimizers_update_by_the_formulas_of_their_papers(name):
    params, formula = UPDATES[name]
    tx = optimizer_of({"type": name.partition(" ")[0], "params": params}, {}).tx
    value = np.asarray([1.0, -2.0, 0.5])
    ours, state, memory = jnp.asarray(value), tx.init(jnp.asarray(value)), {}
    for step in range(1, 5):
        grad = np.asarray([0.3, 0.1, -0.2]) * step
        value = formula(grad, value, step, memory)
        updates, state = tx.update(jnp.asarray(grad), state, ours)
        ours = optax.apply_updates(ours, updates)
    np.testing.assert_allclose(ours, value, rtol=1e-5, atol=1e-7)


def test_precision_follows_the_blocks():
    fp16 = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500}
    precision = zerojax.from_deepspeed(config(fp16=fp16)).zero["precision"]
    assert (precision.compute_dtype, precision.reduce_dtype, precision.param_dtype) == (
        jnp.float16, jnp.float16, jnp.float32)  # fmt: skip
    assert (precision.initial_scale, precision.growth_interval) == (4096, 500)
    static = zerojax.from_deepspeed(config(fp16={"enabled": True, "loss_scale": 128})).zero["precision"]
    assert static.initial_scale == 128 and static.growth_interval > 10**9
    bf16 = config(bfloat16={"enabled": True}, communication_data_type="fp32")
    assert zerojax.from_deepspeed(bf16).zero["precision"] == zerojax.Precision.of("bf16_reduce_fp32")
    assert zerojax.from_deepspeed(config()).zero["precision"] == zerojax.Precision()
    narrow = config(bf16={"enabled": True, "bf16_master_weights_and_grads": True})
    assert zerojax.from_deepspeed(narrow).zero["precision"].param_dtype == jnp.bfloat16
    cast = config(torch_autocast={"enabled": True, "dtype": "torch.bfloat16"})
    assert zerojax.from_deepspeed(cast).zero["precision"] == zerojax.Precision.of("bf16")


def test_the_default_loss_scale_is_that_of_deepspeed():
    ds = zerojax.from_deepspeed(config(fp16={"enabled": True}))
    assert (ds.zero["precision"].initial_scale, ds.zero["precision"].growth_interval) == (2**16, 1000)
    assert outcomes(ds)["fp16.initial_scale_power"] is OptionOutcome.MAPPED


@pytest.mark.parametrize(
    ("sizes", "rows", "microbatches"),
    [((64, None, None), 64, 1), ((64, 2, None), 64, 4), ((None, 2, 3), 48, 3), ((64, None, 4), 64, 4),
     ((64, 2, 4), 64, 4), ((None, 3, None), 24, 1)],
)  # fmt: skip
def test_two_batch_sizes_determine_the_third(sizes, rows, microbatches):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    ds = zerojax.from_deepspeed({name: size for name, size in zip(names, sizes, strict=True) if size is not None}, 8)
    assert (ds.batch_size, ds.train_step["num_microbatches"]) == (rows, microbatches)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"train_batch_size": 60}, "train_batch_size 60, 8 devices that divide the batch; 7 x 1 x 8 are not 60"),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, "4 x 3 x 8"),
        ({"gradient_accumulation_steps": 3}, "the batch size is missing"),
        ({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}, "1 x 0 x 8 are not 4"),
    ],
)
def test_batch_sizes_have_to_agree(sizes, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        zerojax.from_deepspeed(sizes, 8)


def test_auto_needs_values_where_the_result_depends_on_them():
    given = config(
        bf16={"enabled": "auto"},
        optimizer={"type": "AdamW", "params": {"lr": "auto"}},
        zero_optimization={"stage": 2, "reduce_bucket_size": "auto"},
        gradient_accumulation_steps="auto",
    )
    with pytest.raises(ValueError, match=r"got:      bf16\.enabled, optimizer\.params\.lr\n"):
        zerojax.from_deepspeed(given)
    values = {"bf16.enabled": True, "optimizer.params.lr": 1e-4}
    ds = zerojax.from_deepspeed(given, auto=values)
    assert ds.train_step == {"num_microbatches": 1, "clip_norm": 1.0}
    assert outcomes(ds)["zero_optimization.reduce_bucket_size"] is OptionOutcome.UNNEEDED
    with pytest.raises(ValueError, match=r"auto names 'optimizer\.params\.eps', which is not \"auto\""):
        zerojax.from_deepspeed(given, auto=values | {"optimizer.params.eps": 1e-8})


def test_a_typo_and_a_loss_are_named_in_a_warning():
    given = config(
        zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}, "zero_quantized_weights": False},
        gradient_cliping=1.0,
    )
    with pytest.warns(UserWarning, match=r"offload_optimizer\.device: optimizer state stays in device memory") as found:
        ds = zerojax.from_deepspeed(given)
    assert "gradient_cliping: not an option of DeepSpeed 0.19.8; did you mean gradient_clipping?" in str(
        found[0].message
    )
    assert found[0].filename == __file__
    by_path = outcomes(ds)
    assert by_path["gradient_cliping"] is OptionOutcome.UNKNOWN
    assert by_path["zero_optimization.offload_optimizer.device"] is OptionOutcome.LOST
    assert by_path["zero_optimization.zero_quantized_weights"] is OptionOutcome.OFF


@pytest.mark.filterwarnings("error:from_deepspeed:UserWarning")
def test_a_configuration_without_losses_does_not_warn():
    zerojax.from_deepspeed(config(zero_optimization={"stage": 2, "offload_param": {"device": "none"}}))


def test_groups_of_shards_and_tensor_parallelism_become_axes():
    ds = zerojax.from_deepspeed(config(zero_optimization={"stage": 3, "mics_shard_size": 4}), 8)
    assert ds.make_mesh == {"replica": 2}
    ds = zerojax.from_deepspeed(config(tensor_parallel={"autotp_size": 2}, train_micro_batch_size_per_gpu=2), 8)
    assert ds.make_mesh == {"model": 2} and ds.train_step["num_microbatches"] == 4  # of 32 rows on 4 devices
    with pytest.raises(ValueError, match="8 devices do not divide into groups"):
        zerojax.from_deepspeed(config(zero_optimization={"mics_shard_size": 3}), 8)


def test_buckets_are_counted_in_bytes():
    zero = {"stage": 2, "reduce_bucket_size": 1e6, "allgather_bucket_size": 2e6}
    ds = zerojax.from_deepspeed(config(bf16={"enabled": True}, zero_optimization=zero))
    assert ds.train_step["bucket_bytes"] == 4_000_000 and "prefetch" not in ds.train_step
    zero |= {"stage": 3, "stage3_prefetch_bucket_size": 0}
    ds = zerojax.from_deepspeed(config(bf16={"enabled": True}, zero_optimization=zero))
    assert ds.train_step["bucket_bytes"] == 2_000_000 and ds.train_step["prefetch"] == 0
    assert "bucket_bytes" not in zerojax.from_deepspeed(config(zero_optimization=True)).train_step


def test_activation_checkpointing_becomes_remat():
    block = {"partition_activations": True, "cpu_checkpointing": True}
    ds = zerojax.from_deepspeed(config(activation_checkpointing=block))
    assert ds.train_step["remat"] == zerojax.Remat(offload_inputs=True)
    assert outcomes(ds)["activation_checkpointing.partition_activations"] is OptionOutcome.UNNEEDED
    ds = zerojax.from_deepspeed(config(activation_checkpointing=block, tensor_parallel={"autotp_size": 2}), 8)
    assert ds.train_step["remat"] == zerojax.Remat(offload_inputs=True, partition_inputs=True)
    assert zerojax.from_deepspeed(config(activation_checkpointing={"profile": False})).train_step["remat"] == "full"


def test_gradient_clipping_is_that_of_the_release_unless_given():
    assert zerojax.from_deepspeed(config()).train_step["clip_norm"] == 1.0
    assert zerojax.from_deepspeed(config()).options[-1].path == "gradient_clipping"
    assert "clip_norm" not in zerojax.from_deepspeed(config(gradient_clipping=0)).train_step
    assert "clip_norm" not in zerojax.from_deepspeed(config(gradient_clipping=-1)).train_step
    assert zerojax.from_deepspeed(config(gradient_clipping=0.3)).train_step["clip_norm"] == 0.3


@pytest.mark.parametrize("kind", ["OneBitAdam", "Muon", None])
def test_an_optimizer_without_a_counterpart_has_to_be_passed(kind):
    given = config(optimizer={"type": kind, "params": {"lr": 1e-3, "freeze_step": 9}}) if kind else config()
    ds = zerojax.from_deepspeed(given)
    with pytest.raises(ValueError, match="no optimizer can be made of this configuration"):
        ds.optimizer  # noqa: B018
    if kind:
        assert outcomes(ds)["optimizer.type"] is outcomes(ds)["optimizer.params.lr"] is OptionOutcome.LOST


def test_parameters_that_an_optimizer_does_not_take_are_lost():
    ds = zerojax.from_deepspeed(config(optimizer={"type": "Lion", "params": {"lr": 1e-3, "eps": 1e-8, "fused": True}}))
    by_path = outcomes(ds)
    assert by_path["optimizer.params.eps"] is OptionOutcome.LOST
    assert by_path["optimizer.params.fused"] is OptionOutcome.UNNEEDED


def test_a_schedule_that_ends_needs_its_end():
    with pytest.raises(ValueError, match="give total_num_steps"):
        zerojax.from_deepspeed(config(optimizer={"type": "Adam"}, scheduler={"type": "WarmupCosineLR", "params": {}}))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"train_batch_size": 8, // rows\n}', "is not JSON"),
        ('{"train_batch_size": 8, "train_batch_size": 16}', "'train_batch_size' is given twice"),
        ("[1]", "has no options"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, text, error):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(error)):
        zerojax.from_deepspeed(tmp_path / "config.json")
    with pytest.raises(ValueError, match="cannot read"):
        zerojax.from_deepspeed(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"fp16": True}, "'fp16' is a block of options"),
        ({"optimizer": "Adam"}, "'optimizer' is a block of options"),
        ({"train_batch_size": "64"}, "train_batch_size is '64'"),
        ({"zero_optimization": {"stage": 4}}, "stage: 4 is not a ZeRO stage"),
        ({"communication_data_type": "int4"}, "communication_data_type is 'int4'"),
        ({"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}, "Adam cannot be made of its parameters"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "fast"}}}, "Adam cannot be made of its parameters"),
    ],
)
def test_invalid_values_are_refused(options, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        zerojax.from_deepspeed(config(**options))


def test_empty_blocks_and_numbers_with_a_point_are_accepted():
    ds = zerojax.from_deepspeed({"train_batch_size": 64.0, "zero_optimization": None, "fp16": {}}, 8)
    assert ds.batch_size == 64 and isinstance(ds.batch_size, int) and ds.zero["stage"] == 0


def test_both_precisions_are_refused():
    with pytest.raises(ValueError, match="fp16 and bf16 are both enabled"):
        zerojax.from_deepspeed(config(fp16={"enabled": True}, bf16={"enabled": True}))


def test_the_printed_code_is_the_configuration():
    """The first lines of the text run, and build the same arguments."""
    ds = zerojax.from_deepspeed(config(bf16={"enabled": True}, zero_optimization={"stage": 3, "mics_shard_size": 4}), 8)
    names = {"zerojax": zerojax, "loss_fn": loss}
    exec("\n".join(repr(ds).splitlines()[:4]), names)
    assert names["mesh"] == zerojax.make_mesh(**ds.make_mesh)
    want = zerojax.Zero(names["mesh"], **ds.zero).config.texts()
    assert names["zero"].config.texts() == want and math.isclose(ds.train_step["clip_norm"], 1.0)
