"""Checkpoints of a run: saved while training goes on, counted only when whole, verified when restored into any plan.

RUN_DIR/checkpoints/<step>/ holds two orbax items, `params` and `train_state`, and `manifest.json`, which process 0
writes last and renames into place: a folder without it is no checkpoint, whatever orbax says of it (orbax lists empty
and torn folders as good). The manifest records what the run was, the size of every file, and a fingerprint of every leaf,
since orbax accepts flipped bytes and casts dtypes in silence.

Here stands what needs no jax; `save.py` writes, `restore.py` reads.
"""

from sharder.checkpoint.folders import (
    choose_step,
    entry,
    fault,
    folder,
    list_others,
    list_steps,
    read_manifest,
    set_aside,
    set_aside_unfinished,
    shown,
    way_out,
)  # fmt: skip
from sharder.checkpoint.manifest import Damaged, write_durably, write_manifest

__all__ = [
    "Damaged", "choose_step", "entry", "fault", "folder", "list_others", "list_steps", "read_manifest", "set_aside", "set_aside_unfinished", "shown",
    "way_out", "write_durably", "write_manifest",
]  # fmt: skip
