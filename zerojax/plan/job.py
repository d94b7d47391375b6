"""What is planned: a job, such as that of a preset, the settings of its step, and changes of them that help."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from zerojax.analysis.hardware import Chip
from zerojax.contrib.low_bit import low_bit_moments, stochastic_rounding
from zerojax.plan import transformer
from zerojax.plan.transformer import LanguageModel, Transformer, ViT, blockwise_attention
from zerojax.utils.typing import Array


class Job(NamedTuple):
    """The training job that is planned: a model, its optimizer, its loss and the shapes of its batch.

    Attributes:
        create_model: creates the model, as in `Zero.init`.
        tx: the optax transformation.
        loss_fn: the loss, as in `Zero.train_step`.
        batch: `batch(rows) -> tree of avals`, where `rows` is the number of rows on all devices together.
        rows: the default number of rows on a device in a microbatch.
        tokens: tokens in a row, for tokens/s.
        options: further options of `Zero`, such as `axis_names`.
    """

    create_model: Callable[..., Any]
    tx: optax.GradientTransformation
    loss_fn: Callable[..., Any]
    batch: Callable[[int], Any]
    rows: int = 1
    tokens: int = 1
    options: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of a step.

    Attributes:
        stage, precision: as in `Zero`.
        rows: rows of a device in a microbatch; None for the default of the model.
        num_microbatches: as in `Zero.train_step`.
        remat: 'none', 'dots', 'full', or 'offload', which is 'full' with the inputs of layers in host memory.
        prefetch, bucket_bytes: as in `Zero.train_step`.
        replica, model: sizes of the mesh axes, as in `make_mesh`.
        offload: as in `Zero`.
        moment_bits: 8 or 16 for `zerojax.low_bit_moments` around the optimizer of the job, and with 'bf16_params'
            `zerojax.stochastic_rounding` around both; None for the optimizer as it is.
    """

    stage: int = 3
    precision: str = "bf16"
    rows: int | None = None
    num_microbatches: int = 1
    remat: str = "full"
    prefetch: int = 1
    bucket_bytes: int | None = None
    replica: int = 1
    model: int | None = None
    offload: str = "none"
    moment_bits: int | None = None

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns an optimizer with moments in `moment_bits`.

        Args:
            tx: the optimizer of the job.
        """
        if self.moment_bits is None:
            return tx
        tx = low_bit_moments(tx, self.moment_bits)
        return stochastic_rounding(tx) if self.precision == "bf16_params" else tx

    def python(self) -> str:
        """Returns the Python calls that build the step."""
        given = (("replica", self.replica), ("model", self.model))
        mesh = ", ".join(f"{name}={size}" for name, size in given if size not in (None, 1))
        remat = "zerojax.Remat(offload_inputs=True)" if self.remat == "offload" else repr(self.remat)
        step = [f"remat={remat}", f"prefetch={self.prefetch}"]
        step += [f"num_microbatches={self.num_microbatches}"] if self.num_microbatches > 1 else []
        step += [f"bucket_bytes={self.bucket_bytes}"] if self.bucket_bytes else []
        tx = f"zerojax.low_bit_moments(tx, {self.moment_bits})"
        tx = f"zerojax.stochastic_rounding({tx})" if self.precision == "bf16_params" else tx
        first = f"tx = {tx}\n" if self.moment_bits else ""
        zero = [f"zerojax.make_mesh({mesh})", f"stage={self.stage}", f"precision={self.precision!r}"]
        zero += [f"offload={self.offload!r}"] if self.offload != "none" else []
        return f"{first}zero = zerojax.Zero({', '.join(zero)})\nstep = zero.train_step(loss_fn, {', '.join(step)})"


DEFAULT_SETTINGS = Settings()


def _gpt(layers: int, width: int, heads: int, rows: int, seq: int = 1024) -> Transformer:
    """The shapes of a GPT-2: an MLP four times as wide as the activations, and a head tied to the embedding."""
    return Transformer(layers, width, heads, heads, 4 * width, 50304, seq, rows, tied=True)


def _llama3(layers: int, width: int, heads: int, hidden: int) -> Transformer:
    return Transformer(layers, width, heads, 8, hidden, 128256, 8192, llama=True)


# Sources. GPT-2: the configurations published with its weights; the vocabulary of 50257 is padded to a multiple of 128,
# since products of other sizes are padded anyway. gpt-7.5b, -128b, -1t: the ZeRO paper gives the number of parameters,
# which 12 x layers x width^2 matches, with heads of 128; the layers and width of 1T are those of ZeRO-Infinity (arXiv
# 2104.07857, table 1). Llama 3: table 3 of arXiv 2407.21783. Mixtral 8x7B: table 1 of arXiv 2401.04088. ViT-H/14: table
# 1 of arXiv 2010.11929, at 224 x 224 pixels.
_SHAPES = {
    "gpt2-124m": _gpt(12, 768, 12, rows=16),
    "gpt2-1.5b": _gpt(48, 1600, 25, rows=8),
    "gpt-7.5b": _gpt(36, 4096, 32, rows=4),
    "gpt-128b": _gpt(70, 12288, 96, rows=2),
    "gpt-1t": _gpt(128, 25600, 200, rows=1),
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3-405b": _llama3(126, 16384, 128, 53248),
    "mixtral-8x7b": Transformer(32, 4096, 32, 8, 14336, 32000, 4096, llama=True, experts=8, experts_per_token=2),
    "vit-h14": Transformer(32, 1280, 16, 16, 5120, 1000, 256, rows=64, patch=14),
}
PRESETS = {name: dataclasses.replace(shapes, name=name) for name, shapes in _SHAPES.items()}


def job_of(config: Transformer, attention: Callable[..., Array] | None = None) -> Job:
    """Returns the job of a preset, with AdamW.

    Args:
        config: the shapes of the model.
        attention: one of `zerojax.plan.transformer`; by default `blockwise_attention`, which runs everywhere.
    """
    attend = attention or blockwise_attention
    create = lambda rngs: (ViT if config.patch else LanguageModel)(config, attend, rngs)
    return Job(
        create, optax.adamw(1e-4), lambda model, batch: model.loss(batch), _batch(config), config.rows, config.seq
    )


def num_parameters(config: Transformer) -> int:
    """The number of parameters of a preset."""
    params = jax.eval_shape(lambda: nnx.state(job_of(config).create_model(nnx.Rngs(0)), nnx.Param))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _batch(config: Transformer) -> Callable[[int], dict[str, jax.ShapeDtypeStruct]]:
    if not config.patch:
        return lambda rows: {"tokens": jax.ShapeDtypeStruct((rows, config.seq + 1), jnp.int32)}
    patches = (config.seq, config.patch**2 * 3)
    return lambda rows: {
        "patches": jax.ShapeDtypeStruct((rows, *patches), jnp.float32),
        "labels": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }


def shapes_of(what: str | Transformer) -> Transformer | None:
    """The shapes of a preset or of a described model; None for the user's function."""
    return PRESETS.get(what) if isinstance(what, str) else what


