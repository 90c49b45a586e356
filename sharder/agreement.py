"""What the processes of a run tell one another through jax's coordination service: decisions, facts that must agree, values."""

import itertools
import json
import time
from collections.abc import Callable

from sharder.config import UserError
from sharder.rendezvous import Facts, disagreements

DECISION_TIMEOUT_S = 600
"""How long processes wait for a decision of process 0, which may have to read checkpoints for it."""


def store():
    """The key-value store that process 0 holds for all."""
    from jax._src import distributed  # the key-value store has no public name

    return distributed.global_state.client


def _position() -> tuple[int, int]:
    import jax

    return jax.process_index(), jax.process_count()


_TURNS = itertools.count()
"""Numbers the exchanges of this process; all processes take part in the same ones in the same order."""


def decide(choose: Callable[[], dict], timeout_s: int = DECISION_TIMEOUT_S) -> dict:
    """What `choose` returns in process 0, in every process; JSON values only. Its UserError is raised in all of them.

    For decisions from files that process 0 may be writing already while another process looks at them, and for numbers that must
    have the same bits everywhere.
    """
    index, count = _position()
    if count == 1:
        return choose()
    client, what = store(), getattr(choose, "__qualname__", "what is to be done")
    key = f"sharder/decide/{next(_TURNS)}/{what}"
    if index == 0:
        try:
            decision = {"value": choose()}
        except UserError as error:
            decision = {"error": str(error)}
        client.key_value_set(key, json.dumps(decision))
    else:
        found = _value(key, timeout_s)
        if found is None:
            raise UserError(
                f"process {index} of {count} waited {timeout_s} s for what process 0 decides in {what}: look at that process."
            )
        decision = json.loads(found)
    if "error" in decision:
        raise UserError(decision["error"])
    return decision["value"]


class PeerLost(Exception):
    """Another process of the run did not answer: it is gone, or stuck."""


def exchange(name: str, value: object, timeout_s: float = 300) -> list:
    """What every process gives under this name, by index; JSON values only. A name is used once; any thread may call.

    Raises PeerLost naming the process that has not given its value within `timeout_s`.
    """
    own, count = _position()
    if count == 1:
        return [value]
    client, deadline, values = store(), time.monotonic() + timeout_s, []
    prefix = f"sharder/exchange/{name}"
    for index in range(-1, count):
        try:
            if index < 0:
                client.key_value_set(f"{prefix}/{own}", json.dumps(value))
            else:
                left_ms = max(int(1000 * (deadline - time.monotonic())), 1)
                values.append(json.loads(client.blocking_key_value_get(f"{prefix}/{index}", left_ms)))
        except Exception as error:  # jax raises errors of the backend
            who = "process 0 cannot be reached" if index < 0 else f"process {index} did not answer within {timeout_s:g} s"
            raise PeerLost(f"{who} ({name}): {str(error).splitlines()[0][:200]}") from error
    return values


def _value(key: str, timeout_s: float) -> str | None:
    """The value of a key, waited for; None where it is not set in time."""
    try:
        return store().blocking_key_value_get(key, max(1, int(1000 * timeout_s)))
    except Exception as error:  # of jaxlib, DEADLINE_EXCEEDED
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def agree(what: str, facts: Facts, timeout_s: float) -> None:
    """A barrier at which all processes must hold the same `facts`; nothing for a single process.

    Raises UserError, in all of them, naming process and both values where two differ, and who did not come within `timeout_s`.
    """
    index, count = _position()
    if count == 1:
        return
    client, key = store(), f"sharder/agree/{next(_TURNS)}"
    client.key_value_set(f"{key}/{index}", json.dumps(facts))
    if index == 0:
        deadline = time.monotonic() + timeout_s
        found = {i: _value(f"{key}/{i}", deadline - time.monotonic()) for i in range(1, count)}
        missing = ", ".join(str(i) for i, text in found.items() if text is None)
        differ = [d for i, text in found.items() if text is not None for d in disagreements(facts, json.loads(text), i)]
        late = [f"process 0 waited {timeout_s:g} s at the barrier '{what}' for process {missing} of {count}"] if missing else []
        same = [f"All processes of a run need the same {what}"] if differ else []
        verdict = ". ".join(filter(None, ["; ".join(late + differ[:8]), *same]))
        client.key_value_set(f"{key}/verdict", verdict)
    else:
        # Process 0 speaks last, and may have waited for others before.
        verdict = _value(f"{key}/verdict", timeout_s + 5)
        if verdict is None:
            verdict = f"process {index} waited {timeout_s:g} s at the barrier '{what}' for process 0 of {count}"
    if verdict:
        raise UserError(f"{verdict}.")


def forget(name: str) -> None:
    """Frees what this process gave under a name, once it is certain that all have it: after a later exchange."""
    index, count = _position()
    if count > 1:
        store().key_value_delete(f"sharder/exchange/{name}/{index}")
