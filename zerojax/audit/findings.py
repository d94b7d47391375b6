"""What an audit finds: a promise, what was found, a verdict; as data, as a table and as the text of an error."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table


class Verdict(enum.Enum):
    """Of a promise. Only `BROKEN` is a failure."""

    OK = "ok"
    KNOWN = "known"  # not kept, because of a rewrite that a compiler is known for; it is named and costed
    BROKEN = "BROKEN"
    NOT_READ = "not read"
    TOLD = "told"  # a figure of which nothing is promised


@dataclasses.dataclass(frozen=True)
class Finding:
    """One promise.

    Attributes:
        name: 'sharded', 'aliased state', 'checkpoints', 'wire bytes', 'wire dtype', 'reductions', 'hoisted gathers',
            'gathered weights kept', 'prefetch order' or 'exposed'.
        promised, found: in words. Of what was not read, `found` is why.
        verdict: whether they agree.
        numbers: the same for machines; `extra_bytes` is what a known rewrite costs a device in a step.
        fix: what to do about a broken promise.
    """

    name: str
    promised: str
    found: str
    verdict: Verdict
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fix: str = ""


@dataclasses.dataclass(frozen=True)
class Audit:
    """The findings of an audit; printed, a table. `audit['reductions']` is one of them.

    Attributes:
        findings: one for each promise that the stage makes.
    """

    findings: tuple[Finding, ...]

    @property
    def broken(self) -> tuple[Finding, ...]:
        """What is not as promised."""
        return tuple(finding for finding in self.findings if finding.verdict is Verdict.BROKEN)

    @property
    def ok(self) -> bool:
        """No promise was found broken. Which were not read, the findings tell."""
        return not self.broken

    def __getitem__(self, name: str) -> Finding:
        return {finding.name: finding for finding in self.findings}[name]

    def __str__(self) -> str:
        table = Table("", "promised", "found", "", title="Promised and found")
        for finding in self.findings:
            table.add_row(finding.name, finding.promised, finding.found, finding.verdict.value)
        text = io.StringIO()
        Console(file=text, width=150).print(table)
        return text.getvalue()

    def enforce(self, setting: str) -> None:
        """Raises ValueError ('error') or warns ('warn') if a promise is broken."""
        if self.ok:
            return
        lines = [f"audit: the compiled step breaks {len(self.broken)} of {len(self.findings)} promises"]
        for finding in self.broken:
            lines.append(f"{finding.name}")
            lines.append(f"  promised: {finding.promised}")
            lines.append(f"  got:      {finding.found}")
            lines.append(f"  fix:      {finding.fix}")
        if setting == "error":
            raise ValueError("\n".join(lines))
        warnings.warn("\n".join(lines), stacklevel=4)


SETTINGS = ("off", "warn", "error")


def check_setting(setting: Any) -> None:
    """Raises ValueError unless it is one of `SETTINGS`."""
    if setting not in SETTINGS:
        raise ValueError(f"audit: unknown setting {setting!r}\n  fix:      one of {', '.join(SETTINGS)}")


class Unread(Exception):
    """Why something cannot be read in a program. It is told, and never taken for a promise that is kept."""


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """What a reader refuses is unread."""
    try:
        yield
    except ValueError as refused:
        raise Unread(str(refused)) from refused


class Result(NamedTuple):
    """What a check found. The fields are those of `Finding`."""

    found: str
    verdict: Verdict
    numbers: Mapping[str, float] = {}
    fix: str = ""


class Line(NamedTuple):
    """A promise and its check. None is promised where a stage has nothing to promise; then nothing is checked."""

    name: str
    promised: str | None
    check: Callable[[], Result]


def examine(lines: Iterable[Line]) -> Audit:
    """Checks every promise. What a check cannot read becomes a finding that says why."""
    findings = []
    for name, promised, check in lines:
        if promised is None:
            continue
        try:
            findings.append(Finding(name, promised, *check()))
        except Unread as why:
            findings.append(Finding(name, promised, str(why), Verdict.NOT_READ))
    return Audit(tuple(findings))


def bytes_text(num_bytes: float) -> str:
    for unit, size in ("GB", 1e9), ("MB", 1e6), ("kB", 1e3):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def listed(items: Sequence[str], most: int = 4) -> str:
    """The first of them, and how many there are beside."""
    return "; ".join(items[:most]) + (f"; and {len(items) - most} more" if len(items) > most else "")
