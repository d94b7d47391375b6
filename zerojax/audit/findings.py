"""The findings of an audit: what is expected, what was found, and a verdict; as data, a table or an error."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table


class Verdict(enum.Enum):
    """Whether an expectation is met. Only `BROKEN` is a failure."""

    OK = "ok"
    KNOWN = "known"  # not met, because of a known rewrite of the compiler; the finding names it and its cost
    BROKEN = "BROKEN"
    NOT_READ = "not read"
    INFO = "info"  # a figure without an expectation


@dataclasses.dataclass(frozen=True)
class Finding:
    """One expectation and what was found.

    Attributes:
        name: 'sharded', 'aliased state', 'checkpoints', 'wire bytes', 'wire dtype', 'reductions', 'hoisted gathers',
            'gathered weights kept', 'prefetch order' or 'exposed'.
        expected, found: in words. If the program could not be read, `found` says why.
        verdict: whether they agree.
        numbers: the same as numbers; `extra_bytes` is what a known rewrite costs a device in a step.
        fix: what to do if the expectation is not met.
    """

    name: str
    expected: str
    found: str
    verdict: Verdict
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fix: str = ""


@dataclasses.dataclass(frozen=True)
class Audit:
    """The findings of an audit; printed, a table. `audit['reductions']` is one of them.

    Attributes:
        findings: one for each expectation of the stage.
    """

    findings: tuple[Finding, ...]

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The findings whose verdict is `BROKEN`."""
        return tuple(finding for finding in self.findings if finding.verdict is Verdict.BROKEN)

    @property
    def ok(self) -> bool:
        """No expectation is broken. Findings with the verdict `NOT_READ` could not be checked."""
        return not self.broken

    def __getitem__(self, name: str) -> Finding:
        return {finding.name: finding for finding in self.findings}[name]

    def __str__(self) -> str:
        table = Table("", "expected", "found", "", title="Audit of the compiled step")
        for finding in self.findings:
            table.add_row(finding.name, finding.expected, finding.found, finding.verdict.value)
        text = io.StringIO()
        Console(file=text, width=150).print(table)
        return text.getvalue()

    def enforce(self, setting: str) -> None:
        """Raises ValueError ('error') or warns ('warn') if an expectation is broken."""
        if self.ok:
            return
        lines = [f"audit: the compiled step breaks {len(self.broken)} of {len(self.findings)} expectations"]
        for finding in self.broken:
            lines.append(f"{finding.name}")
            lines.append(f"  expected: {finding.expected}")
            lines.append(f"  got:      {finding.found}")
            lines.append(f"  fix:      {finding.fix}")
        if setting == "error":
            raise ValueError("\n".join(lines))
        warnings.warn("\n".join(lines), stacklevel=4)


SETTINGS = ("off", "warn", "error")


def check_setting(setting: str) -> str:
    """The setting. Raises ValueError unless it is one of `SETTINGS`."""
    if setting not in SETTINGS:
        raise ValueError(f"audit: unknown setting {setting!r}\n  fix:      one of {', '.join(SETTINGS)}")
    return setting


class Unread(Exception):
    """A program cannot be read. The finding says why; it never counts as met."""


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """A ValueError of a reader becomes `Unread`."""
    try:
        yield
    except ValueError as refused:
        raise Unread(str(refused)) from refused


class Outcome(NamedTuple):
    """The result of a check. The fields are those of `Finding`."""

    found: str
    verdict: Verdict
    numbers: Mapping[str, float] = {}
    fix: str = ""


class Line(NamedTuple):
    """An expectation and its check. `expected` is None if the stage expects nothing; then nothing is checked."""

    name: str
    expected: str | None
    check: Callable[[], Outcome]


def examine(lines: Iterable[Line]) -> Audit:
    """Runs every check. If a program cannot be read, the finding says why."""
    findings = []
    for name, expected, check in lines:
        if expected is None:
            continue
        try:
            findings.append(Finding(name, expected, *check()))
        except Unread as why:
            findings.append(Finding(name, expected, str(why), Verdict.NOT_READ))
    return Audit(tuple(findings))


def bytes_text(num_bytes: float) -> str:
    for unit, size in ("GB", 1e9), ("MB", 1e6), ("kB", 1e3):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def listed(items: Sequence[str], most: int = 4) -> str:
    """The first of the items, and how many more there are."""
    return "; ".join(items[:most]) + (f"; and {len(items) - most} more" if len(items) > most else "")
