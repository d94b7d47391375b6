"""Steps of a GPT whose state is offloaded, compiled for described devices."""

import functools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import gpt
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax import targets
from zerojax.offload import host_pieces
from zerojax.plan.buffers import read_dump
from zerojax.plan.program import compile_with_dump, temporaries_bytes

PIECES_BYTES = 2**20  # small models have several pieces too
SEQ = 128


class Compiled(NamedTuple):
    """A compiled step, the bytes of its temporaries on a device and in host memory, its state, and its audit."""

    program: Any
    temporaries_bytes: int
    host_bytes: int
    state: zerojax.TrainState
    audit: zerojax.Audit


@functools.cache
def compiled(target, offload, layers, width=256, scan=True, num_microbatches=1, vocab=512, pieces_bytes=PIECES_BYTES):
    config = gpt.Config(width=width, layers=layers, heads=4, vocab=vocab, seq=SEQ, scan=scan, dtype=jnp.bfloat16)
    devices = targets.devices(target)
    zero = zerojax.Zero(zerojax.make_mesh(devices=devices), 3, "bf16", offload=offload)
    state = zero.eval_init(gpt.create(config), optax.adamw(1e-3))
    batch = gpt.batch_aval(config, num_microbatches * len(devices))
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(host_pieces, "PIECES_BYTES", pieces_bytes)
        step = zero.train_step(gpt.loss, remat="full", num_microbatches=num_microbatches)
        program = compile_with_dump(step.trace(state, batch), targets.platform(target), Path(folder), {})
        audit = zerojax.audit_step(program, step.expectation(state, batch))
        temporaries = temporaries_bytes(program.memory_analysis(), lambda: read_dump(Path(folder)))
        return Compiled(program, *temporaries, state, audit)
