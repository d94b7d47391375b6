"""Several processes that train as one: they come together, agree, and share the rows of a batch.

`jax.distributed` is the engine. Here is what it leaves open: who is missing, who differs, and that a process that has
failed ends at once.
"""

from __future__ import annotations

import atexit
import collections
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any, NamedTuple

import jax
import jax._src.distributed
import jax._src.xla_bridge

from zerojax.processes.detect import Found, detect
from zerojax.processes.rollcall import Absence, call_roll

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "zerojax")
MIN_CONNECT_S = 30  # for JAX to connect processes that all have answered the roll call, however long that took
LAST_WORDS_S = 2  # that process 0 stays after a failure: JAX aborts the others when it goes, before they say why

_agreements = itertools.count()  # every process agrees on the same things in the same order


class Processes(NamedTuple):
    """The processes that train together.

    Attributes:
        count: of them.
        index: of this one.
        coordinator: HOST:PORT of process 0; None for one process alone.
        found: how they were found: 'ZEROJAX', 'torchrun', 'slurm', 'ompi', 'jax' (its own detection), or 'alone'.
    """

    count: int
    index: int
    coordinator: str | None
    found: str


def initialize(*, timeout_s: int = 300, heartbeat_s: int = 100, config: Mapping[str, Any] | None = None) -> Processes:
    """Joins this process with the others that the launcher started. Call it before anything asks for a device.

    Which variables say so, of which launcher, is the table of `processes.detect.detect`. With none of them set, or with
    a count of 1, nothing is started.

    After it a process that ends with an exception ends at once. JAX alone would have it wait for the others to end
    too (300 s), which wait for it in a collective.

    Args:
        timeout_s: how long to wait for the others.
        heartbeat_s: a process that is not heard of for so long counts as dead: the others are ended by JAX, with the
            index of the dead one on stderr and exit code 134 (SIGABRT).
        config: what must be the same in all processes, by names; see `agree`.

    Returns:
        the processes.

    Raises:
        ValueError: variables are missing or contradict each other, or the processes differ.
        TimeoutError: processes did not come; it names them. Where JAX itself detects (found 'jax') it waits, and ends
            the process instead.
        RuntimeError: JAX has started already, or this was called before, or the coordinator's port is taken.

    Cost: until the last process comes; then about a second. One connection to process 0 for each other process.
    """
    _check_config(config or {})
    found = detect(os.environ)
    if found is None or found.count == 1:
        return Processes(1, 0, None, found.found if found else "alone")
    _check_not_started()
    end = time.monotonic() + timeout_s
    if found.coordinator is not None:
        _await_all(found, timeout_s)
    jax.distributed.initialize(
        found.coordinator,
        found.count,
        found.index,
        local_device_ids=found.local_device_ids,
        cluster_detection_method=found.method,
        initialization_timeout=max(MIN_CONNECT_S, round(end - time.monotonic())),
        heartbeat_timeout_seconds=heartbeat_s,
    )
    atexit.register(_end_if_failed)
    agree(config or {}, timeout_s=timeout_s)
    state = _state()
    return Processes(state.num_processes, state.process_id, state.coordinator_address, found.found)


def agree(config: Mapping[str, Any], *, timeout_s: int = 300) -> None:
    """Checks that all processes have the same configuration, and the same versions of Python and of packages.

    All processes call it, equally often. Values are compared by their JSON text, with sorted keys: 1 and 1.0 differ,
    tuples and lists do not.

    Args:
        config: what must be the same, by names.
        timeout_s: how long to wait for the others to call it.

    Raises:
        ValueError: they differ; it names the field, the values, and who has which. All processes raise it. Or a value
            is not JSON.
        TimeoutError: processes did not call it; it names them.

    Cost: one message of the configuration's size to process 0, and one with those of all processes back.
    """
    own = {**_check_config(config), **{name: json.dumps(version) for name, version in versions().items()}}
    if not jax.distributed.is_initialized():
        return
    texts = _exchange(f"zerojax/agree/{next(_agreements)}", json.dumps(own), timeout_s)
    told = {index: json.loads(text) for index, text in texts.items()}
    differences = [line for field in sorted(set().union(*told.values())) if (line := _difference(field, told))]
    if differences:
        raise ValueError(
            "processes: they differ\n"
            f"  got:      {(chr(10) + ' ' * 12).join(differences)}\n"
            "  fix:      start all processes with the same configuration and the same packages"
        )


