"""Checks what a compiled step sends over the data axes, and the order of its gathers."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable

import jax.numpy as jnp

from zerojax.analysis import hlo, hlo_collectives, jaxpr_counts
from zerojax.analysis.expectation import Expectation, SentBytes, along_context, between_replicas, over_data_axes
from zerojax.analysis.findings import Checks, Outcome, Unreadable, Verdict
from zerojax.analysis.hlo import Program
from zerojax.analysis.hlo_collectives import Collective
from zerojax.program.jaxprs import ClosedJaxpr
from zerojax.sharding.tpu import slice_after_slice
from zerojax.utils.text import abbreviate, bytes_text

# As a fraction of the expected bytes. A collective of scalars may be combined with a larger one, and is counted then.
SLACK = 0.01
# As a fraction of a unit. The compiler may combine the gather of a unit with that of a small leaf next to it, and small
# leaves of a scanned layer, such as norms, are padded to whole shards; between slices of TPUs to whole tiles.
UNIT_SLACK = 0.05
EXPOSED_SHARE = 0.03  # of the expected bytes, in addition to those at the ends of a step


class CommunicationChecks:
    """Checks the collectives of one step over the data axes. `program` parses the compiled program."""

    def __init__(
        self, program: Callable[[], Program], jaxpr: ClosedJaxpr | None, expectation: Expectation, platform: str
    ):
        self.program, self.jaxpr, self.expectation, self.platform = program, jaxpr, expectation, platform
        self.config, self.most, self.least = expectation.config, expectation.most, expectation.least
        self.as_traced = platform == "cpu"
        self.where = ", as traced" if self.as_traced else ""

    def checks(self) -> Checks:
        """The checks that apply to this step. Those of the order and the number of gathers are for stage 3 only."""
        axes = self.config.axes
        if axes.num_shards * axes.num_replicas == 1:
            return {}
        precision, k, prefetch = self.config.precision, self.expectation.num_microbatches, self.expectation.prefetch
        gather, reduce = (jnp.dtype(dtype).name for dtype in (precision.compute_dtype, precision.reduce_dtype))
        gather += f" (large leaves: {precision.gather})" if precision.gather else ""
        reduce += f" (large leaves: {precision.scatter})" if precision.scatter else ""
        checks: Checks = {
            "wire bytes": (f"a device sends at most {bytes_text(self.most.total)}", self.wire_bytes),
            "wire dtype": (f"gathers in {gather}, reductions in {reduce}", self.wire_dtype),
            "reductions": (self._reduced_text(self.most), self.reductions),
        }
        if axes.num_context > 1:
            scattered, summed = map(bytes_text, self.expectation.context_bytes)
            of_gradients = f"gradients: {scattered} reduce-scattered, {summed} all-reduced; and attention"
            checks["along context"] = of_gradients, self.along_context
        if axes.num_replicas > 1:
            between = f"{bytes_text(self.expectation.between_bytes)} in a step, however many microbatches"
            checks["between replicas"] = between, self.between_replicas
        if self.config.stage.shards_params and axes.num_shards > 1:
            largest = f"a gather moves at most {bytes_text(2 * self.expectation.unit_bytes)} (two units)"
            largest += f", in each of {k} microbatches" if k > 1 else ""
            regathered = f"{bytes_text(self.least.gathered)} gathered, including again for the backward pass"
            window = f"at most {prefetch + 1} units gathered at a time (prefetch={prefetch}), plus one without a matrix"
            checks["hoisted gathers"] = largest, self.hoisted_gathers
            checks["gathered weights kept"] = regathered, self.gathered_weights_kept
            checks["prefetch order"] = f"{window} product", self.prefetch_order
        most = self.most_exposed()
        exposed = "(no expectation)" if most is None else f"at most {bytes_text(most)} with no product"
        return checks | {"exposed": (exposed, self.exposed)}

    @staticmethod
    def _reduced_text(sent: SentBytes) -> str:
        exchanged = f", {bytes_text(sent.exchanged)} exchanged" if sent.exchanged else ""
        scattered = bytes_text(sent.reduce_scattered)
        return f"{scattered} reduce-scattered, {bytes_text(sent.all_reduced)} all-reduced{exchanged}"

    def most_exposed(self) -> float | None:
        """The most bytes that should overlap with no matrix product, or None if there is no expectation.

        At stage 3 with prefetch, on GPUs, all is to overlap but what is sent at the two ends of a microbatch.
        """
        overlaps = self.config.stage.shards_params and self.expectation.overlaps
        if self.platform != "gpu" or not overlaps:
            return None
        return EXPOSED_SHARE * self.most.total + self.expectation.num_microbatches * self.expectation.ends_bytes

    @functools.cached_property
    def found(self) -> list[Collective]:
        """The collectives over data axes in the program; for CPUs, those in the traced step."""
        if not self.as_traced:
            if not slice_after_slice(self.config.mesh):
                raise Unreadable("the devices of the mesh are not in the order of their slices; zerojax.make_mesh() is")
            return over_data_axes(hlo_collectives.compiled_collectives(self.program()), self.config)
        if self.jaxpr is None:
            raise Unreadable("XLA for CPUs merges gathers and sends wider dtypes: audit the traced step")
        found = over_data_axes(jaxpr_counts.traced_collectives(self.jaxpr, self.config.mesh), self.config)
        if self.least.total and not found:
            raise Unreadable("the compiler inserts the collectives, and XLA for CPUs inserts others than XLA for GPUs")
        return found

    @property
    def sent(self) -> SentBytes:
        """The bytes that one device sends, as found."""
        return SentBytes.of(self.found)

    @property
    def extra_bytes(self) -> float:
        """The bytes that a device sends in addition because all-reduces replace collectives that send half as much."""
        return max(0.0, self.sent.all_reduced - self.most.all_reduced) / 2

    def known_rewrite(self) -> str | None:
        """The known rewrite by the compiler that explains the extra bytes, or None if there is none.

        XLA for TPUs rewrites reduce-scatters and gathers over several dimensions of the torus as all-reduces, and small
        ones over one dimension too. The traced step shows whether it has all-reduces of its own.
        """
        if self.platform != "tpu":
            return None
        if self.jaxpr is None:
            raise Unreadable(
                "XLA for TPUs rewrites reduce-scatters as all-reduces: audit the traced step to tell them from its own"
            )
        found = jaxpr_counts.traced_collectives(self.jaxpr, self.config.mesh)
        traced = SentBytes.of(over_data_axes(found, self.config))
        if traced.all_reduced > (1 + SLACK) * self.most.all_reduced or not traced.total:
            return None
        mesh, shard = self.config.mesh, self.config.axes.shard
        devices = mesh.devices[tuple(slice(None) if name in shard else 0 for name in mesh.axis_names)]
        dims = sum(len(set(places)) > 1 for places in zip(*(device.coords for device in devices.flat), strict=True))
        return f"XLA for TPUs made these all-reduces (over {dims} of the torus's dimensions)"

    def wire_bytes(self) -> Outcome:
        """Whether a device sends no more than the formula of the stage."""
        sent, most = self.sent.total, self.most.total
        text = f"{bytes_text(sent)}{self.where}"
        numbers = {"expected_bytes": most, "found_bytes": sent, "extra_bytes": self.extra_bytes}
        if sent <= (1 + SLACK) * most:
            return Outcome(text, Verdict.OK, numbers)
        if sent - self.extra_bytes <= (1 + SLACK) * most and self.known_rewrite():
            text = f"{text}, {bytes_text(self.extra_bytes)} of it from the rewrite below"
            return Outcome(text, Verdict.KNOWN, numbers)
        kinds = {kind.replace("_", "-"): size for kind, size in self.sent._asdict().items() if size}
        by_kind = ", ".join(f"{bytes_text(size)} {kind}" for kind, size in kinds.items())
        fix = "see the other findings, and the collectives of the model"
        return Outcome(f"{text}: {by_kind}", Verdict.BROKEN, numbers, fix)

    def wire_dtype(self) -> Outcome:
        """Whether collectives send the dtypes of the precision."""
        precision = self.config.precision
        bits = lambda dtype: 8 * jnp.dtype(dtype).itemsize
        reduce, own = bits(precision.reduce_dtype), bits(precision.compute_dtype)
        limits = {"all-gather": bits(precision.gather or precision.compute_dtype), "reduce-scatter": reduce}
        limits |= {"all-reduce": reduce, "all-to-all": bits(precision.scatter or precision.compute_dtype)}
        wide: dict[str, float] = collections.defaultdict(float)
        for each in self.found:
            is_index = each.dtype.startswith(("s", "u"))  # of rows that are looked up
            if not is_index and hlo.element_bits(each.dtype) > limits.get(each.kind, max(own, reduce)):
                wide[f"{each.kind} in {each.dtype}"] += each.sent_bytes
        numbers = {"expected_wide_bytes": self.expectation.wide_bytes, "wide_bytes": sum(wide.values())}
        text = abbreviate([f"{kind}: {bytes_text(size)}" for kind, size in wide.items()]) or "no wider dtype"
        if numbers["wide_bytes"] <= self.expectation.wide_bytes + SLACK * self.most.total:
            return Outcome(text + self.where, Verdict.OK, numbers)
        return Outcome(text + self.where, Verdict.BROKEN, numbers, "cast before the collective instead of after it")

    def reductions(self) -> Outcome:
        """Whether every gradient is reduced, by reduce-scatters where the stage shards it."""
        self._check_sums_apart()
        sent, extra = self.sent, self.extra_bytes
        text = self._reduced_text(sent) + self.where
        numbers = {**sent._asdict(), "extra_bytes": extra}
        pairs = (sent.reduced, self.least.reduced), (sent.exchanged, self.least.exchanged)
        if any(found < (1 - SLACK) * least for found, least in pairs):
            return Outcome(text, Verdict.BROKEN, numbers, "sum every gradient over the data axes, in every microbatch")
        if extra <= SLACK * self.most.total:
            return Outcome(text, Verdict.OK, numbers)
        if rewrite := self.known_rewrite():
            return Outcome(f"{text}: {rewrite}, which send {bytes_text(extra)} more", Verdict.KNOWN, numbers)
        fix = "use lax.psum_scatter in a shard_map instead of a sharding constraint on a sum"
        return Outcome(f"{text}: {bytes_text(extra)} more", Verdict.BROKEN, numbers, fix)

    def _check_sums_apart(self) -> None:
        if self.config.axes.num_context > 1 and not self.config.stage.shards_optimizer:
            raise Unreadable("the compiler may sum whole gradients over context and data at once")

    def along_context(self) -> Outcome:
        """Whether the compiler all-reduces no gradients along `context` that the stage shards.

        It reduces them in the dtype that they are computed in; of a table that is read by rows, it may exchange rows
        instead. What attention needs is not known.
        """
        self._check_sums_apart()
        if self.as_traced:
            raise Unreadable("the compiler inserts them, and XLA for CPUs inserts others than XLA for GPUs")
        found = along_context(hlo_collectives.compiled_collectives(self.program()), self.config)
        sent, (scattered, summed) = SentBytes.of(found), self.expectation.context_bytes
        exposed = sum(each.sent_bytes for each in found if each.exposed)
        kinds = (f"{bytes_text(size)} {kind.replace('_', '-')}" for kind, size in sent._asdict().items() if size)
        text = f"{', '.join(kinds)}; {bytes_text(exposed)} overlap with no matrix product"
        numbers = {**sent._asdict(), "expected_reduce_scattered": scattered, "exposed_bytes": exposed}
        slack, extra = SLACK * (scattered + summed), sent.all_reduced - summed
        if extra <= slack:
            return Outcome(text, Verdict.OK, numbers)
        if self.platform == "tpu" and extra <= scattered:  # of small gradients
            text = f"{text}; XLA for TPUs made all-reduces, which send {bytes_text(extra / 2)} more"
            return Outcome(text, Verdict.KNOWN, numbers)
        fix = "constrain what mixes tokens: zerojax.attention, or jax.lax.with_sharding_constraint in the model"
        return Outcome(text, Verdict.BROKEN, numbers, fix)

    def between_replicas(self) -> Outcome:
        """Whether a device sends to those with the same shard no more than what a step needs once."""
        found = sum(each.sent_bytes for each in between_replicas(self.found, self.config))
        most, text = self.expectation.between_bytes, f"{bytes_text(found)}{self.where}"
        numbers = {"expected_bytes": most, "found_bytes": found}
        if found <= (1 + UNIT_SLACK) * most:
            return Outcome(text, Verdict.OK, numbers)
        if found - self.extra_bytes <= (1 + UNIT_SLACK) * most and self.known_rewrite():
            return Outcome(text, Verdict.KNOWN, numbers)
        return Outcome(text, Verdict.BROKEN, numbers, "reduce over the replica axes after the last microbatch")

    def hoisted_gathers(self) -> Outcome:
        """Whether gathers stay in the loops over layers and microbatches."""
        between = between_replicas(self.found, self.config)
        gathers = [each for each in self.found if each.kind == "all-gather" and each not in between]
        largest = max((each.full_bytes for each in gathers), default=0)
        outside = sum(each.full_bytes for each in gathers if each.trips < self.expectation.num_microbatches)
        numbers = {"largest_bytes": largest, "outside_bytes": outside}
        if outside:
            text = f"{bytes_text(outside)} gathered once, outside the loop over microbatches{self.where}"
            return Outcome(text, Verdict.BROKEN, numbers, "make each gather depend on a value of its microbatch")
        text = f"at most {bytes_text(largest)} in a gather{self.where}"
        if largest <= (2 + UNIT_SLACK) * self.expectation.unit_bytes:
            return Outcome(text, Verdict.OK, numbers)
        fix = "gather inside the loop over layers; on GPUs, limit how gathers are combined (docs/schedule.md)"
        return Outcome(text, Verdict.BROKEN, numbers, fix)

    def gathered_weights_kept(self) -> Outcome:
        """Whether the backward pass gathers weights again instead of keeping those of the forward pass."""
        if self.as_traced and self.jaxpr is self.expectation.jaxpr:
            raise Unreadable("XLA for CPUs merges the gathers of both passes: audit the step for a GPU target")
        # Gathers that were rewritten as all-reduces appear as an excess of reductions.
        rewritten = min(self.extra_bytes, max(0.0, self.sent.reduced - self.most.reduced))
        found, least = self.sent.gathered + rewritten, self.least.gathered
        text, numbers = f"{bytes_text(found)}{self.where}", {"expected_bytes": least, "found_bytes": found}
        if found >= (1 - SLACK) * least:
            return Outcome(text, Verdict.OK, numbers)
        text = f"{text}: {bytes_text(least - found)} kept instead of gathered again"
        fix = "use no checkpoint policy that excludes names: values computed from gathered weights have none"
        return Outcome(text, Verdict.BROKEN, numbers, fix)

    def prefetch_order(self) -> Outcome:
        """Whether gathers wait for the units before them. A gather that waits for no matrix product may start at once.

        One unit without a matrix product, such as an embedding, is allowed in addition to the window. A loop over
        layers starts with a unit that has been gathered already.
        """
        if self.jaxpr is None:
            raise Unreadable("the dependencies of gathers are read from the traced step")
        prefetch, microbatches = self.expectation.prefetch, self.expectation.num_microbatches > 1
        unit, itemsize = self.expectation.unit_bytes, jnp.dtype(self.config.precision.compute_dtype).itemsize
        bodies = jaxpr_counts.independent_gather_bytes(self.jaxpr, itemsize)
        most, excess = 0.0, 0.0
        for loops, gathered in bodies:
            window = prefetch + 2 if loops <= microbatches else max(prefetch, 1)
            most, excess = max(most, gathered / unit), max(excess, gathered / unit - (1 + UNIT_SLACK) * window)
        text, numbers = f"gathers of {most:.1f} units wait for no matrix product, as traced", {"free_units": most}
        if not excess:
            return Outcome(text, Verdict.OK, numbers)
        return Outcome(text, Verdict.BROKEN, numbers, "make each gather depend on the unit that leaves the window")

    def exposed(self) -> Outcome:
        """Whether communication overlaps with matrix products."""
        if self.as_traced:
            raise Unreadable("XLA for CPUs overlaps no collective with computation")
        bare = [each for each in self.found if each.exposed]
        size = lambda found: sum(each.sent_bytes for each in found)
        total, exposed = size(self.found), size(bare)
        in_loops, exposed_in_loops = (size(each for each in part if each.looped) for part in (self.found, bare))
        numbers = {"exposed_bytes": exposed, "looped_bytes": in_loops, "exposed_looped_bytes": exposed_in_loops}
        text = f"{bytes_text(exposed)} ({exposed / max(total, 1):.1%}) overlap with no matrix product"
        text += f", {bytes_text(exposed_in_loops)} ({exposed_in_loops / in_loops:.1%}) in loops" if in_loops else ""
        most = self.most_exposed()
        if most is None:
            return Outcome(text, Verdict.INFO, numbers)
        if exposed <= most:
            return Outcome(text, Verdict.OK, numbers)
        several = (1 + UNIT_SLACK) * self.expectation.unit_bytes
        combined = [each for each in bare if each.full_bytes > several]
        largest = sorted(combined or bare, key=lambda each: -each.sent_bytes)
        listed = abbreviate([f"{each.kind} of {bytes_text(each.full_bytes)}" for each in largest], 3)
        if combined:
            fix = "limit how collectives are combined (docs/schedule.md#compiler-options)"
            return Outcome(f"{text}; several units in one: {listed}", Verdict.SLOW, numbers, fix)
        fix = (
            "pass more rows to each device or fewer microbatches, or tell the compiler the rate of the links "
            "(docs/schedule.md#compiler-options)"
        )
        return Outcome(f"{text}; among them: {listed}", Verdict.SLOW, numbers, fix)
