"""Builds the zerojax configuration that is equal to a configuration of DeepSpeed."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.deepspeed.batch_sizes import batch_sizes
from zerojax.deepspeed.counterparts import RELEASE, Counterpart, OptionOutcome, close, counterpart_of, mapped, unneeded
from zerojax.deepspeed.optimizers import RateSchedule, optimizer_of
from zerojax.deepspeed.reading import Given, read
from zerojax.program.remat import Remat
from zerojax.sharding.precision import DTYPE_FIELDS, Precision
from zerojax.sharding.stages import Stage
from zerojax.utils.warn import warn

_DTYPES = {"fp32": jnp.float32, "fp16": jnp.float16, "bf16": jnp.bfloat16}
_LONG_NAMES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
_NEVER = 2**31 - 1  # steps after which a static loss scale doubles
_CLIPPING = 1.0  # DeepSpeed's default
_NAME_WIDTH = 46  # of the column of names in a printed mapping; longer names have a line of their own


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a DeepSpeed configuration, and what became of it.

    Attributes:
        path: its place in the configuration, such as 'fp16.enabled'.
        value: its value, or None for a default of DeepSpeed that differs from ours.
        counterpart: what takes its place.
    """

    path: str
    value: Any
    counterpart: Counterpart

    @property
    def outcome(self) -> OptionOutcome:
        """Whether the option is mapped, lost, unknown, and so on."""
        return self.counterpart.outcome