def own_rows(num_rows: int) -> slice:
    """The rows of a global batch that this process loads, and passes to a step or to `zero.shard_batch`.

    For meshes over which processes split the batch: with a `model` axis across processes they would need the same rows,
    which is not checked.

    Args:
        num_rows: of the batch of all processes.

    Returns:
        as many consecutive rows as every other process has.

    Raises:
        ValueError: they do not divide.
    """
    count, index = jax.process_count(), jax.process_index()
    if num_rows % count:
        raise ValueError(
            "processes: the batch does not divide into the processes\n"
            f"  got:      {num_rows} rows, {count} processes; {num_rows} % {count} = {num_rows % count}\n"
            f"  fix:      a multiple of {count} rows"
        )
    rows = num_rows // count
    return slice(index * rows, (index + 1) * rows)


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide what a step computes."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES}


def _check_config(config: Mapping[str, Any]) -> dict[str, str]:
    """Each field's JSON text. Raises ValueError for what has none."""
    texts = {}
    for field, value in config.items():
        try:
            texts[f"config[{field!r}]"] = json.dumps(value, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"processes: config[{field!r}] is not JSON\n"
                f"  got:      {value!r}: {error}\n"
                f"  fix:      numbers, text, lists and dicts; str(...) of anything else"
            ) from error
    return texts


def _check_not_started() -> None:
    # No public function says it without starting JAX; jax.distributed.initialize would, but after the roll call, in
    # which the others would have counted on this process.
    if jax.distributed.is_initialized() or jax._src.xla_bridge.backends_are_initialized():
        what = "processes are joined" if jax.distributed.is_initialized() else "has started its devices"
        raise RuntimeError(
            "processes: initialize() comes too late\n"
            f"  got:      JAX {what} already\n"
            "  fix:      call it once, before the first array and before jax.devices()"
        )


def _await_all(found: Found, timeout_s: int) -> None:
    """Raises TimeoutError unless all processes come."""
    assert found.coordinator is not None and found.count is not None and found.index is not None
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    try:
        absence = call_roll(found.coordinator, found.count, found.index, timeout_s, bind)
    except OSError as error:
        raise RuntimeError(
            f"processes: process 0 cannot listen on {bind or found.coordinator}\n"
            f"  got:      {error}\n"
            "  fix:      another port for all processes, or end what uses this one"
        ) from error
    _raise_if_absent(absence, found, timeout_s)


def _raise_if_absent(absence: Absence, found: Found, timeout_s: int) -> None:
    if absence.refused:
        raise ValueError(
            f"processes: process {found.index} was refused\n"
            f"  got:      {absence.refused}\n"
            "  fix:      give each process its own index, and all the same count"
        )
    if absence.missing:
        raise TimeoutError(
            f"processes: {_name(absence.missing)} of {found.count} did not come within {timeout_s} s\n"
            f"  got:      this is process {found.index}, found by {found.found}; process 0 is {found.coordinator}\n"
            "  fix:      see the missing ones' output; that they reach that address; or a longer timeout_s"
        )


def _name(indices: tuple[int, ...] | list[int]) -> str:
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def _state() -> Any:
    """JAX's record of the processes, and its connection to process 0, with a key-value store.

    There is no public way to them that does not start the devices, which a script may still want to choose.
    """
    return jax._src.distributed.global_state


def _exchange(key: str, text: str, timeout_s: int) -> dict[int, str]:
    """Every process's text, by index, after all have given theirs."""
    state = _state()
    client = state.client
    client.key_value_set(f"{key}/{state.process_id}", text)
    try:
        client.wait_at_barrier(f"{key}/all", timeout_s * 1000)
    except jax.errors.JaxRuntimeError as error:
        there = _texts(client, key)
        missing = [index for index in range(state.num_processes) if index not in there]
        raise TimeoutError(
            f"processes: {_name(missing)} did not call agree() within {timeout_s} s\n"
            f"  got:      {error}\n"
            "  fix:      all processes call it, equally often"
        ) from error
    return _texts(client, key)


def _texts(client: Any, key: str) -> dict[int, str]:
    return {int(name.rpartition("/")[2]): text for name, text in client.key_value_dir_get(key)}


def _difference(field: str, told: Mapping[int, Mapping[str, str]]) -> str:
    """Which values a field has, and where; nothing if it has one."""
    owners = collections.defaultdict(list)
    for index in sorted(told):
        owners[told[index].get(field, "nothing")].append(index)
    if len(owners) == 1:
        return ""
    return f"{field}: " + "; ".join(f"{value} in {_name(indices)}" for value, indices in owners.items())


def _end_if_failed() -> None:
    """At exit after an exception: ends the process here, before JAX waits for the others to end."""
    if not hasattr(sys, "last_value") or not jax.distributed.is_initialized():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if _state().process_id == 0:
        time.sleep(LAST_WORDS_S)
    os._exit(1)
