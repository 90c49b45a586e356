"""What to do after an attempt has ended, or when the machine's capacity has changed: a pure function of events.

failed            start again, at once after progress, else after 1, 2, 4 ... 60 s and a little more by chance
failed as before  an exception with the same words in the same step would come a third time: give up, and name it
failed twice, by the same process, without progress
                  go on without it, with the largest world that is allowed; try the whole one again after a while
capacity changed  save, and go on with the largest world that there is room for
done, stopped, the user's to mend, too many restarts
                  finish
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sharder.config import UserError
from sharder.stop import PREEMPTED

MAX_DELAY_S = 60.0
SHRINK_AFTER = 2
"""Failures in a row of one process, without progress between them."""
REPEATS = 2
"""An error that came so often in the same step, with the same words, is not tried again."""


@dataclass(frozen=True)
class Policy:
    worlds: tuple[int, ...]
    """Numbers of processes that the run may have, ascending; the last is what was asked for."""
    max_restarts: int = 10
    """Within `window_s`; 0: never start again."""
    window_s: float = 3600.0
    regrow_s: float = 60.0
    """After so long the whole world is tried again; doubled every time that fails."""


@dataclass(frozen=True)
class State:
    world: int
    best_step: int = 0
    """Furthest step of all attempts."""
    restarts: tuple[float, ...] = ()
    """When there were some, within the window."""
    failures_without_progress: int = 0
    last_error: tuple[int, str] | None = None
    """Step and words of the last failure that had words."""
    repeats: int = 0
    last_culprit: int | None = None
    same_culprit: int = 0
    without_since: float | None = None
    """When a process was given up."""
    regrows: int = 0


@dataclass(frozen=True)
class Ended:
    """An attempt ended."""

    time_s: float
    code: int
    step: int
    culprit: int | None = None
    error: str = ""
    """Words of a process that ended with an exception or a message."""
    asked_to_stop: bool = False
    """By the user, a STOP file, a time limit."""


@dataclass(frozen=True)
class Capacity:
    """So many processes have room now; told again and again."""

    time_s: float
    processes: int
    step: int


@dataclass(frozen=True)
class Start:
    processes: int
    delay_s: float
    why: str


@dataclass(frozen=True)
class Resize:
    """Save, stop, and start again with so many."""

    processes: int
    why: str


@dataclass(frozen=True)
class Finish:
    code: int
    why: str


def begin(policy: Policy, capacity: int) -> tuple[State, Start]:
    """Raises UserError where there is no room for the smallest world."""
    world = largest(policy.worlds, capacity)
    if world is None:
        raise UserError(
            f"there is room for {capacity} processes, but the run needs at least {policy.worlds[0]} (--min-processes)."
        )
    return State(world), Start(world, 0.0, "")


def largest(worlds: Sequence[int], capacity: int) -> int | None:
    return max((w for w in worlds if w <= capacity), default=None)


def after(policy: Policy, state: State, event: Ended, capacity: int, chance: float) -> tuple[State, Start | Finish]:
    """What follows the end of an attempt. `capacity`: processes that have room; `chance`: in [0, 1), for the jitter."""
    if event.code == 0:
        return state, Finish(0, "")
    if event.asked_to_stop:
        return state, Finish(PREEMPTED if event.code == PREEMPTED else event.code, "")
    if event.code == 2:
        return state, Finish(2, "")
    state = _remember(state, event)
    if policy.max_restarts == 0:
        return state, Finish(event.code, "")
    if state.repeats >= REPEATS:
        return state, Finish(
            1, f"the same error came {state.repeats} times in step {event.step}, so it would come again: {event.error}"
        )
    recent = tuple(t for t in state.restarts if event.time_s - t < policy.window_s)
    if len(recent) >= policy.max_restarts:
        return state, Finish(1, f"{len(recent)} restarts within {policy.window_s:.0f} s (--max-restarts {policy.max_restarts})")
    state = replace(state, restarts=(*recent, event.time_s))
    return _choose_world(policy, state, event, capacity, chance)


def _remember(state: State, event: Ended) -> State:
    progressed = event.step > state.best_step
    # Numbers in the words may be ports, addresses and times.
    error = (event.step, re.sub(r"0x[0-9a-f]+|\d+", "#", event.error)) if event.error else None
    same = not progressed and event.culprit is not None and event.culprit == state.last_culprit
    return replace(
        state,
        best_step=max(state.best_step, event.step),
        failures_without_progress=0 if progressed else state.failures_without_progress + 1,
        repeats=0 if error is None else state.repeats + 1 if error == state.last_error else 1,
        last_error=error,
        same_culprit=state.same_culprit + 1 if same else 1,
        last_culprit=event.culprit,
        regrows=0 if progressed and state.without_since is None else state.regrows,
    )


def _choose_world(policy: Policy, state: State, event: Ended, capacity: int, chance: float) -> tuple[State, Start | Finish]:
    world, why = largest(policy.worlds, capacity), ""
    if world is None:
        return state, Finish(1, f"there is room for {capacity} processes, but the run needs at least {policy.worlds[0]}")
    smaller = largest(policy.worlds, state.world - 1)
    if state.same_culprit > SHRINK_AFTER - 1 and state.failures_without_progress >= SHRINK_AFTER - 1 and smaller is not None:
        state = replace(state, without_since=event.time_s, regrows=state.regrows + 1, same_culprit=0)
        world, why = min(world, smaller), f"process {event.culprit} failed {SHRINK_AFTER} times in a row"
    elif state.without_since is not None:
        world = min(world, state.world)
    if world < state.world and not why:
        why = f"there is room for {capacity}"
    wait = 2.0 ** (state.failures_without_progress - 1) if state.failures_without_progress else 0.0
    return replace(state, world=world), Start(world, min(wait, MAX_DELAY_S) * (1 + chance / 4), why)


def look(policy: Policy, state: State, event: Capacity) -> tuple[State, Resize | None]:
    """What follows from the machine's capacity while an attempt runs."""
    target, since = largest(policy.worlds, event.processes), state.without_since
    if target is None or target == state.world:
        return state, None
    if target < state.world:
        return replace(state, world=target), Resize(target, f"there is room for {event.processes}")
    waited = since is None or event.time_s - since >= policy.regrow_s * 2 ** (state.regrows - 1)
    if not waited or event.step <= state.best_step:  # not before this world has got somewhere
        return state, None
    return replace(state, world=target, without_since=None), Resize(target, f"there is room for {event.processes} again")


def allowed_worlds(asked: int, smallest: int, devices_per_process: int, facts: dict | None) -> tuple[int, ...]:
    """Numbers of processes from `smallest` to `asked` whose replicas divide the virtual workers and the batch.

    `facts`: parallel and train sections of the run's configuration; None: not known, so all powers-of-two fractions of `asked`.
    """
    candidates = range(smallest, asked)
    if facts is None:
        return (*(n for n in candidates if asked % n == 0), asked)
    parallel, batch = facts["parallel"], facts["global_batch_size"]

    def fits(n: int) -> bool:
        replicas, rest = divmod(n * devices_per_process, parallel.get("tensor") or 1)
        slices = parallel.get("virtual_workers") if facts["exact"] else batch
        fixed = (parallel.get("data"), parallel.get("fsdp"))
        meshes = replicas % (fixed[1] or fixed[0] or 1) == 0 if None in fixed else fixed[0] * fixed[1] == replicas
        return rest == 0 and replicas > 0 and slices % replicas == 0 and batch % replicas == 0 and meshes

    return (*(n for n in candidates if fits(n)), asked)
