"""RLDS episodes as frames: an index of the shards is built once, and every step is then found by its number.

The index holds all numbers, and for each picture its place in a shard. It is kept in a cache, under the names, sizes and times of
the shards.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from sharder.config import UserError
from sharder.data.frames import Wanted
from sharder.data.rlds.records import parse_example, read_records

STEPS = "steps/"
INSTRUCTIONS = ("language_instruction", "natural_language_instruction", "observation/natural_language_instruction")
PICTURE_MAGIC = (b"\x89PNG", b"\xff\xd8\xff")


@dataclass(frozen=True)
class RldsSource:
    """Frames are numbered through all episodes, in the order of shards and records."""

    folder: Path
    paths: tuple[Path, ...]
    lengths: np.ndarray
    columns: dict[str, np.ndarray]
    """(frames, size), named without `steps/`."""
    places: dict[str, np.ndarray]
    """Of each camera's pictures: shard, first byte and size, int64 (frames, 3)."""
    texts: tuple[str, ...]
    text_of: np.ndarray
    """Index into texts, (frames,)."""
    content: str
    """SHA-256 (hex) over the checksums of all records."""

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def num_frames(self) -> int:
        return int(self.lengths.sum())

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(self.places)

    @cached_property
    def starts(self) -> np.ndarray:
        return np.cumsum(self.lengths) - self.lengths

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"rlds 1 {self.content}".encode()).hexdigest()

    def prompts(self, frames: np.ndarray) -> list[str]:
        return [self.texts[i] for i in self.text_of[frames].tolist()]

    def pictures(self, camera: str, frames: np.ndarray) -> list[tuple[np.ndarray, Wanted]]:
        shard, begin, size = self.places[camera][frames].T
        groups = [(s, np.flatnonzero(shard == s)) for s in np.unique(shard).tolist()]
        return [(at, Wanted(str(self.paths[s]), None, begin[at], size[at])) for s, at in groups]


def find_shards(folder: Path, split: str = "train") -> tuple[Path, ...]:
    """The shards of a split, in order; of several versions below `folder` the last. Raises UserError where there are none."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}.")
    for place in (folder, *sorted((p for p in folder.iterdir() if p.is_dir()), key=_version, reverse=True)):
        paths = sorted(p for p in place.glob("*.tfrecord*") if re.search(rf"(^|-){split}\.tfrecord", p.name))
        if paths:
            totals = {m.group(1) for p in paths if (m := re.search(r"-of-(\d+)$", p.name))}
            if totals and {int(t) for t in totals} != {len(paths)}:
                raise UserError(
                    f"{place} has {len(paths)} shards of split {split}, but their names say {', '.join(sorted(totals))}."
                )
            return tuple(paths)
    raise UserError(f"{folder} has no *-{split}.tfrecord-* file, nor has a folder in it.")


def _version(folder: Path) -> tuple:
    return tuple(int(part) for part in re.findall(r"\d+", folder.name))


def open_rlds(folder: str | Path, cache: str | None = None) -> RldsSource:
    """Raises UserError naming shard and record where one cannot be read."""
    folder = Path(folder)
    paths = find_shards(folder)
    cache_folder = Path(cache) if cache else Path.home() / ".cache" / "sharder" / "rlds"
    states = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
    file = cache_folder / f"{hashlib.sha256(repr(('rlds 1', str(folder.resolve()), states)).encode()).hexdigest()[:24]}.npz"
    try:
        with np.load(file) as index:
            index = dict(index)
    except (OSError, ValueError, KeyError, EOFError):
        index = _build(paths)
        _keep(file, index)
    facts = json.loads(bytes(index.pop("facts")).decode())
    return RldsSource(
        folder, paths, index.pop("lengths"),
        {n: index[f"column {n}"] for n in facts["columns"]}, {n: index[f"places {n}"] for n in facts["cameras"]},
        tuple(facts["texts"]), index["text_of"], facts["content"],
    )  # fmt: skip


def _keep(file: Path, index: dict[str, np.ndarray]) -> None:
    """Other processes may do the same at the same time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        work = file.with_suffix(f".{os.getpid()}.tmp")
        with work.open("wb") as out:
            np.savez(out, **index)
        work.rename(file)
    except OSError:
        pass  # it is built again next time


