"""What has to be said to orbax, and what it must not say."""

import functools
import logging
import sys

import jax

from sharder.models.build import unflatten

MIN_REPLICA_SLICE_BYTES = 64 << 20


def items(leaves: dict) -> dict[str, dict]:
    """The two trees that a state is saved as: parameters, which others read alone, and the rest."""
    params = {p.removeprefix("params/"): x for p, x in leaves.items() if p.startswith("params/")}
    return {
        "params": unflatten(params),
        "train_state": unflatten({p: x for p, x in leaves.items() if not p.startswith("params/")}),
    }


def reason(error: BaseException | None) -> str:
    """The first line of an error, or of what it came from, that was written for people (orbax prints functions)."""
    kind = ""
    while error is not None:
        line = (str(error).splitlines() or [""])[0]
        if line and " method " not in line and "<function" not in line:
            return line if len(line) <= 240 else f"{line[:80]} ... {line[-140:]}"
        kind, error = type(error).__name__, error.__cause__ or error.__context__
    return kind


@functools.cache
def write_small_arrays_whole() -> None:
    """Lets orbax divide the writing of a replicated array among its replicas only where the pieces are large.

    Each piece is cut by a program compiled for it alone: 82 of them held up the first save of a small model by 4 s.
    """
    import orbax.checkpoint as ocp

    handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_REPLICA_SLICE_BYTES)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)


def streaming_handlers():
    """A registry whose arrays are copied from the devices when it is their turn to be written, and not before.

    `is_prioritized_key_fn` of orbax's handler, which should say so, is read by nobody in this version.
    """
    import orbax.checkpoint as ocp
    from orbax.checkpoint._src.serialization.types import DefaultSerializationStatusCallback, TransferPriority

    class InTurn(DefaultSerializationStatusCallback):
        def key_priority(self, _) -> TransferPriority:
            return TransferPriority.ASYNCHRONOUS_DEPRIORITIZED

    handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=MIN_REPLICA_SLICE_BYTES, callback=InTurn())
    return ocp.type_handlers.create_type_handler_registry((jax.Array, handler))


@functools.cache
def quietly() -> None:
    """Leaves it to us to say why a save or a restore failed: orbax logs the traceback of each of its threads, and for each array
    that it no longer waits for tensorstore prints one from an event loop that is closed already."""
    logging.getLogger("absl").addFilter(
        lambda record: not record.exc_info and "overriding jax.Array" not in record.getMessage()
    )
    previous = sys.excepthook

    def hook(kind, error, trace):
        if not (kind is RuntimeError and str(error) == "Event loop is closed"):
            previous(kind, error, trace)

    sys.excepthook = hook
