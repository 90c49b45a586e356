"""Examples of bytes, and the choice between bytes and tokens."""

import hashlib
from dataclasses import dataclass

import numpy as np

from sharder.config import DataConfig, UserError
from sharder.data.corpus import Run, Split, open_corpus
from sharder.data.dataset import Batch, Dataset
from sharder.data.packed import PackedTokens
from sharder.data.token_files import encode_split
from sharder.data.tokenize import ByteTokenizer, Tokenizer, open_tokenizer


@dataclass(frozen=True, eq=False)
class ByteText:
    """Dataset over bytes: example i is bytes [i * T, i * T + T + 1) of the documents in one stream, T = seq_len.

    Documents are not kept apart: bytes have no token for the end of one.
    """

    runs: tuple[Run, ...]
    run_ends: np.ndarray
    """Where each run ends in the stream, int64 (runs,)."""
    seq_len: int
    num_examples: int
    fingerprint: str

    @classmethod
    def of(cls, split: Split, runs: list[Run], content: str, seq_len: int) -> "ByteText":
        """The bytes of `runs`, which are those of `split`; `content` is their fingerprint.

        Raises UserError if there are fewer than seq_len + 1.
        """
        ends = np.cumsum([run.stop - run.start for run in runs], dtype=np.int64)
        num_examples = split.count_windows(int(ends[-1]) if runs else 0, "bytes", seq_len)
        fingerprint = hashlib.sha256(f"bytes {content} {seq_len}".encode()).hexdigest()
        return cls(tuple(runs), ends, seq_len, num_examples, fingerprint)

    def __len__(self) -> int:
        return self.num_examples

    def read(self, ids: np.ndarray) -> Batch:
        """Examples with these ids (n,): `inputs` and `targets`, int32 (n, T). Raises IndexError."""
        ids = np.asarray(ids, np.int64)
        if ids.size and not (0 <= ids.min() and ids.max() < self.num_examples):
            raise IndexError(f"Examples {ids.min()} to {ids.max()} of a dataset that has {self.num_examples}.")
        starts = ids * self.seq_len
        windows = np.empty((len(ids), self.seq_len + 1), np.uint8)
        for window, start, run in zip(windows, starts.tolist(), np.searchsorted(self.run_ends, starts, side="right").tolist()):
            self._fill(window, start, run)
        return {"inputs": windows[:, :-1].astype(np.int32), "targets": windows[:, 1:].astype(np.int32)}

    def _fill(self, window: np.ndarray, start: int, run: int) -> None:
        """Copies the stream from `start`, which lies in run number `run`, into the window."""
        filled = 0
        while filled < len(window):
            source, _, stop = self.runs[run]
            place = stop - (int(self.run_ends[run]) - start - filled)
            piece = source.open()[place : min(place + len(window) - filled, stop)]
            window[filled : filled + len(piece)] = piece
            filled += len(piece)
            run += 1


def open_text(data: DataConfig, vocab_size: int) -> tuple[Dataset, Dataset | None]:
    """Train and validation examples of `data`; validation is None when `data.validation_fraction` is 0.

    Bytes without a tokenizer, packed tokens with one. Raises UserError for all that is wrong with the path, the
    text, the tokenizer or the sizes, and if the tokenizer has ids that the model (vocab_size) does not.
    """
    tokenizer = open_tokenizer(data.tokenizer)
    if tokenizer.vocab_size > vocab_size:
        what = f"--data.tokenizer {data.tokenizer}" if data.tokenizer else "Text read as bytes"
        raise UserError(
            f"{what} has ids from 0 to {tokenizer.vocab_size - 1}, but --model.vocab-size is {vocab_size}. "
            f"Set --model.vocab-size {tokenizer.vocab_size} (and --model.padded-vocab-size to at least that)."
        )
    train, validation = open_corpus(data).split(data.validation_split, data.validation_fraction)
    return _dataset(train, tokenizer, data), validation and _dataset(validation, tokenizer, data)


def _dataset(split: Split, tokenizer: Tokenizer, data: DataConfig) -> Dataset:
    if not isinstance(tokenizer, ByteTokenizer):
        return PackedTokens.of(split, encode_split(split, tokenizer, data.token_cache), data.seq_len)
    if not split.corpus.has_parquet:
        return ByteText.of(split, split.runs(), split.fingerprint, data.seq_len)
    # Rows of parquet cannot be mapped, so they are written out once, as tokens are.
    files = encode_split(split, tokenizer, data.token_cache)
    return ByteText.of(split, [Run(files.tokens_file, 0, files.num_tokens)], files.fingerprint, data.seq_len)
