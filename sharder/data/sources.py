"""Where text comes from: files, rows of parquet files, or the standard library.

Opening a source reads its size only. Contents are memory-mapped (parquet is decoded a few thousand rows at a time), so
that a corpus may be far larger than memory.
"""

import glob
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sharder.config import DataConfig, UserError


class Block(NamedTuple):
    """Successive documents that lie together: document d is data[offsets[d] : offsets[d + 1]]."""

    data: np.ndarray  # uint8
    offsets: np.ndarray  # int64 (documents + 1,)


@dataclass(frozen=True)
class Topic:
    """A document in memory."""

    title: str
    content: bytes
    num_documents = 1

    def open(self) -> np.ndarray:
        return np.frombuffer(self.content, np.uint8)

    def digest(self) -> bytes:
        return hashlib.sha256(self.content).digest()

    def measure(self, digest: bytes) -> tuple[np.ndarray, np.ndarray]:
        return np.array([len(self.content)]), np.frombuffer(digest[:8], "<u8")

    def blocks(self) -> Iterator[Block]:
        yield Block(self.open(), np.array([0, len(self.content)]))

    def document_name(self, index: int) -> str:
        return f"topic {self.title!r}"


@lru_cache(maxsize=256)  # a map holds a file descriptor, and a process commonly may have 1024
def _map(path: str, num_bytes: int, modified_ns: int) -> np.ndarray:
    try:
        status = os.stat(path)
        if (status.st_size, status.st_mtime_ns) != (num_bytes, modified_ns):
            raise UserError(
                f"{path} changed while the run was reading it ({num_bytes} bytes before, {status.st_size} now), so its "
                "examples are no longer those of its fingerprint. Start again, on a file that nobody writes to."
            )
        return np.memmap(path, np.uint8, "r").view(np.ndarray)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None


@dataclass(frozen=True)
class MappedFile:
    """A file that is one document. The map is opened when needed, so that thousands of files cost no descriptors."""

    path: str
    num_bytes: int
    modified_ns: int
    num_documents = 1

    @classmethod
    def of(cls, path: str | Path) -> "MappedFile":
        status = os.stat(path)
        return cls(str(path), status.st_size, status.st_mtime_ns)

    def open(self) -> np.ndarray:
        return _map(self.path, self.num_bytes, self.modified_ns)

    def digest(self) -> bytes:
        return hashlib.sha256(self.open()).digest()

    def measure(self, digest: bytes) -> tuple[np.ndarray, np.ndarray]:
        return np.array([self.num_bytes]), np.frombuffer(digest[:8], "<u8")

    def blocks(self) -> Iterator[Block]:
        yield Block(self.open(), np.array([0, self.num_bytes]))

    def document_name(self, index: int) -> str:
        return self.path


@dataclass(frozen=True)
class ParquetColumn:
    """One text column of a parquet file; each row is a document, a null is an empty one."""

    file: MappedFile
    column: str
    num_documents: int

    @classmethod
    def of(cls, path: str | Path, column: str) -> "ParquetColumn":
        """Raises UserError if the file is no parquet file, lacks the column, or holds something else than text in it."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path) as parquet:
                schema, num_rows = parquet.schema_arrow, parquet.metadata.num_rows
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{path} cannot be read as parquet: {error}") from None
        if column not in schema.names:
            raise UserError(
                f"{path} has no column {column!r}, only {', '.join(map(repr, schema.names))}. "
                "Choose one with --data.text-column."
            )
        kind = schema.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if kind not in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()):
            raise UserError(f"Column {column!r} of {path} is {kind}, not text. Choose another with --data.text-column.")
        return cls(MappedFile.of(path), column, num_rows)

    def digest(self) -> bytes:
        # Of the file and not of the rows, so that finding ready token files needs no decoding.
        return hashlib.sha256(f"parquet {self.column}\n".encode() + self.file.digest()).digest()

    def measure(self, digest: bytes) -> tuple[np.ndarray, np.ndarray]:
        lengths, keys = [np.empty(0, np.int64)], []
        for data, offsets in self.blocks():
            lengths.append(np.diff(offsets))
            bounds = zip(offsets[:-1].tolist(), offsets[1:].tolist())
            keys += [hashlib.sha256(data[start:stop]).digest()[:8] for start, stop in bounds]
        return np.concatenate(lengths), np.frombuffer(b"".join(keys), "<u8")

    def blocks(self) -> Iterator[Block]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.file.open()  # raises if the file is no longer the one that was opened
        with pq.ParquetFile(self.file.path) as parquet:
            for batch in parquet.iter_batches(batch_size=8192, columns=[self.column]):
                text = batch.column(0).cast(pa.large_binary()).fill_null(b"")
                _, offsets, data = text.buffers()
                offsets = np.frombuffer(offsets, np.int64)[text.offset : text.offset + len(text) + 1]
                yield Block(np.frombuffer(data or b"", np.uint8), offsets)

    def document_name(self, index: int) -> str:
        return f"{self.file.path}, row {index}"


Source = Topic | MappedFile | ParquetColumn


def open_sources(data: DataConfig) -> tuple[str, tuple[Source, ...]]:
    """What `data.path` names, for messages, and its sources: a file, a folder (all files below it), a glob, or the standard
    library's topics.

    Files are ordered by their path below the folder; names that begin with a dot are left out, as a glob does. A file named
    *.parquet holds a document in each row, any other is a document. Raises UserError if nothing is there, or nothing in it.
    """
    if data.path is None:
        from pydoc_data.topics import topics

        return "the built-in corpus", tuple(Topic(title, topics[title].encode()) for title in sorted(topics))
    paths = _find_files(data.path)
    sources = [
        ParquetColumn.of(path, data.text_column) if path.endswith(".parquet") else MappedFile.of(path)
        for path in paths
        if os.path.getsize(path) > 0
    ]
    sources = [source for source in sources if source.num_documents > 0]
    if not sources:
        what = "is empty" if len(paths) == 1 else f"names {len(paths)} files, all empty"
        raise UserError(f"--data.path {data.path} {what}: 0 bytes of text. Give a file with text in it.")
    return data.path, tuple(sources)


def _find_files(path: str) -> list[str]:
    root = os.path.expanduser(path)
    if os.path.isfile(root):
        return [root]
    if os.path.isdir(root):
        found = []
        for folder, folders, files in os.walk(root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [os.path.join(folder, name) for name in files if not name.startswith(".")]
        missing = f"--data.path {path} is a folder without files. Give one with text files or .parquet files in it."
    elif glob.has_magic(root):
        found = glob.glob(root, recursive=True)
        missing = f"--data.path {path} matches no file (looked in {os.getcwd()}). Mend the pattern; in a shell, quote it."
    elif os.path.lexists(root):
        found = []
        what = (
            f"a link to {os.readlink(root)}, which does not exist"
            if os.path.islink(root) and not os.path.exists(root)
            else "a device or a pipe"
        )
        missing = (
            f"--data.path {path} is {what}. Give a file that can be read at any place, since examples are read in any order."
        )
    else:
        found = []
        missing = (
            f"--data.path {path} does not exist (looked for {os.path.abspath(root)}). "
            "Give a text file, a folder, a glob or a .parquet file, or leave it out to train on the built-in corpus."
        )
    found = sorted(name for name in found if os.path.isfile(name))
    if not found:
        raise UserError(missing)
    return found
