"""Compares what must be equal in all processes: configurations, batches, programs, and what they see in a directory.

The texts travel through the key-value store of process 0, not through the devices: processes that run different
programs would wait for each other in a collective, or compute with each other's values.
"""

from __future__ import annotations

import collections
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

from zerojax.utils.text import masked

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "zerojax")
TIMEOUT_S = 300
_SEEN_TIMEOUT_S = 10  # for a file of process 0 to appear in the others, on a file system that they share
_POLL_S = 0.05
_BLOCKS = 1024  # whose checksums find the first line that differs, first among blocks and then within one
_MAX_LINE = 300  # characters of a line in an error

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
    agree_on(
        own,
        "configurations or versions",
        "start all processes with the same configuration and the same packages",
        "agree()",
        timeout_s,
    )


def agree_on(fields: Mapping[str, str], what: str, fix: str, call: str, timeout_s: int = TIMEOUT_S) -> None:
    """Checks that all processes have the same texts, as `agree` does.

    Args:
        fields: the texts, by name.
        what: what they are, in the plural, for errors.
        fix: what the error advises.
        call: what every process calls, for the error in which one does not.
        timeout_s: how long to wait for the other processes, in seconds.
    """
    if not jax.distributed.is_initialized():
        return
    texts = _all_gather_text(json.dumps({"call": call, **fields}), call, timeout_s)
    gathered = {index: json.loads(text) for index, text in texts.items()}
    found = dict.fromkeys(itertools.chain(*gathered.values()))
    differences = [line for name in found if (line := _difference(name, gathered))]
    if differences:
        raise ValueError(
            f"processes: their {what} differ\n  got:      {(chr(10) + ' ' * 12).join(differences)}\n  fix:      {fix}"
        )


