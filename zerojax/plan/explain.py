"""Explains a plan in sentences: what bounds memory and time, what would help most, and what is not sure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Group
from rich.text import Text

from zerojax.plan import timeline
from zerojax.plan.formula import shard_route
from zerojax.plan.planner import Plan, Suggestion
from zerojax.plan.show import closest_text, code_that_fits, label, remedy, seconds_text, spaced, unit, verdict_text
from zerojax.plan.timeline import Prediction
from zerojax.utils.text import bytes_text

_LEAST_SHARE = 0.01  # shares below this are not worth a sentence
# How far peaks by formula were from compiled ones, see docs/plan.md: 0.927 to 1.086 of them.
_FORMULA_ERROR = 0.08
_WHY = {  # of the formula's kinds, and what changes them
    "parameters": "which stage 3 divides over the devices",
    "optimizer state": "which every stage from 1 on divides over the devices",
    "gradients": "which stages 2 and 3 divide over the devices",
    "gathered": "which grows with the largest unit and with prefetch, not with the number of devices",
    "checkpoints": "which grow with rows, tokens and layers, and which remat='offload' keeps in host memory",
    "activations": "which grow with rows and tokens, and which remat recomputes",
}


class Remark(NamedTuple):
    """A remark about a plan.

    Attributes:
        topic: 'memory', 'time', 'help' or 'not sure'.
        text: a sentence or two.
    """

    topic: str
    text: str


def explain_plan(plan: Plan) -> tuple[Remark, ...]:
    """Explains a plan: what bounds its memory and its time, what would help most, and what is not sure.

    Args:
        plan: the plan, by formula or compiled. All that is said is derived from its numbers.

    Returns:
        The remarks, in the order of their topics.
    """
    time = _predicted_time(plan, plan.prediction) if plan.prediction else _formula_time(plan)
    parts = {"memory": _memory(plan), "time": time, "help": _help(plan), "not sure": _doubts(plan)}
    return tuple(Remark(topic, text) for topic, texts in parts.items() for text in texts)


def render_explanation(plan: Plan) -> Group:
    """The explanation of a plan for a terminal: its verdict, a paragraph for each topic, and code that fits."""
    paragraphs: dict[str, list[str]] = {}
    for remark in explain_plan(plan):
        paragraphs.setdefault(remark.topic, []).append(remark.text)
    texts = [Text.assemble((f"{topic.capitalize()}. ", "bold"), " ".join(said)) for topic, said in paragraphs.items()]
    return spaced([verdict_text(plan), *texts, *code_that_fits(plan)])


def _percent(part: float, whole: float) -> str:
    share = part / whole if whole else 0.0
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def _memory(plan: Plan) -> Iterator[str]:
    # How full the device is.
    level = "as compiled" if plan.program else "by formula"
    over = f"; {bytes_text(-plan.room_bytes)} too much" if plan.room_bytes < 0 else ""
    yield (
        f"A device holds {bytes_text(plan.peak_bytes)} {level}, {_percent(plan.peak_bytes, plan.limit_bytes)} of the"
        f" {bytes_text(plan.limit_bytes)} that a program may use{over}."
    )
    # What takes most of it, and what else does.
    (name, largest), *others = sorted(plan.held.items(), key=lambda item: -item[1])
    why = f", {_WHY[name]}" if name in _WHY else ""
    share = _percent(largest, plan.peak_bytes)
    yield f"The largest part, {share}, is {label(name)} with {bytes_text(largest)}{why}."
    yield from (f"By formula: {term.formula}." for term in plan.memory.terms if term.name == name)
    rest = [f"{label(other)} {bytes_text(size)}" for other, size in others if size > _LEAST_SHARE * plan.peak_bytes]
    if rest:
        yield f"The rest is {', '.join(rest)}."
    # What is on the host.
    if plan.host_bytes:
        of = f"{_percent(plan.host_bytes, plan.host_limit_bytes)} of what a program may pin"
        over = "" if plan.fits_host else f"; {bytes_text(plan.host_bytes - plan.host_limit_bytes)} too much"
        yield f"In addition, {bytes_text(plan.host_bytes)} are in host memory for each device, {of}{over}."


def _formula_time(plan: Plan) -> Iterator[str]:
    compute, link_s, host_s, step_s = plan.time.compute, plan.time.link_s, plan.time.host_s, plan.time.step_s
    route = shard_route(plan.cluster, plan.settings)
    lanes = " and the ".join(route.lanes) if route else "links"
    rate = f" at {route.rate / 1e9:,.0f} GB/s" if route else ""
    computation = f"{seconds_text(compute.total_s)} of computation"
    # What bounds the step.
    reason = {
        "products": f"matrix products: {seconds_text(compute.products_s)} of {computation}",
        "memory": f"memory traffic: {seconds_text(compute.memory_s)} of {computation}",
        "links": f"the {lanes}: {seconds_text(link_s)}{rate}, {link_s / max(compute.total_s, 1e-12):.1f} times the"
        f" {computation}",
        "copies": f"copies of the optimizer's state from host memory and back: {seconds_text(host_s)}",
    }[plan.time.bound]
    yield f"By formula, a step takes {seconds_text(step_s)} and is bound by {reason}."
    # What overlaps, and what waits.
    if plan.time.bound == "links":
        yield f"At least {seconds_text(link_s - compute.total_s)} of the communication cannot overlap with computation."
    elif link_s:
        yield (
            f"The {lanes} would be busy for {seconds_text(link_s)}{rate}, {_percent(link_s, compute.total_s)} of the"
            f" computation: with prefetch, all of it can overlap; --compile shows how much of it does."
        )
    if plan.time.exposed_s:
        yield f"Without prefetch, the computation waits for {seconds_text(plan.time.exposed_s)} of it."
    if update_s := plan.time.update_s:
        share, sent = _percent(update_s, step_s), bytes_text(plan.time.update_bytes)
        yield (
            f"The update multiplies matrices, each of which is whole on one device: {seconds_text(update_s)}, {share}"
            f" of the step, in which a device sends {sent}."
        )
    if host_s:
        share = _percent(host_s, step_s)
        yield f"The update waits for copies from host memory and back: {seconds_text(host_s)}, {share} of the step."
    yield f"That is {_rate(plan)}."


def _rate(plan: Plan) -> str:
    tokens, mfu = plan.throughput.tokens_per_device_s, plan.throughput.model_flop_utilization
    return f"{tokens:,.0f} {unit(plan)}/s per device" + (f", with an MFU of {mfu:.1%}" if mfu else "")


_COMPUTING = {timeline.COMPUTE: "matrix products", timeline.MEMORY: "memory traffic"}
_COMPUTING |= {timeline.STARTS: "the launches of kernels"}


def _predicted_time(plan: Plan, predicted: Prediction) -> Iterator[str]:
    step_s = predicted.step_s
    shares = {lane: _percent(s, step_s) for lane, s in predicted.busy_s.items() if s > _LEAST_SHARE * step_s}
    # What bounds the step.
    bound = f"the {label(predicted.bound_by)}, which is busy longer than the device computes"
    bound = _COMPUTING.get(predicted.bound_by, bound)
    yield f"The compiled step is predicted to take {seconds_text(step_s)}. It is bound by {bound}."
    yield f"That is {_rate(plan)}."
    # What the lanes do.
    busy = ", ".join(f"{name} {shares[lane]}" for lane, name in _COMPUTING.items() if lane in shares)
    yield f"The device computes for {_percent(predicted.computing_s, step_s)} of the step: {busy}."
    links = [f"the {label(lane)} for {share}" for lane, share in shares.items() if lane not in _COMPUTING]
    if links:
        waits = f"computation waits for {_percent(predicted.waiting_s, step_s)} of the step"
        yield f"Busy at the same time: {', '.join(links)}; {waits}, {seconds_text(predicted.waiting_s)}."
    if collectives := plan.program and plan.program.collectives:
        sent, exposed = plan.sent_bytes, sum(row.exposed_bytes for row in collectives)
        worst = max(collectives, key=lambda row: row.exposed_bytes)
        most = f", most of it in {worst.kind} over {worst.axis} ({bytes_text(worst.exposed_bytes)})" if exposed else ""
        yield f"Of {bytes_text(sent)} sent, {_percent(exposed, sent)} overlap with no matrix product{most}."
    ratio = f"{step_s / plan.time.step_s:.2f} of that"
    yield f"By formula, it takes {seconds_text(plan.time.step_s)}; the compiled step takes {ratio}."


def _help(plan: Plan) -> Iterator[str]:
    fitting = [each for each in plan.suggestions if each.fits]
    best = remedy(plan)
    if not plan.suggestions:
        return
    if plan.fits:
        if best and (best.speed or 0) > 1 + _LEAST_SHARE:
            yield f"What helps most is {best.change}: {bytes_text(best.peak_bytes)}{_speed_text(best)}."
        else:
            yield "No change that fits makes a step faster by more than 1%, by formula."
    elif best is None:
        yield f"No single change makes it fit. {closest_text(plan)}"
    else:
        yield f"It fits with {best.change}, at {bytes_text(best.peak_bytes)}{_speed_text(best)}."
        others = [each.change for each in fitting if each is not best]
        if others:
            yield f"So it does with {', or '.join(others)}."


def _speed_text(suggestion: Suggestion) -> str:
    if suggestion.speed is None:
        return ""
    if abs(suggestion.speed - 1) <= _LEAST_SHARE:
        return ", at the same speed by formula"
    return f", at {suggestion.speed:.2f} times the rows per second by formula"


def _doubts(plan: Plan) -> Iterator[str]:
    yield from (f"{note[0].upper()}{note[1:].rstrip('.')}." for note in plan.notes)
    if plan.program is None and abs(plan.room_bytes) < _FORMULA_ERROR * plan.peak_bytes:
        yield (
            f"The peak is {_percent(abs(plan.room_bytes), plan.peak_bytes)} from the limit, and formulas were up to"
            f" {_FORMULA_ERROR:.0%} from compiled peaks: --compile decides whether it fits."
        )
    if plan.program:
        yield f"The memory by formula is {plan.memory.peak_bytes / plan.peak_bytes:.2f} of the compiled one."
        if plan.program.unread:
            yield f"Not all of the program could be read: {' '.join(plan.program.unread.split())[:200]}."
        if plan.prediction:
            yield "The predicted time is a lower bound: kernels at their best rates, and no lane slows another down."
