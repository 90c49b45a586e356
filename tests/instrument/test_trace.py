"""Time shared out over overlapping, nested and foreign operations, from events whose times are given."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from sharder.config import UserError
from sharder.instrument.profile import CompiledProgram, Programs, Timing, measure_shares, verdict
from sharder.instrument.trace import (
    END,
    GOES_ON,
    STEP,
    TASK,
    TASK_DONE,
    Event,
    Trace,
    clip,
    covered,
    exposed_share,
    newest,
    read,
    recording,
    share_out,
    step_annotation,
    until_its_end,
)

TEXT = """HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %d = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/attention/dot_general"}
  %t = f32[8,8]{1,0} tanh(%d), metadata={op_name="jit(step)/mlp/tanh"}
  %layers = f32[8,8]{1,0} call(%t), to_apply=%nothing, metadata={op_name="jit(step)/while"}
  %planted = f32[8,8]{1,0} call(%t), to_apply=%nothing, metadata={op_name="jit(step)/mlp/planted/while"}
  ROOT %u = f32[8,8]{1,0} negate(%t), metadata={op_name="jit(step)/neg"}
}
"""


def event(start: float, end: float, op: str, device: str = "cpu:0", module: str = "jit_step") -> Event:
    return Event(start, end, device, module, op)


def shared(events, steps=((0.0, 100.0),), containers=()):
    return share_out(Trace(events, list(steps)), lambda module, op: op in containers)


def seconds(events, **more):
    return {op: s for (_, op), s in shared(events, **more)["cpu:0"].items()}


def test_operations_that_overlap_share_the_time_in_which_they_do():
    assert seconds([event(0, 4, "a"), event(2, 6, "b")]) == {"a": 3.0, "b": 3.0}


def test_a_hole_is_nobodys_time():
    assert seconds([event(0, 1, "a"), event(3, 4, "b")]) == {"a": 1.0, "b": 1.0}


def test_a_loop_counts_only_where_nothing_in_it_runs():
    assert seconds([event(0, 10, "loop"), event(1, 4, "a"), event(4, 9, "b")], containers={"loop"}) == {
        "loop": 2.0,
        "a": 3.0,
        "b": 5.0,
    }


def test_devices_are_apart():
    found = shared([event(0, 4, "a"), event(0, 4, "a", device="cpu:1")])
    assert {d: sum(ops.values()) for d, ops in found.items()} == {"cpu:0": 4.0, "cpu:1": 4.0}


def test_only_what_lies_in_a_step_counts():
    assert [
        (e.start_s, e.end_s) for e in clip([event(0, 3, "a"), event(5, 6, "b"), event(7, 12, "c")], [(1.0, 2.0), (8.0, 9.0)])
    ] == [(1.0, 2.0), (8.0, 9.0)]


def test_a_collective_is_hidden_where_its_device_does_something_else():
    """Four seconds, of which one is covered by a product and one by a loop that only contains it."""
    events = [event(0, 4, "gather"), event(3, 6, "d"), event(0, 1, "loop"), event(0, 9, "d", device="cpu:1")]
    found = exposed_share(Trace(events, [(0.0, 10.0)]), lambda m, op: op == "gather", lambda m, op: op == "loop")
    assert (
        found == 0.75 and exposed_share(Trace(events, [(5.0, 10.0)]), lambda m, op: op == "gather", lambda m, op: False) is None
    )


def programs() -> Programs:
    return Programs([CompiledProgram("step", TEXT, 2, 7.0)], {"data": 2, "fsdp": 1, "tensor": 1}, [0, 0])


def measured(events, steps_s=(10.0,), wait_s=0.0):
    timing = Timing(list(steps_s), [wait_s] * len(steps_s), [0.0] * len(steps_s))
    return measure_shares(Trace(events, [(0.0, 12.0)]), programs(), timing)


EVENTS = [event(0, 6, "d"), event(6, 8, "t"), event(8, 9, "u")]


def test_shares_are_proportions_of_the_trace_in_the_blocked_step():
    """Nine traced seconds of a step of ten: proportions 6, 2 and 1 of nine tenths, and a tenth idle."""
    found = measured(EVENTS)
    assert found.categories == pytest.approx(
        {"attention": 0.6, "feed-forward": 0.2, "idle": 0.1, "unattributed": 0.1, "data wait": 0.0}
    )
    assert found.kinds == pytest.approx({"matrix product": 0.6, "elementwise": 0.3, "data wait": 0.0, "idle": 0.1})
    assert found.coverage == {"cpu:0": pytest.approx(0.9)}


def test_a_profiler_that_stretches_steps_changes_no_share():
    """The same trace against a step of six seconds: coverage above 1, shares that sum to 1."""
    found = measured(EVENTS, steps_s=(6.0, 6.0, 60.0))
    assert found.categories["attention"] == pytest.approx(6 / 9) and sum(found.categories.values()) == pytest.approx(1)
    assert found.least_coverage == pytest.approx(1.5)


def test_a_machine_that_was_slower_without_the_profiler_leaves_no_device_idle():
    """Nine of twelve traced seconds, against a step of eighteen: a quarter is idle, and not a half."""
    found = measured(EVENTS, steps_s=(18.0,))
    assert found.categories["idle"] == pytest.approx(0.25) and found.categories["attention"] == pytest.approx(0.5)
    assert found.least_coverage == pytest.approx(0.5)


def test_time_between_the_operations_of_a_loop_is_idle_unless_a_scope_claims_it():
    """A second after each of two products in a loop over layers, and after one in a loop inside of the feed-forward."""
    events = [event(0, 4, "layers"), event(0, 1, "d"), event(2, 3, "d"), event(4, 6, "planted"), event(4, 5, "t")]
    found = measured(events)
    assert found.categories == pytest.approx({"attention": 0.2, "feed-forward": 0.2, "data wait": 0.0, "idle": 0.6})
    assert found.least_coverage == pytest.approx(0.4)


def test_an_operation_lasts_until_its_end_is_marked_and_not_until_its_call_returns():
    """A product whose call returns after one second of four: the rest is its own, and idle time only in the naive column."""
    events = [until_its_end(event(0, 1, "d"), 4.0), until_its_end(event(4, 8, "t"), 8.0), until_its_end(event(8, 9, "u"), None)]
    found = measured(events)
    assert found.categories == pytest.approx(
        {"attention": 0.4, "feed-forward": 0.4, "unattributed": 0.1, "data wait": 0.0, "idle": 0.1}
    )
    assert found.calls == pytest.approx(
        {"attention": 0.1, "feed-forward": 0.4, "unattributed": 0.1, "data wait": 0.0, "idle": 0.4}
    )
    assert (found.least_coverage, found.coverage_of_calls) == (pytest.approx(0.9), pytest.approx(0.6))
    assert found.traced_sum_s == pytest.approx(6.0)


def test_a_file_names_the_ends_of_its_calls(tmp_path, monkeypatch):
    """Two calls of one operation; the second ends before the first, and of a third the end was not recorded."""
    of_device = {"hlo_op": "dot.1", "hlo_module": "jit_step", "device_ordinal": 1}
    calls = [raw("dot.1", start, start + 1, **of_device, _p=producer) for start, producer in ((0, 7), (2, 8), (20, 9))]
    ends = [raw("end: dot.1", 5, 6, _c=8), raw("end: dot.1", 9, 10, _c=7), raw("end: dot.1", 30, 31)]
    lines = [SimpleNamespace(name="tf_XLAEigen/1", events=events) for events in (ends, [raw(STEP, 0, 40), *calls])]
    data = SimpleNamespace(planes=[SimpleNamespace(name="/host:CPU", lines=lines)])
    monkeypatch.setattr(ProfileData, "from_file", lambda path: data)
    found = read(tmp_path / "x.xplane.pb").events
    assert [(e.start_s, e.returned_s, e.end_s, e.device) for e in found] == [
        (0.0, 1.0, 9.0, "cpu:1"), (2.0, 3.0, 5.0, "cpu:1"), (20.0, None, 21.0, "cpu:1")
    ]  # fmt: skip


def test_an_end_that_is_marked_late_is_where_its_thread_went_on_with_others(tmp_path, monkeypatch):
    """The thread that finds `a` done at 3 runs `b` and `c`, which waited for it, and only then marks the end of `a`, and of the
    loop that `a` was the last of; what it does in another region is no part of that."""
    of_device = {"hlo_module": "jit_step", "device_ordinal": 0}
    call = lambda op, start, end, producer: raw(op, start, end, hlo_op=op, _p=producer, **of_device)  # noqa: E731
    first = [raw(STEP, 0, 40), call("loop", 0, 0.5, 6), call("a", 1, 2, 7)]
    other = [
        call("z", 1.2, 1.4, 5), raw(TASK, 2.5, 2.5), raw(GOES_ON, 3, 9), call("b", 4, 5, 8), raw("end: b", 5, 5, _c=8),
        call("c", 5, 6, 9), raw("end: a", 9.1, 9.1, _c=7), raw("end: loop", 9.2, 9.2, _c=6),
        raw(TASK_DONE, 10, 10), raw(TASK, 11, 11), call("d", 12, 13, 10), call("e", 13, 14, 11), raw("end: c", 15, 15, _c=9),
    ]  # fmt: skip
    lines = [SimpleNamespace(name=f"tf_XLAEigen/{i}", events=events) for i, events in enumerate((first, other))]
    data = SimpleNamespace(planes=[SimpleNamespace(name="/host:CPU", lines=lines)])
    monkeypatch.setattr(ProfileData, "from_file", lambda path: data)
    assert {e.op: (e.start_s, e.end_s) for e in read(tmp_path / "x.xplane.pb").events} == {
        "loop": (0.0, 3.0), "z": (1.2, 1.4), "a": (1.0, 3.0), "b": (4.0, 5.0), "c": (5.0, 12.0), "d": (12.0, 13.0), "e": (13.0, 14.0)
    }  # fmt: skip


def test_operations_that_wait_for_each_other_do_not_overlap(tmp_path):
    """On the installed jax: each needs what the one before it made, so that at no moment two of them run."""

    def chain(x):
        for _ in range(6):
            x = jnp.tanh(x @ x)
            x = jax.lax.fori_loop(0, 3, lambda _, y: y @ y / 1000, x)
        return x

    program = jax.jit(chain).lower(jnp.ones((700, 700))).compile()
    x = jax.block_until_ready(program(jnp.ones((700, 700))))
    with recording(tmp_path):
        for number in range(3):
            with step_annotation(number):
                x = jax.block_until_ready(program(x))
    found = read(newest(tmp_path))
    work = [e for e in found.events if not e.op.startswith(("while", "call"))]
    assert len(work) > 60 and any(e.returned_s for e in work)
    assert sum(e.end_s - e.start_s for e in work) < 1.05 * covered(work)


def raw(name: str, start_s: float, end_s: float, **stats):
    """An event of ProfileData."""
    return SimpleNamespace(name=name, start_ns=start_s * 1e9, end_ns=end_s * 1e9, stats=list(stats.items()))


def test_the_installed_jax_marks_the_end_of_every_operation(tmp_path):
    program = jax.jit(lambda x: jnp.sort(x @ x).sum()).lower(jnp.ones((64, 64))).compile()
    with recording(tmp_path), step_annotation(0):
        jax.block_until_ready(program(jnp.ones((64, 64))))
    events = [e for plane in ProfileData.from_file(str(newest(tmp_path))).planes for line in plane.lines for e in line.events]
    called = {dict(e.stats)["_p"]: e for e in events if "hlo_op" in dict(e.stats)}
    ended = {dict(e.stats)["_c"]: e for e in events if e.name.startswith(END)}
    assert len(called) > 2 and set(called) <= set(ended)
    assert all(ended[p].name == END + e.name and ended[p].start_ns >= e.start_ns for p, e in called.items())


def test_waiting_for_data_has_its_share():
    found = measured(EVENTS, steps_s=(20.0,), wait_s=10.0)
    assert found.categories["data wait"] == 0.5 and sum(found.categories.values()) == pytest.approx(1)
    assert verdict(found.kinds) == ("input", 0.5)


def test_a_trace_of_another_program_is_refused():
    with pytest.raises(
        UserError, match="another program: 100% of its device time is in jit_other, and none of that in jit_step"
    ):
        measured([event(0, 6, "d", module="jit_other")])


def test_flops_of_all_runs_and_the_compilers_own_count():
    assert (programs().flops, programs().counted_flops) == (2 * 2 * 8**3, 14.0)


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no trace"):
        newest(tmp_path)
    (tmp_path / "x.xplane.pb").write_bytes(b"")
    with pytest.raises(UserError, match="no trace of sharder profile"):
        read(tmp_path / "x.xplane.pb")


@pytest.mark.parametrize(
    "kinds, bound",
    [
        ({"matrix product": 0.5, "elementwise": 0.3}, "compute"),
        ({"matrix product": 0.3, "elementwise": 0.2, "copy": 0.2}, "bandwidth"),
        ({"matrix product": 0.3, "collective": 0.5}, "communication"),
        ({"matrix product": 0.3, "idle": 0.6}, "host"),
    ],
)
def test_the_verdict_is_what_takes_the_most(kinds, bound):
    assert verdict(kinds)[0] == bound
