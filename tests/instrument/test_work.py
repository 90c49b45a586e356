"""FLOPs and bytes of every part, from a program whose sizes are given."""

import pytest

from sharder.instrument.hlo import parse
from sharder.instrument.profile import CompiledProgram, Programs
from sharder.instrument.work import Standing, executed, moved_bytes, work_of

TEXT = """HloModule jit_step, is_scheduled=true

%update (p0: f32[16,8,8], p1: f32[8,8], p2: s32[]) -> f32[16,8,8] {
  %p0 = f32[16,8,8]{2,1,0} parameter(0)
  %p1 = f32[8,8]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %b = f32[1,8,8]{2,1,0} bitcast(%p1)
  %zero = s32[] constant(0)
  ROOT %u = f32[16,8,8]{2,1,0} dynamic-update-slice(%p0, %b, %p2, %zero, %zero)
}

%slice (q0: f32[16,8,8], q1: s32[]) -> f32[8,8] {
  %q0 = f32[16,8,8]{2,1,0} parameter(0)
  %q1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %s = f32[1,8,8]{2,1,0} dynamic-slice(%q0, %q1, %zero.1, %zero.1), dynamic_slice_sizes={1,8,8}
  ROOT %c = f32[8,8]{1,0} bitcast(%s)
}

%body (t: (s32[], f32[8,8], f32[16,8,8])) -> (s32[], f32[8,8], f32[16,8,8]) {
  %t = (s32[], f32[8,8]{1,0}, f32[16,8,8]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%t), index=1
  %w = f32[16,8,8]{2,1,0} get-tuple-element(%t), index=2
  %taken = f32[8,8]{1,0} fusion(%w, %i), kind=kLoop, calls=%slice
  %d = f32[8,8]{1,0} dot(%x, %taken), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/while/body/mlp/dot_general"}
  %kept = f32[16,8,8]{2,1,0} fusion(%w, %d, %i), kind=kLoop, calls=%update
  ROOT %r = (s32[], f32[8,8]{1,0}, f32[16,8,8]{2,1,0}) tuple(%i, %d, %kept)
}

%cond (u: (s32[], f32[8,8], f32[16,8,8])) -> pred[] {
  %u.1 = (s32[], f32[8,8]{1,0}, f32[16,8,8]{2,1,0}) parameter(0)
  ROOT %p = pred[] constant(false)
}

ENTRY %main (a: (s32[], f32[8,8], f32[16,8,8])) -> (s32[], f32[8,8], f32[16,8,8]) {
  %a = (s32[], f32[8,8]{1,0}, f32[16,8,8]{2,1,0}) parameter(0)
  ROOT %l = (s32[], f32[8,8]{1,0}, f32[16,8,8]{2,1,0}) while(%a), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""
MATRIX = 4 * 8 * 8


def test_of_an_operand_that_is_sliced_the_slice_counts_and_of_an_update_the_update():
    program = parse(TEXT)
    found = {i.name: moved_bytes(i, types, program) for i, types, _ in executed(program)}
    index = 4
    assert found == {"taken": 2 * MATRIX + index, "d": 3 * MATRIX, "kept": 2 * MATRIX + index}


def test_work_of_a_loop_is_that_of_all_its_turns_and_runs():
    programs = Programs([CompiledProgram("step", TEXT, 3, None)], {"data": 1, "fsdp": 1, "tensor": 1}, [0])
    (standing,) = work_of(programs, {"feed-forward": 0.5}).values()
    assert standing.flops == 3 * 5 * 2 * 8**3 and standing.moved_bytes == pytest.approx(3 * 5 * (7 * MATRIX + 8))


def test_the_roof_is_the_lower_of_two():
    point = Standing(flops=1e9, moved_bytes=1e8, share=0.5)
    assert point.intensity() == 10 and point.attainable(1e12, 1e10) == 1e11 and point.attainable(5e10, 1e10) == 5e10
    assert point.achieved(2.0, 4) == 2.5e8
