"""A corpus: the documents of all sources, in order, and how they are split into what is trained on and what is held out."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from sharder.config import DataConfig, UserError
from sharder.data.sources import ParquetColumn, Source, open_sources

MIN_DOCUMENTS = 20
"""From here on `auto` holds out whole documents; with fewer, one of them could be most of the corpus."""


class Piece(NamedTuple):
    """The part of one document that belongs to a split."""

    name: str
    start: int  # of data, in the document
    data: np.ndarray  # uint8


class Run(NamedTuple):
    """Bytes [start, stop) of a source that holds one document."""

    source: Source
    start: int
    stop: int


@dataclass(frozen=True)
class Corpus:
    """All documents, in order, before they are split and made into examples."""

    name: str
    """What the user asked for, for messages."""
    sources: tuple[Source, ...]

    @property
    def num_documents(self) -> int:
        return sum(source.num_documents for source in self.sources)

    @property
    def has_parquet(self) -> bool:
        return any(isinstance(source, ParquetColumn) for source in self.sources)

    @cached_property
    def _digests(self) -> list[bytes]:
        with ThreadPoolExecutor() as pool:  # hashing and page faults leave the interpreter lock to others
            return list(pool.map(lambda source: source.digest(), self.sources))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the contents in order; names and places of the files do not enter."""
        return hashlib.sha256(b"sharder corpus 1\n" + b"".join(self._digests)).hexdigest()

    @cached_property
    def documents(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every document its length in bytes, int64, and a hash of its content, uint64, both (num_documents,)."""
        measures = [source.measure(digest) for source, digest in zip(self.sources, self._digests)]
        lengths, keys = zip(*measures)
        return np.concatenate(lengths), np.concatenate(keys)

    def read(self, index: int) -> np.ndarray:
        """Bytes of document `index`, uint8. Decodes a parquet file from its beginning."""
        for source in self.sources:
            if index >= source.num_documents:
                index -= source.num_documents
                continue
            for data, offsets in source.blocks():
                if index < len(offsets) - 1:
                    return data[offsets[index] : offsets[index + 1]]
                index -= len(offsets) - 1
        raise IndexError(f"{self.name} has {self.num_documents} documents.")

    def split(self, how: Literal["auto", "document", "range"], fraction: float) -> "tuple[Split, Split | None]":
        """Train and validation; validation is None when the fraction is 0."""
        if fraction == 0:
            return Split(self, "train", "whole", 0.0), None
        if how == "auto":
            how = "document" if self.num_documents >= MIN_DOCUMENTS else "range"
        return Split(self, "train", how, fraction), Split(self, "validation", how, fraction)


@dataclass(frozen=True)
class Split:
    """The part of a corpus that is trained on, or the part that is held out."""

    corpus: Corpus
    name: Literal["train", "validation"]
    how: Literal["whole", "document", "range"]
    fraction: float
    """Part of the bytes that is held out."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that decides the bytes of this split; needs no decoding."""
        return hashlib.sha256(f"{self.corpus.fingerprint} {self.name} {self.how} {self.fraction!r}".encode()).hexdigest()

    @cached_property
    def ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every document the bytes [start, stop) that belong to this split, int64 (num_documents,) each.

        Raises UserError if documents were to be held out and there are not enough.
        """
        lengths, _ = self.corpus.documents
        validation_starts = {"whole": lambda: lengths, "document": self._whole_documents, "range": self._last_bytes}[self.how]()
        if self.name == "train":
            return np.zeros_like(lengths), validation_starts
        return validation_starts, lengths

    def _whole_documents(self) -> np.ndarray:
        """Where validation starts in each document (0 or its end): the documents with the smallest hashes are held out.

        As many as come nearest to the fraction of the bytes, and at least one. The hash is of the content: neither a
        new name nor another document moves one across (but for the last few of the rank), and copies stay together.
        """
        lengths, keys = self.corpus.documents
        some = lengths > 0
        ranked, rank = np.unique(keys[some], return_inverse=True)
        if len(ranked) < 2:
            raise UserError(
                "--data.validation-split document holds out whole documents, and needs 2 that differ, but "
                f"{self.corpus.name} has {len(ranked)} (of {len(lengths)}). "
                "Use --data.validation-split range, or --data.validation-fraction 0 to train without validation."
            )
        bytes_up_to = np.cumsum(np.bincount(rank, weights=lengths[some]))
        last = np.argmin(np.abs(bytes_up_to[:-1] - self.fraction * bytes_up_to[-1]))
        return np.where(keys <= ranked[last], 0, lengths)

    def _last_bytes(self) -> np.ndarray:
        """Where validation starts in each document, so that it is the last `fraction` of all bytes."""
        lengths, _ = self.corpus.documents
        ends = np.cumsum(lengths)
        cut = int(ends[-1]) - int(ends[-1] * self.fraction)
        starts = np.clip(cut - (ends - lengths), 0, lengths)
        index = int(np.searchsorted(ends, cut, side="right"))
        if index < len(ends) and starts[index] > 0:  # not in the middle of a character of UTF-8
            follows = self.corpus.read(index)[starts[index] : starts[index] + 3] & 0xC0 == 0x80
            starts[index] += int(np.cumprod(follows).sum())
        return starts

    @property
    def num_bytes(self) -> int:
        starts, stops = self.ranges
        return int((stops - starts).sum())

    def runs(self) -> list[Run]:
        """The bytes of this split in order, as stretches of files. Not for parquet, which cannot be mapped."""
        assert not self.corpus.has_parquet
        bounds = zip(self.corpus.sources, *(bound.tolist() for bound in self.ranges))
        return [Run(source, start, stop) for source, start, stop in bounds if start < stop]

    def pieces(self) -> Iterator[Piece]:
        """The documents of this split in order, empty ones left out."""
        first = 0
        for source in self.corpus.sources:
            starts, stops = (bound[first : first + source.num_documents] for bound in self.ranges)
            first += source.num_documents
            if not (starts < stops).any():
                continue  # a file that is on the other side is not opened
            bounds = enumerate(zip(starts.tolist(), stops.tolist()))
            for data, offsets in source.blocks():
                # zip asks offsets first, so that no bound is lost at the end of a block
                for offset, (document, (start, stop)) in zip(offsets[:-1].tolist(), bounds):
                    if start < stop:
                        yield Piece(source.document_name(document), start, data[offset + start : offset + stop])

    def count_windows(self, size: int, unit: Literal["bytes", "tokens"], seq_len: int) -> int:
        """Number of examples in `size` bytes or tokens: each has seq_len inputs, and the targets are one further.

        Raises UserError if there is not one.
        """
        if size > seq_len:
            return (size - 1) // seq_len
        whole = int(self.corpus.documents[0].sum())
        ways = [f"lower --data.seq-len to {size - 1} or less"] if size >= 2 else []
        if self.name == "validation":
            # Only where both splits can have a window.
            ways += [f"raise --data.validation-fraction above {self.fraction}"] if whole > 2 * seq_len + 1 else []
            ways += ["set --data.validation-fraction 0 to train without validation"]
        else:
            ways += [f"lower --data.validation-fraction below {self.fraction}"] if self.fraction and whole > seq_len else []
            ways += ["give more text with --data.path"]
        ways = ", ".join(ways[:-1]) + " or " + ways[-1] if len(ways) > 1 else ways[0]
        raise UserError(
            f"The {self.name} split of {self.corpus.name} has {size} {unit}, but one example needs {seq_len + 1} "
            f"(--data.seq-len {seq_len}, and the target of the last). {ways[0].upper()}{ways[1:]}."
        )


def open_corpus(data: DataConfig) -> Corpus:
    """The corpus that `data.path` names. Raises UserError if nothing is there, or nothing in it."""
    return Corpus(*open_sources(data))