def _build(paths: tuple[Path, ...]) -> dict[str, np.ndarray]:
    columns: dict[str, list] = {}
    places: dict[str, list] = {}
    lengths, text_of, texts, digest = [], [], {}, hashlib.sha256()
    for shard, path in enumerate(paths):
        for number, record in enumerate(read_records(path)):
            where = f"{path}, record {number}"
            try:
                features = parse_example(record.data)
            except (ValueError, UnicodeDecodeError) as error:
                raise UserError(f"{where}, is no tf.train.Example: {error}.") from None
            steps = {n.removeprefix(STEPS): v for n, v in features.items() if n.startswith(STEPS)}
            length = _count_steps(where, steps)
            numbers, pictures, words = _sort_out(record.data, steps, length)
            if lengths and (set(numbers) != set(columns) or set(pictures) != set(places)):
                odd = sorted((set(numbers) | set(pictures)) ^ (set(columns) | set(places)))
                raise UserError(f"{where}, field {STEPS}{odd[0]}, is in some episodes and not in others, or of another size.")
            for name, values in numbers.items():
                columns.setdefault(name, []).append(values)
                if columns[name][0].shape[1] != values.shape[1]:
                    raise UserError(
                        f"{where}, field {STEPS}{name}, has {values.shape[1]} numbers a step, but {columns[name][0].shape[1]} in the first episode."
                    )
            for name, spans in pictures.items():
                places.setdefault(name, []).append(
                    np.column_stack([np.full(length, shard), spans[:, 0] + record.start, spans[:, 1]])
                )
            text_of += [texts.setdefault(text, len(texts)) for text in words]
            lengths.append(length)
            digest.update(f"{len(record.data)} {record.crc}\n".encode())
    if not lengths:
        raise UserError(f"{paths[0].parent} has no episode in {len(paths)} shards.")
    facts = {"columns": list(columns), "cameras": list(places), "texts": list(texts), "content": digest.hexdigest()}
    index = {"lengths": np.array(lengths, np.int64), "text_of": np.array(text_of, np.int64)}
    index |= {f"column {n}": np.concatenate(parts) for n, parts in columns.items()}
    index |= {f"places {n}": np.concatenate(parts) for n, parts in places.items()}
    return index | {"facts": np.frombuffer(json.dumps(facts).encode(), np.uint8)}


def _count_steps(where: str, steps: dict[str, np.ndarray]) -> int:
    """RLDS gives every step the flag is_first."""
    for name in ("is_first", "is_last", "is_terminal"):
        if name in steps:
            if not len(steps[name]):
                raise UserError(f"{where}, field {STEPS}{name}, is empty: the episode has no steps.")
            return len(steps[name])
    raise UserError(
        f"{where}, has no field {STEPS}is_first, so it is no episode of RLDS; it has {', '.join(sorted(steps)) or 'no steps'}."
    )


def _sort_out(data: bytes, steps: dict[str, np.ndarray], length: int) -> tuple[dict, dict, list[str]]:
    """Numbers (length, size) by name, spans of pictures (length, 2) by name, and the instruction of every step."""
    numbers, pictures, texts = {}, {}, {}
    for name, values in steps.items():
        if not len(values) or len(values) % length:
            continue
        if values.ndim == 1:
            numbers[name] = np.ascontiguousarray(values.reshape(length, -1))
        elif len(values) == length:
            begin = int(values[0, 0])
            (pictures if data[begin : begin + 4].startswith(PICTURE_MAGIC) else texts)[name] = values
    name = next((n for n in INSTRUCTIONS if n in texts), None)
    words = [data[b : b + n].decode(errors="replace") for b, n in texts[name].tolist()] if name else [""] * length
    return numbers, pictures, words


def is_rlds(folder: Path) -> bool:
    """Whether shards lie there."""
    try:
        return bool(find_shards(folder))
    except UserError:
        return False
