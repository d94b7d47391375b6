"""Parity with the plain single-device step for all settings of memory and schedule, on every model of the zoo.

No setting changes what is computed, so the tolerances are those of fp32.
"""

from typing import Any, NamedTuple

import pytest
from support import zoo
from support.parity import assert_close, batches, reference, train, with_constant_init, with_global_batch_norm

import zerojax
from zerojax import Remat, Zero


class Setting(NamedTuple):
    """Options of a step, the stage, and the size of the model axis."""

    options: dict[str, Any]
    stage: int = 3
    model: int | None = None


SMALL_BUCKET = 4096  # bytes: larger leaves of the zoo are moved in pieces, smaller ones share a bucket

SETTINGS = {
    "full_stage0": Setting({"remat": "full"}, stage=0),
    "full": Setting({"remat": "full"}),
    "dots": Setting({"remat": "dots"}),
    "offloaded": Setting({"remat": Remat(offload_inputs=True)}),
    "partitioned": Setting({"remat": Remat(partition_inputs=True)}, model=2),
    "prefetch0": Setting({"prefetch": 0}),
    "prefetch2": Setting({"prefetch": 2}),
    "buckets_stage0": Setting({"bucket_bytes": SMALL_BUCKET}, stage=0),
    "buckets_stage1": Setting({"bucket_bytes": SMALL_BUCKET}, stage=1),
    "buckets_stage2": Setting({"bucket_bytes": SMALL_BUCKET}, stage=2),
    "buckets": Setting({"bucket_bytes": SMALL_BUCKET}),
    "combined": Setting(
        {
            "remat": Remat(partition_inputs=True, offload_inputs=True),
            "prefetch": 2,
            "bucket_bytes": SMALL_BUCKET,
        },
        model=2,
    ),
}
MODELS = [name for name, model in zoo.ZOO.items() if not model.dropout]
DEFAULT = [
    *((name, "combined") for name in ("gpt_linen_scan", "unet")),
    *(("gpt_linen_scan", setting) for setting in ("dots", "prefetch2", "buckets_stage2")),
    ("gpt_nnx", "full"),
    ("unused", "full_stage0"),
    ("unused", "buckets_stage1"),
]


def cases():
    for name in MODELS:
        for setting in SETTINGS:
            marks = [pytest.mark.xdist_group(f"{name}-fp32-k1")]  # as in test_parity: one process shares the plain run
            if (name, setting) not in DEFAULT:
                marks.append(pytest.mark.full)
            yield pytest.param(name, setting, marks=marks, id=f"{name}-{setting}")


@pytest.mark.parametrize(("name", "setting"), list(cases()))
def test_training_follows_the_plain_step(name, setting):
    setting, model = SETTINGS[setting], with_constant_init(with_global_batch_norm(name))
    zero = Zero(zerojax.make_mesh(model=setting.model), setting.stage)
    assert_close(train(zero, model, batches(model), **setting.options)[0], reference(name))
