"""Reads a configuration of DeepSpeed: from JSON to values by path, with "auto" replaced."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerojax.deepspeed.counterparts import ALIASES, COUNTERPARTS

_ZERO_BLOCK = "zero_optimization"
# Options on which the losses or the parallelism depend: "auto" needs a value. Of the batch sizes, two of three will do.
_DECISIVE = (
    "gradient_clipping", "fp16.enabled", "bf16.enabled", "zero_optimization.stage", "communication_data_type",
    "optimizer.params.*", "scheduler.params.*", "tensor_parallel.autotp_size",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Given:
    """The options of a configuration by path, such as 'fp16.enabled'.

    Attributes:
        values: path -> value, under the names of `counterparts.COUNTERPARTS`.
        names: path -> the path that the configuration has instead, where that differs.
        left_auto: paths of options that are "auto" and got no value.
    """

    values: Mapping[str, Any]
    names: Mapping[str, str]
    left_auto: frozenset[str]

    def get(self, path: str, default: Any = None) -> Any:
        """The value of an option, or the default if it is missing, None or "auto"."""
        value = None if path in self.left_auto else self.values.get(path)
        return default if value is None else value

    def __getitem__(self, path: str) -> Any:
        return self.values[path]

    def get_zero(self, name: str) -> Any:
        """An option of the block `zero_optimization`, or None."""
        return self.get(f"{_ZERO_BLOCK}.{name}")

    @property
    def stage(self) -> int:
        return int(self.get(f"{_ZERO_BLOCK}.stage", 0))

    def block(self, name: str) -> dict[str, Any]:
        """The options of a block and of the blocks in it, without those left "auto"."""
        found: dict[str, Any] = {}
        for path, value in self.values.items():
            if path.startswith(f"{name}.") and path not in self.left_auto:
                *outer, last = path.removeprefix(f"{name}.").split(".")
                inner = found
                for key in outer:
                    inner = inner.setdefault(key, {})
                inner[last] = value
        return found

    def is_in_disabled_block(self, path: str) -> bool:
        """Whether a block around the option says `enabled: false`, or the option says so itself."""
        blocks = path.split(".")[:-1]
        around = (".".join(blocks[:count]) for count in range(1, len(blocks) + 1))
        return any(self.get(f"{block}.enabled", True) is False for block in around)

    def spelled(self, path: str) -> str:
        """The path as the configuration has it."""
        return self.names.get(path, path)


def read(config: str | Path | Mapping[str, Any], auto: Mapping[str, Any]) -> Given:
    """Reads a configuration, and replaces "auto" by the values in `auto`.

    Raises:
        ValueError: if the file is missing or not JSON, a block is not one, a value is missing for an option that is
            "auto" and decisive, or `auto` names an option that is not "auto".
    """
    values, names = {}, {}
    for spelled, value in _flat(config if isinstance(config, Mapping) else _parsed(Path(config))):
        path = _canonical(spelled)
        values[path] = value
        if path != spelled:
            names[path] = spelled
    if isinstance(old := values.pop(_ZERO_BLOCK, None), bool):  # the form before there was a block
        values[f"{_ZERO_BLOCK}.stage"], names[f"{_ZERO_BLOCK}.stage"] = int(old), _ZERO_BLOCK
    _check_blocks(values)
    is_auto = {path for path, value in values.items() if value == "auto" and _may_be_auto(path)}
    unused = sorted(set(map(_canonical, auto)) - is_auto)
    if unused:
        raise ValueError(
            f'from_deepspeed: auto names {unused[0]!r}, which is not "auto" in the configuration\n'
            f'  got:      options that are "auto": {", ".join(sorted(is_auto)) or "(none)"}\n'
            f"  fix:      name one of these, or change the configuration"
        )
    values |= {_canonical(path): value for path, value in auto.items()}
    left = is_auto - set(map(_canonical, auto))
    if missing := sorted(filter(_is_decisive, left)):
        raise ValueError(
            f'from_deepspeed: options are "auto", which the Trainer of Hugging Face replaces by its arguments\n'
            f"  got:      {', '.join(missing)}\n"
            f"  fix:      from_deepspeed(config, auto={{{missing[0]!r}: ..., ...}}), with a value for each"
        )
    return Given(values, names, frozenset(left))


def _check_blocks(values: Mapping[str, Any]) -> None:
    blocks = {name.partition(".")[0] for name in COUNTERPARTS if "." in name} - COUNTERPARTS.keys()
    for path in blocks & values.keys():
        if values[path] not in (None, {}):
            raise ValueError(
                f"from_deepspeed: {path!r} is a block of options\n"
                f"  got:      {values[path]!r}\n"
                f"  fix:      an object, such as {{{path!r}: {{...}}}}"
            )


def _parsed(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise ValueError(
            f"from_deepspeed: cannot read {path}\n"
            f"  got:      {error.strerror}\n"
            f"  fix:      the path of a JSON file, or a dict"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"from_deepspeed: {path} is not JSON\n"
            f"  got:      {error}\n"
            f"  fix:      comments and trailing commas have to go"
        ) from None
    if not isinstance(config, dict):
        raise ValueError(f"from_deepspeed: {path} has no options\n  got:      {type(config).__name__}, not an object")
    return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"from_deepspeed: {twice!r} is given twice\n  fix:      remove one of the two")
    return found


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of each option. A block without options is one itself."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _canonical(path: str) -> str:
    block, dot, rest = path.partition(".")
    path = f"{ALIASES.get(block, block)}{dot}{rest}"
    return ALIASES.get(path, path)


def _may_be_auto(path: str) -> bool:
    """Whether "auto" stands for a value of the Trainer. In a few blocks, DeepSpeed has a meaning of its own for it."""
    return not path.startswith(("data_types.", "pipeline.", f"{_ZERO_BLOCK}.zenflow."))


def _is_decisive(path: str) -> bool:
    return path in _DECISIVE or any(
        rule.endswith("*") and path.startswith(rule.removesuffix("*")) for rule in _DECISIVE
    )