def find_job(what: str | Transformer, chip: Chip | None = None, compiled: bool = False) -> Job:
    """Returns the job of a preset, of a described model, or of the user's function.

    Args:
        what: as in `plan`.
        chip: the chip of the target. Programs for GPUs use fused attention, if it takes the heads of the model.
        compiled: whether the job will be compiled. If not, it can only be traced, which needs no package of the
            platform.

    Raises:
        ValueError: if there is no such preset or function, or if the function does not return a `Job`.
    """
    if (shapes := shapes_of(what)) is not None:
        fused = transformer.cudnn_attention if compiled else transformer.cudnn_attention_for_tracing
        return job_of(shapes, fused if chip and can_fuse(shapes, chip) else None)
    assert isinstance(what, str)
    module, colon, name = what.partition(":")
    if not colon:
        raise ValueError(f"plan: no preset {what!r}\n  fix:      use one of {', '.join(PRESETS)}, or 'module:function'")
    try:
        found = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"plan: {what!r} cannot be called\n  got:      {error}\n"
            f"  fix:      pass 'module:function', with a module that Python can import (PYTHONPATH=.)"
        ) from error
    if not isinstance(found, Job):
        raise ValueError(
            f"plan: {what!r} does not return a Job\n  got:      {type(found).__name__}\n"
            f"  fix:      return zerojax.plan.Job(create_model, tx, loss_fn, batch, rows=..., tokens=...)"
        )
    return found


