"""The memory of each setting of `Zero(offload=...)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from zerojax.offload import checks
from zerojax.offload.host_params import HostGradients, HostSums, HostWeights
from zerojax.offload.streamed_update import StreamedUpdate
from zerojax.program.part import GradientSink, Weights
from zerojax.sharding.mesh import on_tpus
from zerojax.sharding.placement import Leaf
from zerojax.step import optimizers
from zerojax.step.config import GradientSums, Memory, ZeroConfig
from zerojax.step.state import StateLayout, TrainState
from zerojax.step.update import Update
from zerojax.utils.typing import AnyMesh, Array, DTypeLike


class AllOnDevices(Memory):
    """Nothing is in host memory.

    Optimizers whose state is stored in few bits update it in pieces. Compilers would otherwise compute it for whole
    arrays in fp32, before they round or encode it.
    """

    def update(
        self, config: ZeroConfig, layout: StateLayout, dtypes: Sequence[DTypeLike], scales: bool
    ) -> Update | None:
        # A piece may be a part of any dim, and other axes of the mesh may divide these.
        if not optimizers.stores_few_bits(layout.tx) or config.other_axes:
            return None
        return StreamedUpdate(config, layout, dtypes, scales)


class OptimizerInHost(Memory):
    """The optimizer's state is in host memory, with the master copy of the parameters."""

    def check(self, config: ZeroConfig, layout: StateLayout, platform: str | None = None) -> None:
        dtypes = [leaf.dtype for leaf in layout.leaves if leaf.trainable]
        StreamedUpdate(config, layout, dtypes, scales=False)  # raises if it cannot be computed piece by piece
        checks.check_layouts(config, layout, platform)

    def check_state(self, config: ZeroConfig, state: TrainState) -> None:
        checks.check_may_pin(config, state)

    def update(
        self, config: ZeroConfig, layout: StateLayout, dtypes: Sequence[DTypeLike], scales: bool
    ) -> Update | None:
        return StreamedUpdate(config, layout, dtypes, scales)


@dataclasses.dataclass(frozen=True)
class ParamsInHost(OptimizerInHost):
    """The parameters are in host memory too, and the gradients go there.

    Attributes:
        for_tpus: whether the devices are TPUs.
    """

    for_tpus: bool

    def weights(self, shards: Sequence[Array], leaves: Sequence[Leaf]) -> Weights:
        return HostWeights(shards, leaves)

    def gradients(self) -> GradientSink:
        return HostGradients({}, for_tpus=self.for_tpus)

    def sums(self, dtype: DTypeLike, shards: Sequence[Array], trainable: Sequence[bool]) -> GradientSums:
        return HostSums(dtype, shards, trainable, self.for_tpus)


def memory_of(offload: str, mesh: AnyMesh) -> Memory:
    """The memory of a setting: 'none', 'optimizer' or 'params'."""
    if offload == "params":
        return ParamsInHost(on_tpus(mesh))
    return OptimizerInHost() if offload == "optimizer" else AllOnDevices()
