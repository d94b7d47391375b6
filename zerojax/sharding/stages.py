"""The stages of ZeRO: which model states each of them shards over the data axes."""

from __future__ import annotations

import enum


class Stage(enum.IntEnum):
    """A stage, equal to its number. Each stage shards one more kind of model states than the stage before.

    Source: ZeRO, section 5.
    """

    DATA_PARALLEL = 0
    P_OS = 1
    P_OS_G = 2
    P_OS_G_P = 3

    @classmethod
    def of(cls, stage: int) -> Stage:
        """The stage with a given number.

        Raises:
            ValueError: if `stage` is not an integer from 0 to 3.
        """
        if stage not in list(cls) or isinstance(stage, bool):
            numbers = ", ".join(str(each.value) for each in cls)
            raise ValueError(f"stage: {stage!r} is not a ZeRO stage\n  fix:      one of {numbers}")
        return cls(stage)

    @property
    def title(self) -> str:
        """The stage with its name in the paper, such as 'stage 2 (P_os+g)'."""
        names = ("data parallelism", "P_os", "P_os+g", "P_os+g+p")
        return f"stage {self.value} ({names[self]})"

    @property
    def limit_text(self) -> str:
        """What the stage shards, as the reason why it does not shard something else."""
        shards = ("nothing", "the optimizer state only", "the gradients and the optimizer state only", "everything")
        return f"stage {self.value} shards {shards[self]}"

    @property
    def shards_optimizer(self) -> bool:
        """Whether optimizer state and the master copy of parameters are sharded."""
        return self >= Stage.P_OS

    @property
    def shards_grads(self) -> bool:
        """Whether gradients are reduce-scattered unit by unit, in every microbatch."""
        return self >= Stage.P_OS_G

    @property
    def shards_params(self) -> bool:
        """Whether parameters are sharded, and gathered unit by unit."""
        return self >= Stage.P_OS_G_P
