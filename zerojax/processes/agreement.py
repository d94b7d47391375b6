"""Compares what must be equal in all processes: configurations, batches, programs, and what they see in a directory.

The texts travel through the key-value store of process 0, not through the devices: processes that run different
programs would wait for each other in a collective, or compute with each other's values.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax._src.distributed
import numpy as np
from jax.experimental import multihost_utils

from zerojax.utils.text import error_text, masked

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "zerojax")
TIMEOUT_S = 300
_SEEN_TIMEOUT_S = 10  # for a file of process 0 to appear in the others, on a file system that they share
_POLL_S = 0.05
_BLOCKS = 1024  # whose checksums find the first line that differs, first among blocks and then within one
_MAX_LINE = 300  # characters of a line in an error
_MARGIN = "\n" + 12 * " "  # between the lines of what an error got

_call_numbers = itertools.count()  # of messages, which all processes send equally often


def agree(config: Mapping[str, object], *, timeout_s: int = TIMEOUT_S) -> None:
    """Checks that all processes have the same configuration and the same versions of Python and of packages.

    All processes must call this function, and equally often. Values are compared by their JSON text with sorted keys:
    1 and 1.0 differ, a tuple and a list with the same items do not.

    Args:
        config: the configuration, by field name.
        timeout_s: how long to wait for the other processes, in seconds.

    Raises:
        ValueError: if the processes differ; it names the field, the values, and the processes that have them, and is
            raised in all processes. Also if a value is not JSON.
        TimeoutError: if processes did not call this function; it names them.

    Cost: one message to process 0 with the configuration, and one message back with those of all processes.
    """
    own = check_config(config) | {name: json.dumps(version) for name, version in versions().items()}
    fix = "start all processes with the same configuration and the same packages"
    agree_on(own, "configurations or versions", fix, "agree()", timeout_s)


def agree_on(fields: Mapping[str, str], what: str, fix: str, call: str, timeout_s: int = TIMEOUT_S) -> None:
    """Checks that all processes have the same texts, by name, as `agree` does.

    The errors say `what` they are, in the plural, the `fix`, and which `call` a process has not made in time.
    """
    if not jax.distributed.is_initialized():
        return
    texts = _all_gather_text(json.dumps({"call": call, **fields}), call, timeout_s)
    gathered = {index: json.loads(text) for index, text in texts.items()}
    found = dict.fromkeys(itertools.chain(*gathered.values()))
    differences = [line for name in found if (line := _difference(name, gathered))]
    if differences:
        raise ValueError(error_text(f"processes: their {what} differ", _MARGIN.join(differences), fix))


def with_equal_texts(text: str, call: str) -> list[list[int]]:
    """The groups of processes that have the same text, each of two or more. All processes call it.

    Raises:
        ValueError: if another process makes another call.
        TimeoutError: if processes did not make this call; it names them.
    """
    if not jax.distributed.is_initialized():
        return []
    texts = _all_gather_text(json.dumps({"call": call, "text": text}), call)
    gathered = {index: json.loads(text) for index, text in texts.items()}
    if difference := _difference("call", gathered):
        fix = "the same calls in all processes, in the same order"
        raise ValueError(error_text("processes: their calls differ", difference, fix))
    groups = _grouped({index: fields["text"] for index, fields in gathered.items()}).values()
    return [group for group in groups if len(group) > 1]


def run_in_process_0(function: Callable[[], object], call: str, timeout_s: int = TIMEOUT_S) -> None:
    """Calls a function in process 0, such as locking a file. All processes call this, and wait for its end.

    An error of the function is raised in process 0, and in the others a ValueError with its text.
    """
    if not jax.distributed.is_initialized():
        function()
        return
    error = None
    if distributed_state().process_id == 0:
        try:
            function()
        except Exception as raised:
            error = raised
    text = _all_gather_text("" if error is None else str(error) or repr(error), call, timeout_s, [0])[0]
    if error is not None:
        raise error
    if text:
        raise ValueError(f"{text}\n  (this is the error of process 0)")


def broadcast_from_process_0(numbers: Sequence[int]) -> list[int]:
    """Returns the numbers of process 0 in every process.

    While a directory changes, processes may list different steps in it; this makes them agree.
    """
    if jax.process_count() == 1:
        return list(numbers)
    count = int(multihost_utils.broadcast_one_to_all(np.array(len(numbers))))
    padded = np.array(numbers if jax.process_index() == 0 else [0] * count, np.int32)
    return [int(number) for number in multihost_utils.broadcast_one_to_all(padded)] if count else []


def agree_on_lines(lines: Sequence[str], what: str, fix: str, call: str) -> None:
    """Checks that all processes have the same lines, such as those of a program. An error has the first that differs.

    Cost: one message of 64 bytes from each process. If they differ, two processes send up to 10 kB more.
    """
    if not jax.distributed.is_initialized():
        return
    groups = list(_grouped(_all_gather_text(_digest(lines), call)).values())
    if len(groups) == 1:
        return
    number, found = _first_difference(lines, [group[0] for group in groups[:2]], call)
    texts = [text.strip()[:_MAX_LINE] or "nothing" for text in found]
    shown = [f"{text} in {names(group)}" for text, group in zip(texts, groups[:2], strict=True)]
    others = [index for group in groups[2:] for index in group]
    shown += [f"others in {names(others)}"] if others else []
    raise ValueError(error_text(f"processes: their {what} differ", f"line {number + 1}: {'; '.join(shown)}", fix))


def _first_difference(lines: Sequence[str], compared: Sequence[int], call: str) -> tuple[int, list[str]]:
    """The first line in which two processes differ, and the texts of both. All processes call it."""

    def of_both(text: str) -> list[str]:
        texts = _all_gather_text(text, call, senders=compared)
        return [texts[index] for index in compared]

    first, size = 0, max(map(int, of_both(str(len(lines)))))
    while size > 1:
        block = -(-size // _BLOCKS)
        checksums = [_digest(lines[i : i + block])[:16] for i in range(first, first + size, block)]
        ours, theirs = map(json.loads, of_both(json.dumps(checksums)))
        first += block * next(i for i, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y)
        size = block
    return first, of_both(lines[first] if first < len(lines) else "")


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(lines)).encode()).hexdigest()


def agree_on_directory(directory: Path) -> None:
    """Checks that all processes see the same directory. It must exist in process 0, which writes an empty file there.

    Raises ValueError in all processes if the file did not appear in others within 10 s, and OSError in process 0 if it
    cannot be written.
    """
    if not jax.distributed.is_initialized():
        return
    # Write a file in process 0, and look for it in all.
    call, mark = f"checkpoints in {directory}", None
    if distributed_state().process_id == 0:
        # A name that no process has looked up before, so that no file system has cached its absence.
        mark = directory / f".shared_{uuid.uuid4().hex}"
        mark.touch()
    try:
        name = _all_gather_text(mark.name if mark else "", call)[0]
        seen = _appears(directory / name)
        texts = _all_gather_text(json.dumps([seen, platform.node(), str(directory)]), call)
    finally:
        if mark:
            mark.unlink(missing_ok=True)
    # Name those that do not see it.
    found = {index: json.loads(text) for index, text in texts.items()}
    if blind := [index for index in sorted(found) if not found[index][0]]:
        places = [f"process {index}: {found[index][2]} on {found[index][1]}" for index in (0, *blind[:3])]
        what = f"checkpoints: {names(blind)} {'do' if len(blind) > 1 else 'does'} not see the directory of process 0"
        fix = "the same directory in all processes, on a file system that they share"
        raise ValueError(error_text(what, _MARGIN.join(places), fix))


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + _SEEN_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that influence what a step computes."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES}


def check_config(config: Mapping[str, object]) -> dict[str, str]:
    """The JSON text of each field. Raises ValueError if a value is not JSON."""
    texts = {}
    for field, value in config.items():
        try:
            texts[f"config[{field!r}]"] = json.dumps(value, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            got = f"{masked(value, field)!r}: {error}"
            fix = "numbers, text, lists and dicts; str(...) of anything else"
            raise ValueError(error_text(f"processes: config[{field!r}] is not JSON", got, fix)) from error
    return texts


def _all_gather_text(
    text: str, call: str, timeout_s: int = TIMEOUT_S, senders: Sequence[int] | None = None
) -> dict[int, str]:
    """Gathers a text from every process, or from some of them, by process index. All processes call it."""
    state = distributed_state()
    client, key = state.client, f"zerojax/agree/{next(_call_numbers)}"
    received = lambda: {int(name.rpartition("/")[2]): text for name, text in client.key_value_dir_get(key)}
    if senders is None or state.process_id in senders:
        client.key_value_set(f"{key}/{state.process_id}", text)
    try:
        client.wait_at_barrier(f"{key}/all", timeout_s * 1000)
    except jax.errors.JaxRuntimeError as error:
        missing = sorted({*(senders or range(state.num_processes))} - received().keys())
        what = f"processes: {names(missing)} did not call {call} within {timeout_s} s"
        raise TimeoutError(error_text(what, error, "call it in all processes, equally often")) from error
    return received()


def distributed_state() -> Any:
    """JAX's record of the processes, with the client of the key-value store of process 0.

    The public ways to it initialize the devices, which a script may still want to configure.
    """
    return jax._src.distributed.global_state


def _difference(field: str, configs: Mapping[int, Mapping[str, str]]) -> str:
    """Describes which processes have which value of a field; empty if all have the same value."""
    owners = _grouped({index: texts.get(field, "no value") for index, texts in configs.items()})
    parts = [f"{_shown(value, field)} in {names(indices)}" for value, indices in owners.items()]
    return f"{field}: {'; '.join(parts)}" if len(parts) > 1 else ""


def _grouped(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Text -> the processes that have it."""
    owners: dict[str, list[int]] = {}
    for index in sorted(texts):
        owners.setdefault(texts[index], []).append(index)
    return owners


def _shown(text: str, field: str) -> str:
    """The JSON text of a field, masked. Other text is returned as it is."""
    try:
        return json.dumps(masked(json.loads(text), field), sort_keys=True)
    except ValueError:
        return text


def names(indices: Sequence[int]) -> str:
    """Processes as errors name them."""
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
