"""Recipes of runs that stay in one phase, once they are in it, and say so: a file <phase>.<process> in SHARDER_TEST_MARKS."""

import dataclasses
import functools
import os
import time
from pathlib import Path

from small import small


def mark(phase):
    (Path(os.environ["SHARDER_TEST_MARKS"]) / f"{phase}.{os.environ.get('JAX_PROCESS_ID', 0)}").touch()


def stay(phase, seconds=1000.0):
    mark(phase)
    time.sleep(seconds)


def slowed(function, phase, seconds=1000.0):
    """The function, called only after a wait in the phase."""

    @functools.wraps(function)
    def call(*arguments, **named):
        stay(phase, seconds)
        return function(*arguments, **named)

    return call


def compile():  # noqa: A001
    """Of the step: process 0 alone compiles other programs before it, to measure its processor."""
    from sharder.train import opening

    opening.compile_step = slowed(opening.compile_step, "compile")
    return small()


def restore():
    from sharder.train import opening

    opening.restore_newest = slowed(opening.restore_newest, "restore")
    return small()


def evaluation():
    from sharder.train import evaluation

    batches = evaluation.sequential_batches

    def without_end(*arguments):
        while True:
            yield from batches(*arguments)
            stay("evaluation", 0.05)

    evaluation.sequential_batches = without_end
    return dataclasses.replace(small(), train=dataclasses.replace(small().train, validate_every=3, steps=100_000))


def save():
    """The devices' copies are taken, and storage is slow."""
    from sharder.checkpoint import save

    save._outcome = slowed(save._outcome, "save", 2.0)
    return dataclasses.replace(small(), train=dataclasses.replace(small().train, steps=100_000))
