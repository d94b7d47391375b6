"""Maps the configurations of DeepSpeed to zerojax, and names each option that has no counterpart."""

from zerojax.deepspeed.mapping import DeepSpeedMapping, from_deepspeed

__all__ = ["DeepSpeedMapping", "from_deepspeed"]
