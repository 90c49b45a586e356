"""A state in files of this host's memory: for each process and generation one file of raw shards, and a table of what is where.

A generation is whole once the table of each process is there, which is written last. The files of all processes of a host
are readable by each of them, so that another division of the state, or another number of processes, finds its parts too.
"""

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np

from sharder.checkpoint.manifest import Damaged, checksum

ALIGNMENT = 64
"""Bytes: of a cache line, and more than any element needs."""

Start = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A rectangular part of a leaf in a file."""

    path: str
    start: Start
    shape: tuple[int, ...]
    offset: int


def local_pieces(leaves: Mapping[str, jax.Array]) -> Iterator[tuple[str, Start, jax.Array]]:
    """Every distinct part of every leaf that the devices of this process hold: path, first element, and the part."""
    for path, x in leaves.items():
        seen = set()
        for shard in x.addressable_shards:
            start = tuple(s.start or 0 for s in shard.index)
            if start not in seen:
                seen.add(start)
                yield path, start, shard.data


def local_bytes(leaves: Mapping[str, jax.Array]) -> int:
    """Of a file that holds these leaves."""
    return sum(_aligned(x.nbytes) for _, _, x in local_pieces(leaves))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class ShardFile:
    """Memory for the shards of one process, taken once and written over and over."""

    def __init__(self, path: Path, size: int):
        """Raises OSError where memory does not do: the pages are reserved here, so that no later write can fail."""
        self.path = path
        with open(path, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
            self._memory = mmap.mmap(file.fileno(), max(size, 1))

    def write(self, leaves: Mapping[str, jax.Array], facts: dict) -> None:
        """Copies the shards; the file counts again when that is done. Returns when the arrays may be donated."""
        self.table.unlink(missing_ok=True)
        parts, pieces, offset = list(local_pieces(leaves)), [], 0
        for _, _, x in parts:
            x.copy_to_host_async()
        for path, start, x in parts:
            target = np.frombuffer(self._memory, x.dtype, math.prod(x.shape), offset).reshape(x.shape)
            np.copyto(target, np.asarray(x))
            pieces.append([path, start, x.shape, offset])
            offset += _aligned(x.nbytes)
        described = {p: {"shape": list(x.shape), "dtype": str(x.dtype)} for p, x in leaves.items()}
        table = {**facts, "leaves": described, "pieces": pieces, "size": offset}
        temporary = self.table.with_suffix(".tmp")
        temporary.write_text(json.dumps({**table, "sha256": checksum(json.loads(json.dumps(table)))}))
        temporary.rename(self.table)

    @property
    def table(self) -> Path:
        return self.path.with_suffix(".json")


@dataclass(frozen=True)
class Generation:
    """The files of one step on this host."""

    facts: dict
    """Of the first table, among them step and attempt."""
    files: tuple[tuple[Path, tuple[Piece, ...]], ...]

    @property
    def pieces(self) -> dict[str, dict[tuple, tuple[Path, int]]]:
        """By leaf and (start, shape): where the part is. Copies in several files count once."""
        found: dict[str, dict[tuple, tuple[Path, int]]] = {}
        for path, pieces in self.files:
            for p in pieces:
                found.setdefault(p.path, {})[p.start, p.shape] = path, p.offset
        return found

    def covers(self, target: Mapping[str, jax.ShapeDtypeStruct]) -> bool:
        """Whether every part that the devices of this process want is in the files, and the leaves are these."""
        described = {p: [list(x.shape), str(x.dtype)] for p, x in target.items()}
        if described != {p: [x["shape"], x["dtype"]] for p, x in self.facts["leaves"].items()}:
            return False
        pieces = self.pieces
        return all(
            sum(_size_of_overlap(piece, wanted) for piece in pieces.get(path, ())) == math.prod(wanted[1])
            for path, x in target.items()
            for wanted in _wanted(x)
        )

    def read(self, target: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """The leaves, placed as `target` says, not yet verified. Raises OSError where a file is gone."""
        memory = {path: np.memmap(path, np.uint8, "r") for path, _ in self.files}
        pieces = self.pieces

        def part(path: str, x: jax.ShapeDtypeStruct, index: tuple[slice, ...]) -> np.ndarray:
            wanted = _region(index, x.shape)
            out = np.empty(wanted[1], x.dtype)
            for piece, (file, offset) in pieces[path].items():
                if _size_of_overlap(piece, wanted):
                    there, here = _overlap(piece, wanted)
                    source = np.frombuffer(memory[file], x.dtype, math.prod(piece[1]), offset).reshape(piece[1])
                    out[here] = source[there]
            return out

        return {p: jax.make_array_from_callback(x.shape, x.sharding, partial(part, p, x)) for p, x in target.items()}


def _region(index: Sequence[slice], shape: tuple[int, ...]) -> tuple[Start, tuple[int, ...]]:
    """(start, shape) of a part of an array."""
    bounds = [s.indices(size)[:2] for s, size in zip(index, shape)]
    return tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)


def _wanted(x: jax.ShapeDtypeStruct) -> set[tuple[Start, tuple[int, ...]]]:
    return {_region(index, x.shape) for index in x.sharding.addressable_devices_indices_map(x.shape).values()}


def _bounds(piece: tuple, wanted: tuple) -> list[tuple[int, int]]:
    (a, m), (b, n) = piece, wanted
    return [(max(p, q), min(p + i, q + j)) for p, i, q, j in zip(a, m, b, n)]


def _size_of_overlap(piece: tuple, wanted: tuple) -> int:
    return math.prod(max(high - low, 0) for low, high in _bounds(piece, wanted))


def _overlap(piece: tuple, wanted: tuple) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The common part, as slices of each."""
    bounds = _bounds(piece, wanted)
    return tuple(tuple(slice(low - s, high - s) for (low, high), s in zip(bounds, start)) for start in (piece[0], wanted[0]))


def read_table(path: Path) -> dict:
    """Raises Damaged where it is not what was written, or its shards are cut off."""
    try:
        table = json.loads(path.read_bytes())
        size = path.with_suffix(".bin").stat().st_size
    except (OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from None
    if not isinstance(table, dict) or table.get("sha256") != checksum(table):
        raise Damaged(f"{path} is not what was written")
    if size < table["size"]:
        raise Damaged(f"{path.with_suffix('.bin')} has {size:,} bytes, but {table['size']:,} were written")
    return table


def generations(place: Path) -> tuple[list[Generation], list[str]]:
    """What is in a folder, by step ascending and the newest attempt last, and what is wrong with the rest."""
    found: dict[tuple[int, int], list] = {}
    faults = []
    for path in sorted(place.glob("*.json")):
        try:
            table = read_table(path)
        except Damaged as damage:
            faults.append(str(damage))
            continue
        pieces = tuple(Piece(p, tuple(start), tuple(shape), offset) for p, start, shape, offset in table["pieces"])
        found.setdefault((table["step"], table["attempt"]), []).append((table, path.with_suffix(".bin"), pieces))
    return [Generation(found[key][0][0], tuple((p, pieces) for _, p, pieces in found[key])) for key in sorted(found)], faults
