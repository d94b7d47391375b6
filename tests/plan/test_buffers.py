"""Buffer assignments are read as a person reads them, and their bytes are sorted by kind; also those of a real step."""

import jax
import jax.numpy as jnp
import optax
import pytest
from support.hlo_text import GROUPS, program

from zerojax.plan import Job, Settings, buffers, plan
from zerojax.plan.buffers import UNUSED, BufferAssignment, LiveBuffer


def texts(values, allocated=1 << 20, before=""):
    """The texts of a buffer assignment with values (name, size, offset, first, last), as XLA writes them."""
    assignment = f"BufferAssignment:\n{before}allocation 1: size {allocated}, preallocated-temp:\n"
    ranges = "HloLiveRange (max 9):\n  InstructionSequence:\n"
    ranges += "".join(f"    {time}:at.{time}\n" for time in range(10)) + "  BufferLiveRange:\n"
    for k, (name, size, offset, first, last) in enumerate(values):
        bare, brace, path = name.partition("{")
        assignment += f" value: <{k} {name} @0> (size={size},offset={offset}): f32[1]{{0}}\n"
        ranges += f"    {bare}{brace + path if brace else '{}'}:{first}-{last}\n" if first is not None else ""
    return assignment, ranges


def test_the_moment_of_peak_memory_is_found():
    """`b` and `c` use the same memory one after the other; the small `d` outlives both."""
    shared = [("b", 8192, 4096, 2, 3), ("c", 2048, 4096, 4, 5)]
    read = buffers.parse_assignment(*texts([("a", 4096, 0, 0, 5), *shared, ("d{1,0}", 8, 12288, 3, 9)]))
    live = LiveBuffer("a", (), 4096), LiveBuffer("b", (), 8192), LiveBuffer("d", (1, 0), 8)
    assert read == BufferAssignment(1 << 20, "at.3", live, tuple(f"at.{time}" for time in range(10)))
    assert read.unused_bytes == (1 << 20) - 12296


def test_assignments_of_newer_compilers_have_page_numbers():
    assignment, ranges = texts([("a", 4096, 0, 0, 5)])
    assert buffers.parse_assignment(
        assignment.replace(", prealloc", ", page 0, prealloc"), ranges
    ) == buffers.parse_assignment(assignment, ranges)


def test_an_update_in_place_counts_once():
    read = buffers.parse_assignment(*texts([("a", 4096, 0, 0, 5), ("b{0}", 4096, 0, 5, 7), ("c", 4096, 2048, 5, 6)]))
    assert [value.num_bytes for value in read.live] == [4096, 2048] and read.peak_instruction == "at.5"


def test_arguments_and_other_memory_spaces_are_left_out():
    others = (
        "allocation 0: size 64, parameter 0, shape |f32[16]| at ShapeIndex {}, maybe-live-out:\n"
        " value: <9 p @0> (size=64,offset=0): f32[16]{0}\n"
        "allocation 2: size 4096, color 1, preallocated-temp:\n"
        " value: <8 v @1> (size=4096,offset=0): f32[1024]{0:S(1)}\n"
    )
    assert buffers.parse_assignment(*texts([("a", 2048, 0, 0, 1)], 2048, others)).live == (LiveBuffer("a", (), 2048),)
    assert buffers.parse_assignment("BufferAssignment:\n" + others, "") == BufferAssignment(0, "", ())


def test_temporaries_in_host_memory_are_counted():
    for color in ["color 5", "page 0, color 5", "color 5, page 0"]:
        others = f"allocation 2: size 4096, {color}, preallocated-temp:\nallocation 3: size 64, color 5, parameter 9:\n"
        assert buffers.parse_assignment(*texts([("a", 2048, 0, 0, 1)], 2048, others)).host_bytes == 4096
        assert buffers.parse_assignment("BufferAssignment:\n" + others, "") == BufferAssignment(0, "", (), (), 4096)


def test_assignments_that_are_not_understood_are_rejected():
    for assignment, ranges, message in [
        (*texts([("a", 4096, 0, None, None)]), "a has no live range"),
        ("another text", "", "0 allocations of temporaries"),
        (texts([])[0] + "allocation 2: size 8, preallocated-temp:\n", "", "2 allocations of temporaries"),
    ]:
        with pytest.raises(ValueError, match=message):
            buffers.parse_assignment(assignment, ranges)


