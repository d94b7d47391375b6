"""What an audit finds: a verdict on each expectation, and all of them as a table or an error."""

from __future__ import annotations

import dataclasses
import enum
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from zerojax.utils.tables import Column, TextTable, printed, screen


class Verdict(enum.Enum):
    """Whether an expectation is met. Only `BROKEN` is a failure."""

    OK = "ok"
    KNOWN = "known"  #: not met, because of a known rewrite by the compiler; the finding names it and its cost
    BROKEN = "BROKEN"
    SLOW = "slow"  #: the step is right, but slower than it has to be; the finding says why, and what may help
    NOT_READ = "not read"  #: the program could not be read; the finding says why
    INFO = "info"  #: a measurement without an expectation


@dataclasses.dataclass(frozen=True)
class Finding:
    """One expectation and what was found.

    Attributes:
        name: 'sharded', 'aliased state', 'checkpoints', 'offloaded slices', 'host memory', 'pieces of the state',
            'host copies', 'wire bytes', 'wire dtype', 'reductions', 'along context', 'between replicas',
            'hoisted gathers', 'gathered weights kept', 'prefetch order' or 'exposed'.
        expected, found: in words. If the program could not be read, `found` says why.
        verdict: whether they agree.
        numbers: the measurements in `found`; `extra_bytes` are what one device sends in addition per step because of a
            known rewrite.
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
    """The findings of an audit. Prints as a table. `audit['reductions']` is the finding with this name.

    Attributes:
        findings: one for each expectation.
    """

    findings: tuple[Finding, ...]

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The findings whose verdict is `BROKEN`."""
        return tuple(finding for finding in self.findings if finding.verdict is Verdict.BROKEN)

    @property
    def ok(self) -> bool:
        """Whether no expectation is broken. Findings with the verdict `NOT_READ` were not checked."""
        return not self.broken

    def __getitem__(self, name: str) -> Finding:
        return {finding.name: finding for finding in self.findings}[name]

    def __str__(self) -> str:
        """A table that follows the width of the terminal, below the number of findings of each verdict."""
        verdicts = Counter(finding.verdict for finding in self.findings)
        counts = ", ".join(f"{verdicts[each]} {each.value}" for each in Verdict if verdicts[each])
        columns = [Column("check"), Column("expected", wraps=True), Column("found", wraps=True), Column("verdict")]
        rows = [(each.name, each.expected, each.found, each.verdict.value) for each in self.findings]
        return printed([TextTable(f"Audit of the compiled step: {counts}", columns, rows)], screen().width)

    __repr__ = __str__

    def enforce(self, setting: str) -> None:
        """Raises ValueError (setting 'error') or warns (setting 'warn') if an expectation is broken.

        A step that is slower than it has to be is warned about with either setting.

        Args:
            setting: 'error' or 'warn'.
        """
        slow = [finding for finding in self.findings if finding.verdict is Verdict.SLOW]
        if self.broken:
            title = f"audit: the compiled step breaks {len(self.broken)} of {len(self.findings)} expectations"
            text = _with_fixes(title, [*self.broken, *slow])
            if setting == "error":
                raise ValueError(text)
            warnings.warn(text, stacklevel=4)
        elif slow:
            warnings.warn(_with_fixes("audit: the compiled step is slower than it has to be", slow), stacklevel=4)


def _with_fixes(title: str, findings: Iterable[Finding]) -> str:
    lines = [f"{f.name}\n  expected: {f.expected}\n  got:      {f.found}\n  fix:      {f.fix}" for f in findings]
    return "\n".join([title, *lines])


SETTINGS = ("off", "warn", "error")


def check_setting(setting: str) -> str:
    if setting not in SETTINGS:
        raise ValueError(f"audit: unknown setting {setting!r}\n  fix:      one of {', '.join(SETTINGS)}")
    return setting


class Unreadable(ValueError):
    """Raised by a check if the program cannot be read. The finding says why, and never counts as met."""


class Outcome(NamedTuple):
    """The outcome of a check. The fields are those of `Finding`."""

    found: str
    verdict: Verdict
    numbers: Mapping[str, float] = {}
    fix: str = ""


Checks: TypeAlias = dict[str, tuple[str, Callable[[], Outcome]]]  # by name: the expectation, and what checks it


def run_checks(checks: Checks) -> Audit:
    """Runs the checks. A check that cannot read the program, as `Unreadable` or another reader says, is a finding."""
    findings = []
    for name, (expected, run) in checks.items():
        try:
            findings.append(Finding(name, expected, *run()))
        except ValueError as reason:
            findings.append(Finding(name, expected, str(reason), Verdict.NOT_READ))
    return Audit(tuple(findings))
