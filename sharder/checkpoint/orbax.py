"""What has to be said to orbax, and what it must not say."""

import functools
import logging
import sys
from pathlib import Path

import jax

from sharder.models.build import unflatten

MIN_REPLICA_SLICE_BYTES = 64 << 20
PARTS = ("params", "train_state")
"""Items of a checkpoint."""


def items(leaves: dict) -> dict[str, dict]:
    """The two trees that a state is saved as: parameters, which others read alone, and the rest."""
    params = {p.removeprefix("params/"): x for p, x in leaves.items() if p.startswith("params/")}
    return {
        "params": unflatten(params),
        "train_state": unflatten({p: x for p, x in leaves.items() if not p.startswith("params/")}),
    }


def join_parts(where: Path) -> str | None:
    """Makes one tree of what processes wrote without seeing one another's files, in each item that is none yet; returns what
    went wrong. The tree refers to their files. Orbax's own `finalize` asks for the devices, which are not chosen yet where a
    command brings a run near."""
    import tensorstore

    context = tensorstore.Context()  # one for all: only then may a tree refer to another's files

    def tree(folder: Path):
        spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}
        return tensorstore.KvStore.open(spec, context=context).result()

    try:
        for name in PARTS:
            if not (where / name / "manifest.ocdbt").exists():
                whole, transaction = tree(where / name), tensorstore.Transaction(atomic=True)
                for part in sorted((where / name).glob("ocdbt.process_*")):
                    tree(part).experimental_copy_range_to(whole.with_transaction(transaction)).result()
                transaction.commit_sync()
    except Exception as error:  # tensorstore raises many kinds
        return f"what its processes wrote cannot be joined: {reason(error)}"


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