def test_a_folder_without_an_assignment_is_an_error(tmp_path):
    (tmp_path / "other.txt").write_text("")
    with pytest.raises(ValueError, match=r"no buffer assignment.*\n.*other\.txt"):
        buffers.read_dump(tmp_path)


def kinds(read, *live, peak):
    schedule = ("reduce-scatter.13", "sum", "all-gather.7", "start.2", "again")
    num_bytes = sum(size for *_, size in live)
    assignment = BufferAssignment(num_bytes + 7, peak, tuple(LiveBuffer(*each) for each in live), schedule)
    found = dict(buffers.by_kind(assignment, read))
    assert found.pop(UNUSED) == 7
    return found


# Layers of 1024 x 1024 in bf16. The first loop stacks their inputs. The second reads these, gathers the weights again,
# and stacks the reduced gradients. Each carries (counter, activation, stack).
CARRY = "(s32[], bf16[1024,1024], bf16[4,1024,1024])"
SHARDED = "(s32[], bf16[1024,1024], bf16[4,128,1024], bf16[4,1024,1024])"
PRODUCT = "dot(%x, %turned), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
GATHERED = f"""
  %shard = bf16[128,1024] slice(%x), slice={{[0:128], [0:1024]}}
  %start = (bf16[128,1024], bf16[1024,1024]) all-gather-start(%shard), {GROUPS}, dimensions={{0}}
  %full = bf16[1024,1024] all-gather-done(%start)
  %turned = bf16[1024,1024] transpose(%full), dimensions={{1,0}}"""
LOOPS = f"""
%go (...) -> pred[] {{
  %carried = {CARRY} parameter(0)
  ROOT %always = pred[] constant(true)
}}

%goes (...) -> pred[] {{
  %carries = {SHARDED} parameter(0)
  ROOT %forever = pred[] constant(true)
}}

%forward (...) -> ... {{
  %carried = {CARRY} parameter(0)
  %i = s32[] get-tuple-element(%carried), index=0
  %x = bf16[1024,1024] get-tuple-element(%carried), index=1
  %stack = bf16[4,1024,1024] get-tuple-element(%carried), index=2
{GATHERED}
  %y = bf16[1024,1024] {PRODUCT}
  %stacked = bf16[4,1024,1024] dynamic-update-slice(%stack, %y, %i, %i, %i)
  ROOT %next = {CARRY} tuple(%i, %y, %stacked)
}}

%backward (...) -> ... {{
  %carried = {SHARDED} parameter(0)
  %i = s32[] get-tuple-element(%carried), index=0
  %x = bf16[1024,1024] get-tuple-element(%carried), index=1
  %sums = bf16[4,128,1024] get-tuple-element(%carried), index=2
  %inputs = bf16[4,1024,1024] get-tuple-element(%carried), index=3
{GATHERED}
  %again = bf16[1024,1024] {PRODUCT}
  %gradient = f32[1024,1024] dot(%again, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %narrow = bf16[1024,1024] convert(%gradient)
  %sum = bf16[128,1024] reduce-scatter(%narrow), {GROUPS}, dimensions={{0}}, to_apply=%add
  %doubled = bf16[128,1024] add(%sum, %sum)
  %summed = bf16[4,128,1024] dynamic-update-slice(%sums, %doubled, %i, %i, %i)
  ROOT %next = {SHARDED} tuple(%i, %again, %summed, %inputs)
}}
"""
LOOPS = LOOPS.replace("%backward", "%BACKWARD")
forward, backward = LOOPS.split("%BACKWARD")
for name in ("carried", "i", "x", "shard", "start", "full", "turned", "next"):
    backward = (
        backward.replace(f"%{name} ", f"%{name}.2 ")
        .replace(f"%{name},", f"%{name}.2,")
        .replace(f"%{name})", f"%{name}.2)")
    )