@dataclasses.dataclass(frozen=True)
class DeepSpeedMapping:
    """The zerojax configuration that is equal to one of DeepSpeed. It prints as code and as a list of every option.

    Attributes:
        make_mesh: keyword arguments of `zerojax.make_mesh`.
        zero: keyword arguments of `zerojax.Zero`.
        train_step: keyword arguments of `zero.train_step`.
        fit: keyword arguments of `zerojax.fit`.
        batch_size: the rows of a batch over all devices, which `step(state, batch)` gets in one call.
        schedule: the learning rate by the count of updates, or None if it is constant.
        tx: the optimizer, or None if the configuration has none that can be mapped; see `optimizer`.
        options: every option of the configuration, and defaults of DeepSpeed that matter.
    """

    make_mesh: Mapping[str, int]
    zero: Mapping[str, Any]
    train_step: Mapping[str, Any]
    fit: Mapping[str, Any]
    batch_size: int
    schedule: RateSchedule | None
    tx: optax.GradientTransformation | None
    options: tuple[Option, ...]

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer with its schedule, for `zero.init`.

        Raises:
            ValueError: if the configuration has no optimizer, or one that has no counterpart.
        """
        if self.tx is None:
            given = {
                each.path: each.value for each in self.options if each.path in ("optimizer.type", "scheduler.type")
            }
            raise ValueError(
                f"from_deepspeed: no optimizer can be made of this configuration\n"
                f"  got:      {given or 'no block `optimizer`'}\n"
                f"  fix:      pass an optax transformation of your own to zero.init"
            )
        return self.tx

    def with_outcome(self, *outcomes: OptionOutcome) -> list[Option]:
        """The options with one of these outcomes."""
        return [option for option in self.options if option.outcome in outcomes]

    def __repr__(self) -> str:
        return "\n".join([*self._code(), *self._table()])

    def _code(self) -> Iterator[str]:
        yield f"# DeepSpeed {RELEASE} -> zerojax"
        yield f"mesh = zerojax.make_mesh({_arguments(self.make_mesh)})"
        yield f"zero = zerojax.Zero(mesh, {_arguments(self.zero)})"
        arguments = _arguments({"loss_fn": None} | dict(self.train_step))
        yield f"step = zero.train_step({arguments})  # {self.batch_size} rows"

    def _table(self) -> Iterator[str]:
        for outcome in OptionOutcome:
            options = self.with_outcome(outcome)
            yield from [f"# {outcome.value}: {outcome.meaning}"] if options else []
            for option in options:
                name = f"  {_assignment(option)}"
                lines = textwrap.wrap(option.counterpart.text, 116 - _NAME_WIDTH, break_long_words=False)
                if len(name) >= _NAME_WIDTH:
                    yield name
                    name = ""
                yield f"{name:{_NAME_WIDTH}s}{lines[0]}"
                yield from (f"{'':{_NAME_WIDTH}s}{line}" for line in lines[1:])


def _assignment(option: Option) -> str:
    if option.value is None:
        return f"{option.path} (default)"
    value = str(option.value)
    return f"{option.path} = {value if len(value) <= 20 else value[:19] + '…'}"


def _arguments(arguments: Mapping[str, Any]) -> str:
    return ", ".join(name if name == "loss_fn" else f"{name}={_shown(value)}" for name, value in arguments.items())


def _shown(value: Any) -> str:
    """A value as in code; of a dataclass only what differs from its defaults, dtypes by name."""
    if not isinstance(value, Precision | Remat):
        return repr(value)
    changed = {
        field.name: jnp.dtype(given).name if field.name in DTYPE_FIELDS else given
        for field in dataclasses.fields(value)
        if (given := getattr(value, field.name)) != field.default
    }
    return f"zerojax.{type(value).__name__}({', '.join(f'{name}={given!r}' for name, given in changed.items())})"


def from_deepspeed(
    config: str | Path | Mapping[str, Any], num_devices: int | None = None, *, auto: Mapping[str, Any] | None = None
) -> DeepSpeedMapping:
    """Builds the configuration that is equal to one of DeepSpeed.

        ds = zerojax.from_deepspeed("ds_config.json")
        print(ds)
        zero = zerojax.Zero(zerojax.make_mesh(**ds.make_mesh), **ds.zero)
        state = zero.init(Model, ds.optimizer)
        step = zero.train_step(loss_fn, **ds.train_step)

    Options are read as DeepSpeed 0.19.8 reads them. A warning names those that have no counterpart or are unknown.

    Args:
        config: the path of a JSON file, or its contents.
        num_devices: number of devices of all processes, by default that of JAX.
        auto: values for options that are "auto", by path: {'optimizer.params.lr': 1e-4}. Those that are left "auto" get
            DeepSpeed's default, if the result does not depend on them.

    Returns:
        A `DeepSpeedMapping`, which prints as code and as a list of all options.

    Raises:
        ValueError: if the file is not JSON, a value is invalid, the batch sizes do not agree with each other and with
            the number of devices, an option is "auto" on which the result depends, or both fp16 and bf16 are enabled.
    """
    given = read(config, auto or {})
    num_devices = num_devices or jax.device_count()
    make_mesh, mesh_notes = _mesh(given, num_devices)
    stage, precision = int(Stage.of(given.stage)), _precision(given)
    sizes = batch_sizes(given, num_devices // make_mesh.get("model", 1))
    remat, clipping = _remat(given, make_mesh), float(given.get("gradient_clipping", _CLIPPING))
    train_step = {
        "num_microbatches": sizes.num_microbatches,
        "clip_norm": clipping if clipping > 0 else None,  # as in DeepSpeed, 0 and less turn it off
        **_communication(given, precision),
        **remat.arguments,
    }
    optimizer = optimizer_of(given.block("optimizer"), given.block("scheduler"))
    notes = mesh_notes | optimizer.notes | remat.notes
    result = DeepSpeedMapping(
        make_mesh,
        {"stage": stage, "precision": precision},
        {name: value for name, value in train_step.items() if value is not None},
        {"log_every": given["steps_per_print"]} if given.get("steps_per_print") else {},
        sizes.num_rows,
        optimizer.schedule,
        optimizer.tx,
        (*_options(given, notes), *_defaults(given)),
    )
    if missing := result.with_outcome(OptionOutcome.UNKNOWN, OptionOutcome.LOST):
        lines = "\n".join(f"  {each.path}: {each.counterpart.text}" for each in missing)
        warn(f"from_deepspeed: options without a counterpart\n{lines}")
    return result


def _mesh(given: Given, num_devices: int) -> tuple[dict[str, int], dict[str, Counterpart]]:
    model = int(given.get("tensor_parallel.autotp_size", 0)) or 1
    shards = int(given.get("zero_optimization.mics_shard_size", 0))
    shards = shards if shards > 0 else num_devices // model  # -1 turns it off
    if num_devices % model or (num_devices // model) % shards:
        raise ValueError(
            f"from_deepspeed: {num_devices} devices do not divide into groups\n"
            f"  got:      tensor_parallel.autotp_size {model}, zero_optimization.mics_shard_size {shards}\n"
            f"  fix:      sizes whose product divides {num_devices}, or another num_devices"
        )
    replica = num_devices // model // shards
    sizes = {"replica": replica, "model": model}
    note = unneeded("one group of shards holds all devices") if replica == 1 else None
    notes = {"zero_optimization.mics_shard_size": note} if note else {}
    return {name: size for name, size in sizes.items() if size > 1}, notes


def _dtype(name: Any, path: str) -> Any:
    short = _LONG_NAMES.get(str(name).lower().removeprefix("torch."), str(name).lower())
    if short not in _DTYPES:
        raise ValueError(f"from_deepspeed: {path} is {name!r}\n  fix:      one of {', '.join(_DTYPES)}")
    return _DTYPES[short]


def _precision(given: Given) -> Precision:
    fp16, bf16 = bool(given.get("fp16.enabled", False)), bool(given.get("bf16.enabled", False))
    if fp16 and bf16:
        raise ValueError(
            "from_deepspeed: fp16 and bf16 are both enabled\n  fix:      enable one, as DeepSpeed requires"
        )
    compute = jnp.float16 if fp16 else jnp.bfloat16 if bf16 else jnp.float32
    if not (fp16 or bf16) and given.get("torch_autocast.enabled", False):
        compute = _dtype(given.get("torch_autocast.dtype", "bf16"), "torch_autocast.dtype")
    reduce = given.get("communication_data_type")
    narrow = (fp16 and given.get("fp16.fp16_master_weights_and_grads")) or (
        bf16 and given.get("bf16.bf16_master_weights_and_grads")
    )
    precision = Precision(
        param_dtype=compute if narrow else jnp.float32,
        compute_dtype=compute,
        reduce_dtype=compute if reduce is None else _dtype(reduce, "communication_data_type"),
    )
    return _with_loss_scale(given, precision) if fp16 else precision


def _with_loss_scale(given: Given, precision: Precision) -> Precision:
    if static := float(given.get("fp16.loss_scale", 0)):
        return dataclasses.replace(precision, initial_scale=static, growth_interval=_NEVER)
    scale, window = 2.0 ** given.get("fp16.initial_scale_power", 16), int(given.get("fp16.loss_scale_window", 1000))
    return dataclasses.replace(precision, initial_scale=scale, growth_interval=window)


def _communication(given: Given, precision: Precision) -> dict[str, Any]:
    """`bucket_bytes` and `prefetch`, where the configuration has numbers for them."""
    block = given.get_zero
    sizes = [(block("reduce_bucket_size"), precision.reduce_dtype)] if given.stage else []
    if given.stage in (1, 2):
        sizes.append((block("allgather_bucket_size"), precision.compute_dtype))
    bucket_bytes = [int(size) * jnp.dtype(dtype).itemsize for size, dtype in sizes if size]
    is_sequential = given.stage == 3 and block("stage3_prefetch_bucket_size") == 0
    return {
        "bucket_bytes": max(bucket_bytes, default=None),
        "prefetch": 0 if is_sequential else None,
        "audit": "error" if block("enable_sanity_checks") else None,
    }


@dataclasses.dataclass(frozen=True)
class _RematSettings:
    """The argument `remat`, and the counterparts that depend on the mesh."""

    arguments: dict[str, Any]
    notes: dict[str, Counterpart]


def _remat(given: Given, make_mesh: Mapping[str, int]) -> _RematSettings:
    """A configuration with the block uses it: the model calls `deepspeed.checkpointing.checkpoint`."""
    block = given.block("activation_checkpointing")
    if not block:
        return _RematSettings({}, {})
    partitions, offloads = bool(block.get("partition_activations")), bool(block.get("cpu_checkpointing"))
    notes = {}
    if partitions and "model" not in make_mesh:
        partitions = False
        notes["activation_checkpointing.partition_activations"] = unneeded(
            "there is no tensor parallelism to divide over"
        )
    remat = Remat(offload_inputs=offloads, partition_inputs=partitions)
    return _RematSettings({"remat": "full" if remat == Remat() else remat}, notes)


def _options(given: Given, notes: Mapping[str, Counterpart]) -> Iterator[Option]:
    """Every option of the configuration."""
    for path, value in given.values.items():
        counterpart = notes.get(path) or counterpart_of(path)
        if path in given.left_auto and counterpart.outcome is not OptionOutcome.UNKNOWN:
            counterpart = unneeded(f'"auto" is the default. {counterpart.text}')
        elif given.is_in_disabled_block(path):
            counterpart = Counterpart(OptionOutcome.OFF, "its block is not enabled")
        yield Option(given.spelled(path), value, counterpart.given(value))


def _defaults(given: Given) -> Iterator[Option]:
    """Defaults of DeepSpeed that decide about the result and are not ours."""
    if "gradient_clipping" not in given.values:
        text = f"train_step(clip_norm={_CLIPPING}), the default of DeepSpeed {RELEASE}; 0.16 did not clip by default"
        yield Option("gradient_clipping", None, close(text))
    if given.get("fp16.enabled", False) and not given.get("fp16.loss_scale", 0):
        for name, text in (("initial_scale_power", "2**16"), ("loss_scale_window", "1000 steps")):
            if f"fp16.{name}" not in given.values:
                yield Option(f"fp16.{name}", None, mapped(text))
    if not given.block("activation_checkpointing"):
        return
    text = "train_step(remat=) for each unit; in DeepSpeed the model's calls of checkpoint() decide"
    yield Option("activation_checkpointing", None, close(text))