def run_in_process_0(function: Callable[[], object], call: str, timeout_s: int = TIMEOUT_S) -> None:
    """Calls a function in process 0. All processes call this, and wait for its end.

    Args:
        function: what process 0 does for all, such as locking a file.
        call, timeout_s: as in `agree_on`.

    Raises:
        Exception: the error of the function, in process 0.
        ValueError: in the others, with the text of that error.
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


def agree_on_lines(lines: Sequence[str], what: str, fix: str, call: str, timeout_s: int = TIMEOUT_S) -> None:
    """Checks that all processes have the same lines of text, such as those of a program. An error has the first line
    that differs.

    Args:
        lines: of any length and number.
        what, fix, call, timeout_s: as in `agree_on`.

    Cost: one message of 64 bytes from each process. If they differ, two processes send up to 10 kB more.
    """
    if not jax.distributed.is_initialized():
        return
    digests = _all_gather_text(_digest(lines), call, timeout_s)
    owners = collections.defaultdict(list)
    for index in sorted(digests):
        owners[digests[index]].append(index)
    if len(owners) == 1:
        return
    compared = [group[0] for group in itertools.islice(owners.values(), 2)]
    number, found = _first_difference(lines, compared, call, timeout_s)
    groups = "; ".join(
        f"{text.strip()[:_MAX_LINE] or 'nothing'} in {names(group)}"
        for text, group in zip(found, owners.values(), strict=False)
    )
    others = [index for group in itertools.islice(owners.values(), 2, None) for index in group]
    more = f"; others in {names(others)}" if others else ""
    raise ValueError(
        f"processes: their {what} differ\n  got:      line {number + 1}: {groups}{more}\n  fix:      {fix}"
    )


def _first_difference(
    lines: Sequence[str], compared: Sequence[int], call: str, timeout_s: int
) -> tuple[int, list[str]]:
    """The first line in which two processes differ, and the texts of both. All processes call it."""
    lengths = _all_gather_text(str(len(lines)), call, timeout_s, compared)
    first, size = 0, max(map(int, lengths.values()))
    while size > 1:
        block = -(-size // _BLOCKS)
        checksums = [_digest(lines[i : i + block])[:16] for i in range(first, first + size, block)]
        gathered = _all_gather_text(json.dumps(checksums), call, timeout_s, compared)
        ours, theirs = (json.loads(gathered[index]) for index in compared)
        first += block * next(i for i, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y)
        size = block
    found = _all_gather_text(lines[first] if first < len(lines) else "", call, timeout_s, compared)
    return first, [found[index] for index in compared]


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(lines)).encode()).hexdigest()


def agree_on_directory(directory: Path, timeout_s: int = TIMEOUT_S) -> None:
    """Checks that all processes see the same directory. It must exist in process 0.

    Raises:
        ValueError: in all processes, if a file that process 0 wrote did not appear in others within 10 s
        OSError: in process 0, if it cannot write into the directory.

    Cost: one empty file, which is deleted again.
    """
    if not jax.distributed.is_initialized():
        return
    index = distributed_state().process_id
    call, mark = f"checkpoints in {directory}", None
    if index == 0:
        # A name that no process has looked up before, so that no file system has cached its absence.
        mark = directory / f".shared_{uuid.uuid4().hex}"
        mark.touch()
    try:
        name = _all_gather_text(mark.name if mark else "", call, timeout_s)[0]
        seen = _appears(directory / name)
        texts = _all_gather_text(json.dumps([seen, platform.node(), str(directory)]), call, timeout_s)
    finally:
        if mark:
            mark.unlink(missing_ok=True)
    found = {index: json.loads(text) for index, text in texts.items()}
    if blind := [index for index in sorted(found) if not found[index][0]]:
        places = [f"process {index}: {found[index][2]} on {found[index][1]}" for index in (0, *blind[:3])]
        raise ValueError(
            f"checkpoints: {names(blind)} {'do' if len(blind) > 1 else 'does'} not see the directory of process 0\n"
            f"  got:      {(chr(10) + ' ' * 12).join(places)}\n"
            f"  fix:      the same directory in all processes, on a file system that they share"
        )


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
            raise ValueError(
                f"processes: config[{field!r}] is not JSON\n"
                f"  got:      {masked(value, field)!r}: {error}\n"
                f"  fix:      numbers, text, lists and dicts; str(...) of anything else"
            ) from error
    return texts


def _all_gather_text(text: str, call: str, timeout_s: int, senders: Sequence[int] | None = None) -> dict[int, str]:
    """Gathers a text from every process, or from some of them, by process index. All processes call it."""
    state = distributed_state()
    client, key = state.client, f"zerojax/agree/{next(_call_numbers)}"
    if senders is None or state.process_id in senders:
        client.key_value_set(f"{key}/{state.process_id}", text)
    try:
        client.wait_at_barrier(f"{key}/all", timeout_s * 1000)
    except jax.errors.JaxRuntimeError as error:
        received = _stored_texts(client, key)
        missing = [index for index in senders or range(state.num_processes) if index not in received]
        raise TimeoutError(
            f"processes: {names(missing)} did not call {call} within {timeout_s} s\n"
            f"  got:      {error}\n"
            "  fix:      call it in all processes, equally often"
        ) from error
    return _stored_texts(client, key)


def _stored_texts(client: Any, key: str) -> dict[int, str]:
    return {int(name.rpartition("/")[2]): text for name, text in client.key_value_dir_get(key)}


def distributed_state() -> Any:
    """JAX's record of the processes, which also holds the client of the key-value store of process 0.

    The public ways to it initialize the devices, which a script may still want to configure.
    """
    return jax._src.distributed.global_state


def _difference(field: str, configs: Mapping[int, Mapping[str, str]]) -> str:
    """Describes which processes have which value of a field; empty if all have the same value."""
    owners = collections.defaultdict(list)
    for index in sorted(configs):
        owners[configs[index].get(field, "no value")].append(index)
    if len(owners) == 1:
        return ""
    parts = [f"{_shown(value, field)} in {names(indices)}" for value, indices in owners.items()]
    return f"{field}: {'; '.join(parts)}"


def _shown(text: str, field: str) -> str:
    """The JSON text of a field, masked. Other text is returned as it is."""
    try:
        return json.dumps(masked(json.loads(text), field), sort_keys=True)
    except ValueError:
        return text


def names(indices: Sequence[int]) -> str:
    """Processes as errors name them."""
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
