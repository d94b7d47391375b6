"""What a step sends over the data axes, and in which order it gathers: beside what it promised."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from zerojax.analysis import hlo, hlo_collectives, jaxpr_collectives
from zerojax.analysis.hlo import Program
from zerojax.analysis.hlo_collectives import Collective
from zerojax.audit.expectation import Expectation, Traffic, over_data
from zerojax.audit.findings import Line, Outcome, Unread, Verdict, bytes_text, listed, reading

# Of promised bytes: a collective of scalars may be joined with a larger one, which then counts as a whole.
SLACK = 0.01
# Of a unit: the compiler joins what stands beside it, the norms of a scanned layer are rounded up to shards.
UNIT_SLACK = 0.05


class CommunicationChecks:
    """What crosses the data axes in one step.

    Args:
        program: reads the compiled program.
        jaxpr: of the traced step, or None.
        expectation: of the step.
        platform: that the program is for.
    """

    def __init__(self, program: Callable[[], Program], jaxpr: Any, expectation: Expectation, platform: str):
        self.program, self.jaxpr, self.expectation, self.platform = program, jaxpr, expectation, platform
        self.config, self.most, self.least = expectation.config, expectation.most, expectation.least
        self.as_traced = platform == "cpu"
        self.where = ", as traced" if self.as_traced else ""

    def lines(self) -> list[Line]:
        """Those of 'gathered weights kept' and the two beside it are promises of stage 3."""
        if self.config.axes.num_devices == 1:
            return []
        precision, k, prefetch = self.config.precision, self.expectation.num_microbatches, self.expectation.prefetch
        gather, reduce = (jnp.dtype(dtype).name for dtype in (precision.compute_dtype, precision.reduce_dtype))
        scattered, all_reduced = bytes_text(self.most.scattered), bytes_text(self.most.all_reduced)
        in_parts = f", in each of {k} microbatches" if k > 1 else ""
        lines = [
            Line("wire bytes", f"a device sends at most {bytes_text(self.most.total)}", self.num_bytes),
            Line("wire dtype", f"{gather} gathered, {reduce} reduced", self.dtype),
            Line("reductions", f"{scattered} reduce-scattered, {all_reduced} all-reduced", self.reductions),
        ]
        if self.config.stage.shards_params and self.config.axes.num_shards > 1:
            units = f"{bytes_text(2 * self.expectation.unit_bytes)}, of two units"
            again = f"{bytes_text(self.least.gathered)} gathered, again where the backward pass reads weights"
            window = f"at most {prefetch + 1} units gathered at a time (prefetch={prefetch}), and one without a product"
            lines += [
                Line("hoisted gathers", f"a gather moves at most {units}{in_parts}", self.hoisted),
                Line("gathered weights kept", again, self.kept),
                Line("prefetch order", window, self.order),
            ]
        return [*lines, Line("exposed", "(no expectation)", self.exposed)]

    @functools.cached_property
    def found(self) -> list[Collective]:
        """In the program; on CPU, in the traced step."""
        if not self.as_traced:
            with reading():
                return over_data(hlo_collectives.collectives(self.program()), self.config)
        if self.jaxpr is None:
            raise Unread("XLA for CPUs merges gathers and widens what is sent: audit the traced step")
        with reading():
            found = over_data(jaxpr_collectives.collectives(self.jaxpr, self.config.mesh), self.config)
        if self.least.total and not found:
            raise Unread("the collectives are the compiler's, and XLA for CPUs makes others than those for GPUs")
        return found

    @property
    def sent(self) -> Traffic:
        return Traffic.of(self.found)

    @property
    def extra_bytes(self) -> float:
        """What a device sends more because an all-reduce stands where something half as large was promised."""
        return max(0.0, self.sent.all_reduced - self.most.all_reduced) / 2

    def known_rewrite(self) -> str | None:
        """What the compiler is known for that took the place of what the step says, where the step says as promised.

        XLA for TPUs makes all-reduces of reduce-scatters, and of gathers, over several dimensions of the torus, and of
        small ones over one. Of a program alone it cannot be told whose they are.
        """
        if self.platform != "tpu":
            return None
        if self.jaxpr is None:
            raise Unread(
                "XLA for TPUs makes all-reduces of reduce-scatters: audit the traced step, to tell its own apart"
            )
        with reading():
            written = Traffic.of(over_data(jaxpr_collectives.collectives(self.jaxpr, self.config.mesh), self.config))
        if written.all_reduced > (1 + SLACK) * self.most.all_reduced or not written.total:
            return None
        mesh, shard = self.config.mesh, self.config.axes.shard
        devices = mesh.devices[tuple(slice(None) if name in shard else 0 for name in mesh.axis_names)]
        dims = sum(len(set(places)) > 1 for places in zip(*(device.coords for device in devices.flat), strict=True))
        return f"XLA for TPUs made these (over {dims} of the torus's dimensions)"

    def num_bytes(self) -> Outcome:
        sent, most = self.sent.total, self.most.total
        text = f"{bytes_text(sent)}{self.where}"
        numbers = {"expected_bytes": most, "found_bytes": sent, "extra_bytes": self.extra_bytes}
        if sent <= (1 + SLACK) * most:
            return Outcome(text, Verdict.OK, numbers)
        if sent - self.extra_bytes <= (1 + SLACK) * most and self.known_rewrite():
            return Outcome(f"{text}, {bytes_text(self.extra_bytes)} of it by the rewrite below", Verdict.KNOWN, numbers)
        by_kind = ", ".join(f"{bytes_text(each)} {kind}" for kind, each in self.sent._asdict().items() if each)
        return Outcome(f"{text}: {by_kind}", Verdict.BROKEN, numbers, "see the other lines, and what the model sends")

    def dtype(self) -> Outcome:
        precision = self.config.precision
        gather, reduce = (8 * jnp.dtype(dtype).itemsize for dtype in (precision.compute_dtype, precision.reduce_dtype))
        limits = {"all-gather": gather, "reduce-scatter": reduce, "all-reduce": reduce}
        wide: dict[str, float] = collections.defaultdict(float)
        for each in self.found:
            if hlo.element_bits(each.dtype) > limits.get(each.kind, max(gather, reduce)):
                wide[f"{each.kind} in {each.dtype}"] += each.sent_bytes
        numbers = {"expected_wide_bytes": self.expectation.wide_bytes, "wide_bytes": sum(wide.values())}
        text = listed([f"{kind}: {bytes_text(size)}" for kind, size in wide.items()]) or "nothing wider"
        if numbers["wide_bytes"] <= self.expectation.wide_bytes + SLACK * self.most.total:
            return Outcome(text + self.where, Verdict.OK, numbers)
        return Outcome(text + self.where, Verdict.BROKEN, numbers, "cast before the collective, and not after it")

    def reductions(self) -> Outcome:
        sent, extra = self.sent, self.extra_bytes
        text = f"{bytes_text(sent.scattered)} reduce-scattered, {bytes_text(sent.all_reduced)} all-reduced{self.where}"
        numbers = {**sent._asdict(), "extra_bytes": extra}
        if sent.reduced < (1 - SLACK) * self.least.reduced:
            return Outcome(text, Verdict.BROKEN, numbers, "sum every gradient over the data axes, in every microbatch")
        if extra <= SLACK * self.most.total:
            return Outcome(text, Verdict.OK, numbers)
        if rewrite := self.known_rewrite():
            return Outcome(f"{text}: {rewrite}, which send {bytes_text(extra)} more", Verdict.KNOWN, numbers)
        fix = "lax.psum_scatter in a shard_map, and no sharding constraint on a sum"
        return Outcome(f"{text}: {bytes_text(extra)} more", Verdict.BROKEN, numbers, fix)

    def hoisted(self) -> Outcome:
        gathers = [each for each in self.found if each.kind == "all-gather"]
        largest = max((each.full_bytes for each in gathers), default=0)
        outside = sum(each.full_bytes for each in gathers if each.trips < self.expectation.num_microbatches)
        numbers = {"largest_bytes": largest, "outside_bytes": outside}
        if outside:
            text = f"{bytes_text(outside)} gathered once, outside of the loop over microbatches{self.where}"
            return Outcome(text, Verdict.BROKEN, numbers, "let each gather wait for a value of its microbatch")
        text = f"up to {bytes_text(largest)} in a gather{self.where}"
        if largest <= (2 + UNIT_SLACK) * self.expectation.unit_bytes:
            return Outcome(text, Verdict.OK, numbers)
        fix = "gather inside the loop over layers; on GPUs limit what is combined (README, Schedule)"
        return Outcome(text, Verdict.BROKEN, numbers, fix)

    def kept(self) -> Outcome:
        if self.as_traced and self.jaxpr is self.expectation.jaxpr:
            raise Unread("XLA for CPUs merges the gathers of the forward and the backward pass: audit one for GPUs")
        # A gather that became an all-reduce is what all reductions together have too much.
        rewritten = min(self.extra_bytes, max(0.0, self.sent.reduced - self.most.reduced))
        found, least = self.sent.gathered + rewritten, self.least.gathered
        text, numbers = f"{bytes_text(found)}{self.where}", {"expected_bytes": least, "found_bytes": found}
        if found >= (1 - SLACK) * least:
            return Outcome(text, Verdict.OK, numbers)
        fix = "no checkpoint policy that denies names: what is made of a gathered weight has none, and is kept"
        return Outcome(f"{text}: {bytes_text(least - found)} kept instead", Verdict.BROKEN, numbers, fix)

    def order(self) -> Outcome:
        """A gather that waits for no product may be done before all else.

        Beside the units of the window there may be one that multiplies nothing, as an embedding. A loop over layers
        starts with a unit that is gathered already.
        """
        if self.jaxpr is None:
            raise Unread("what a gather waits for is read from the traced step")
        prefetch, microbatches = self.expectation.prefetch, self.expectation.num_microbatches > 1
        unit = self.expectation.unit_bytes / jnp.dtype(self.config.precision.compute_dtype).itemsize
        with reading():
            bodies = jaxpr_collectives.free_gather_elements(self.jaxpr)
        most, excess = 0.0, 0.0
        for loops, elements in bodies:
            window = prefetch + 2 if loops <= microbatches else max(prefetch, 1)
            most, excess = max(most, elements / unit), max(excess, elements / unit - window)
        text, numbers = f"gathers of {most:.1f} units wait for no matrix product, as traced", {"free_units": most}
        if excess <= UNIT_SLACK:
            return Outcome(text, Verdict.OK, numbers)
        return Outcome(text, Verdict.BROKEN, numbers, "let each gather wait for the unit that leaves the window")

    def exposed(self) -> Outcome:
        if self.as_traced:
            raise Unread("XLA for CPUs computes nothing beside a collective")
        total, exposed = (sum(each.sent_bytes for each in part) for part in (self.found, self._exposed(self.found)))
        looped = [each for each in self.found if each.looped]
        in_loops, exposed_in_loops = (sum(each.sent_bytes for each in part) for part in (looped, self._exposed(looped)))
        numbers = {"exposed_bytes": exposed, "looped_bytes": in_loops, "exposed_looped_bytes": exposed_in_loops}
        text = f"{bytes_text(exposed)} ({exposed / max(total, 1):.1%}) with no matrix product beside"
        inside = f", {bytes_text(exposed_in_loops)} ({exposed_in_loops / in_loops:.1%}) in loops" if in_loops else ""
        return Outcome(text + inside, Verdict.INFO, numbers)

    @staticmethod
    def _exposed(found: list[Collective]) -> list[Collective]:
        return [each for each in found if each.exposed]