def can_fuse(shapes: Transformer, chip: Chip) -> bool:
    """Whether the attention of a model can be a fused kernel on a chip."""
    head_dim = shapes.width_of_head
    return (
        chip.platform == "cuda"
        and not shapes.caps_scores
        and head_dim <= widest_head(chip)
        and head_dim % transformer.FUSED_HEAD_MULTIPLE == 0
    )


def widest_head(chip: Chip) -> int:
    """The width of the widest heads that fused attention takes on a chip."""
    return transformer.widest_fused_head((8, 0) if chip.name == "a100" else (9, 0))


REMATS = ("none", "dots", "full", "offload")  # from the most memory to the least

Change = tuple[str, Settings, int]


def memory_reductions(settings: Settings, num_devices: int) -> Iterator[Change]:
    """Yields what may save memory: (its text, the settings, the number of devices)."""
    change = functools.partial(dataclasses.replace, settings)
    if settings.stage < 3 and num_devices > 1:
        yield "stage 3", change(stage=3), num_devices
    for remat in REMATS[REMATS.index(settings.remat) + 1 :] if settings.remat in REMATS else ():
        yield f"remat={remat!r}", change(remat=remat), num_devices
    if settings.offload == "none":
        offloaded = change(offload="optimizer")
        yield "offload='optimizer' (its state in host memory)", offloaded, num_devices
    if settings.offload != "params" and settings.replica == 1 and (settings.stage == 3 or num_devices == 1):
        yield "offload='params' (all of the state in host memory)", change(offload="params"), num_devices
    bits = settings.moment_bits or 8
    if settings.moment_bits is None:
        yield "zerojax.low_bit_moments(tx) (rounded to 8 bits)", change(moment_bits=bits), num_devices
    if settings.precision == "bf16":
        both = change(moment_bits=bits, precision="bf16_params")
        yield f"precision='bf16_params' and {bits}-bit moments (no master copy)", both, num_devices
    if settings.rows and settings.rows % 2 == 0:
        twice = 2 * settings.num_microbatches
        halved = change(rows=settings.rows // 2, num_microbatches=twice)
        yield f"{twice} microbatches of {settings.rows // 2} rows", halved, num_devices
    if settings.stage in (1, 2) and settings.bucket_bytes is None:
        yield "bucket_bytes=2**28 (moves stacks in pieces)", change(bucket_bytes=2**28), num_devices
    if settings.prefetch:
        yield "prefetch=0 (each unit waits for its weights)", change(prefetch=0), num_devices
    if settings.stage:
        yield f"{4 * num_devices} devices", settings, 4 * num_devices


def uses_of_free_memory(settings: Settings, num_devices: int) -> Iterator[Change]:
    """Yields what may make a step faster that has free memory; see `memory_reductions`."""
    change = functools.partial(dataclasses.replace, settings)
    if settings.offload == "params":
        yield "offload='optimizer' (no copies of weights)", change(offload="optimizer"), num_devices
    if settings.offload != "none":
        yield "offload='none' (no copies of the optimizer's state)", change(offload="none"), num_devices
    for remat in REMATS[: REMATS.index(settings.remat)] if settings.remat in REMATS else ():
        yield f"remat={remat!r} (less recomputation)", change(remat=remat), num_devices
    if settings.rows:
        yield (
            f"{2 * settings.rows} rows (twice the work for the same communication)",
            change(rows=2 * settings.rows),
            num_devices,
        )
    if settings.stage and num_devices > 1:  # one device has all and sends nothing, at every stage
        lower = settings.stage - 1
        yield f"stage {lower}{' (less communication)' * (settings.stage == 3)}", change(stage=lower), num_devices