STEP = program(
    f"""
    %zero = s32[] constant(0)
    %x0 = bf16[1024,1024] parameter(0)
    %room = bf16[4,1024,1024] broadcast(%zero), dimensions={{}}
    %init = {CARRY} tuple(%zero, %x0, %room)
    %inputs.1 = {CARRY} while(%init), condition=%go, body=%forward
    %last = bf16[1024,1024] get-tuple-element(%inputs.1), index=1
    %kept = bf16[4,1024,1024] get-tuple-element(%inputs.1), index=2
    %rooms = bf16[4,128,1024] broadcast(%zero), dimensions={{}}
    %middle = bf16[1024,1024] add(%last, %last)
    %begin = {SHARDED} tuple(%zero, %middle, %rooms, %kept)
    ROOT %end = {SHARDED} while(%begin), condition=%goes, body=%backward
    """,
    forward + "%backward" + backward,
)


def test_values_are_sorted_by_kind():
    for peak, value, kind in [
        ("y", ("start", (1,)), "gathered"),
        ("y", ("turned", ()), "gathered"),
        ("y", ("y", ()), "activations"),
        ("y", ("carried", (1,)), "activations"),
        ("y", ("carried", (2,)), "checkpoints"),  # the stack that the loop fills
        ("again", ("inputs.1", (2,)), "checkpoints"),  # the result of the first loop
        ("again", ("carried.2", (3,)), "checkpoints"),
        ("again", ("middle", ()), "checkpoints"),  # computed outside the loop
        ("middle", ("middle", ()), "activations"),
        ("again", ("again", ()), "activations"),
        ("again", ("gradient", ()), "gradients"),
        ("again", ("narrow", ()), "gradients"),
        ("again", ("sum", ()), "gradients"),
        ("again", ("doubled", ()), "gradients"),
        ("again", ("carried.2", (2,)), "gradients"),
        ("y", ("end", (2,)), "gradients"),
        (
            "again",
            ("reduce-scatter.13", (0,)),
            "gradients",
        ),  # not in the text: it is inside the next instruction of the schedule
        ("again", ("all-gather.7", ()), "gathered"),
    ]:
        assert kinds(STEP, (*value, 64), peak=peak) == {kind: 64}


def test_an_all_gather_that_became_an_all_reduce_is_recognized_by_its_name():
    text = """
        %x = bf16[1024] parameter(0)
        %a = bf16[1024] all-reduce(%x), GROUPS, to_apply=%add, metadata={op_name="jit(step)/shard_map/all_gather"}
        %b = bf16[1024] all-reduce(%x), GROUPS, to_apply=%add, metadata={op_name="jit(step)/shard_map/reduce_scatter"}
        ROOT %both = (bf16[1024], bf16[1024]) tuple(%a, %b)
    """
    read = program(text.replace("GROUPS", GROUPS))
    assert kinds(read, ("a", (), 8), ("b", (), 16), peak="b") == {"gathered": 8, "gradients": 16}


def test_a_value_that_is_not_in_the_program_is_an_error():
    with pytest.raises(ValueError, match="the program has no instruction 'nowhere'"):
        kinds(STEP, ("nowhere", (), 8), peak="y")


def job():
    create = lambda key: {"w": jax.random.normal(key, (6, 256, 256)), "head": jax.random.normal(key, (256, 256))}

    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"], params["w"])
        return jnp.mean((x @ params["head"]) ** 2)

    batch = lambda rows: {"x": jax.ShapeDtypeStruct((rows, 256), jnp.float32)}
    return Job(create, optax.adam(1e-3), loss, batch, rows=512)


def test_the_kinds_of_a_real_step_add_up_to_its_peak():
    """Arguments match the formula. Two layers are gathered, and the inputs of four layers are checkpoints of the loop
    that runs: those of the first and the last are outside it."""
    made = plan(f"{__name__}:job", "cpu:8", Settings(precision="fp32", remat="full"), compile=True, suggest=False)
    held, square, rows = made.held, 4 * 256 * 256, 4 * 512 * 256
    assert made.program.held is held and sum(held.values()) == made.peak_bytes
    terms = {term.name: term.num_bytes for term in made.memory.terms}
    for name in "parameters", "batch", "optimizer state":
        assert held[name] == pytest.approx(terms[name], rel=1e-4)
    assert held["optimizer state"] >= 2 * 7 * square // 8
    assert held["gathered"] == 2 * square and 4 * rows <= held["checkpoints"] < 5 * rows
    assert held["gradients"] >= square
    assert held[UNUSED] + held["others"] < 0.1 * made.peak_bytes
