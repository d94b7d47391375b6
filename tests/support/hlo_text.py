"""Short compiled programs in XLA's text format, for tests of the modules that read it."""

from zerojax.analysis import hlo

MIB = 2**20
ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""
EIGHT = tuple(range(8))
GROUPS = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}"


def program(entry, computations="", num_devices=8):
    lines = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    header = f"HloModule step, is_scheduled=true, num_partitions={num_devices}"
    return hlo.parse_program(f"{header}\n{ADD}{computations}\nENTRY %main (...) -> ... {{\n{lines}\n}}\n")


CARRY = "(s32[], f32[1024,1024])"


def loop(body, trips, computations="", init=""):
    """A program with one loop, whose body has these lines after `%carry`, `%i` and `%w`.

    If `trips` is 0, the trip count is missing from the text. With `init`, a line that defines `%start`, this is the
    first value of `%i`.
    """
    lines = "\n".join(f"  {line.strip()}" for line in body.strip().splitlines())
    computations += f"""
%condition (...) -> pred[] {{
  %carry = {CARRY} parameter(0)
  ROOT %go = pred[] constant(true)
}}

%body (...) -> ... {{
  %carry = {CARRY} parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %w = f32[1024,1024] get-tuple-element(%carry), index=1
{lines}
}}
"""
    known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips else ""
    carried = f"%init = {CARRY} parameter(0)"
    if init:
        carried = f"{init}\n%weights = f32[1024,1024] parameter(0)\n%init = {CARRY} tuple(%start, %weights)"
    text = f"""
        {carried}
        ROOT %loop = {CARRY} while(%init), condition=%condition, body=%body{known}
    """
    return program(text, computations)


GATHER = f"""
%shard = bf16[128,1024]{{1,0:T(8,128)(2,1)}} parameter(0)
%a = bf16[1024,1024]{{1,0}} parameter(1)
%start = (bf16[128,1024]{{1,0}}, bf16[1024,1024]{{1,0}}) all-gather-start(%shard), {GROUPS}, dimensions={{0}}
OVERLAPPED
%done = bf16[1024,1024]{{1,0}} all-gather-done(%start)
ROOT %out = bf16[1024,1024]{{1,0}} add(%done, %done)
"""
DOT = "%dot = bf16[1024,1024]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
TWO_GATHERS = f"""
        %shard = bf16[128,1024] parameter(0)
        %one = (bf16[128,1024], bf16[1024,1024]) all-gather-start(%shard), {GROUPS}, dimensions={{0}}
        %two = (bf16[128,1024], bf16[1024,1024]) all-gather-start(%shard), {GROUPS}, dimensions={{0}}
        %first = bf16[1024,1024] all-gather-done(%one)
        %product = bf16[1024,1024] dot(%first, %first), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
        ROOT %second = bf16[1024,1024] all-gather-done(%two)
"""


BETWEEN_SLICES = """
    %p = bf16[128,1024] parameter(0)
    %q = bf16[1024,1024] parameter(1)
    %t = token[] after-all()
    %s = (bf16[128,1024], u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true, ATTRIBUTES
    AFTER
    %r = (RESULT, u32[], token[]) recv(%t), channel_id=1, is_host_transfer=true, ATTRIBUTES
    BEFORE
    %sent = token[] send-done(%s), channel_id=2, is_host_transfer=true, HANDLER}
    %done = (RESULT, token[]) recv-done(%r), channel_id=1, is_host_transfer=true, HANDLER}
    ROOT %x = RESULT get-tuple-element(%done), index=0
"""
HANDLER = 'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"'


def between_slices(kind, target, result="bf16[128,1024]", **places):
    """A program of slices of four devices with one collective between them, and lines before and after its `recv`."""
    own = f'{HANDLER},_xla_host_transfer_rendezvous="psum.1_0",_xla_megascale_target={target},'
    text = BETWEEN_SLICES.replace("ATTRIBUTES", f'{own}_xla_megascale_transfer_type="{kind}"}}')
    for place in ("BEFORE", "AFTER"):
        text = text.replace(place, places.get(place, ""))
    return program(text.replace("HANDLER", HANDLER).replace("RESULT", result), num_devices=4)
