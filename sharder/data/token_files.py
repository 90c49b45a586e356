"""The memory-mapped token files that a split of a corpus becomes.

The files are made once, in a cache, and found again by what they were made from. They appear under their
name only when they are complete, so that a kill at any moment or a second process never shows half of them.
"""

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sharder.config import UserError
from sharder.data.corpus import Piece, Split
from sharder.data.sources import MappedFile
from sharder.data.tokenize import Tokenizer
from sharder.lock import wait_for_lock

DEFAULT_CACHE = "~/.cache/sharder/tokens"
FORMAT = 1
"""Part of the key: raise it when the same corpus and tokenizer would give other files."""
CHUNK_BYTES = 1 << 17
"""Documents longer than this are encoded in chunks cut at line ends: a tokenizer needs many times the size of its text."""
BATCH_BYTES = 1 << 21
"""Text handed to the tokenizer at once, which encodes the chunks in it in parallel."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenFiles:
    """The tokens of a split: documents one after the other in tokens.bin, where each begins and ends in offsets.bin."""

    tokens_file: MappedFile
    offsets_file: MappedFile
    dtype: str
    fingerprint: str
    """SHA-256 (hex) of the tokens and offsets: the same ids give the same one, whatever version of a library made them."""

    @property
    def num_tokens(self) -> int:
        return self.tokens_file.num_bytes // np.dtype(self.dtype).itemsize

    def tokens(self) -> np.ndarray:
        """(num_tokens,), the smallest unsigned dtype for the vocabulary, mapped."""
        return self.tokens_file.open().view(self.dtype)

    def offsets(self) -> np.ndarray:
        """int64 (num_documents + 1,), strictly increasing from 0 to num_tokens, mapped."""
        return self.offsets_file.open().view("<i8")


def encode_split(split: Split, tokenizer: Tokenizer, cache: str | None) -> TokenFiles:
    """The token files of a split, made now if the cache folder (None: DEFAULT_CACHE) does not have them.

    Processes that share the cache wait for the one that makes them; where the file system has no locks, each makes
    them and the first to finish wins. Raises UserError if the text is not UTF-8, is empty or cannot be written.
    """
    root = Path(cache or DEFAULT_CACHE).expanduser()
    key = hashlib.sha256(f"{FORMAT} {split.fingerprint} {tokenizer.fingerprint}".encode()).hexdigest()[:32]
    folder = root / key
    files = _open(folder)
    if files is not None:
        return files
    try:
        root.mkdir(parents=True, exist_ok=True)
        with wait_for_lock(root / f"{key}.lock") as locked:
            for left in root.glob(f"{key}.tmp-*") if locked else ():
                shutil.rmtree(left, ignore_errors=True)  # of a process that was killed: a live one would have the lock
            files = _open(folder)  # of another process, which had the lock before
            if files is None:
                if folder.exists():
                    log.warning("Token files in %s are not what was written: they are made again.", folder)
                    folder.rename(root / f"{key}.tmp-{uuid.uuid4().hex}")
                _make(folder, split, tokenizer)
                files = _open(folder)
    except OSError as error:
        raise UserError(
            f"Token files of {split.corpus.name} cannot be written to {root}: {error.strerror or error}. "
            "Choose another folder with --data.token-cache."
        ) from None
    if files is None:
        raise UserError(
            f"Token files in {folder} are not what was just written: is the disk damaged? Choose another --data.token-cache."
        )
    return files


def _make(folder: Path, split: Split, tokenizer: Tokenizer) -> None:
    work = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex}")
    work.mkdir()
    try:
        _write(work, split, tokenizer)
        _sync(work)
        try:
            work.rename(folder)  # atomic, and refused when another process was first
        except OSError:
            if not folder.exists():
                raise
        _sync(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _HashedFile:
    """A new file that knows the SHA-256 of what was written, and is on the disk when closed."""

    def __init__(self, path: Path):
        self._file, self._hash = open(path, "wb"), hashlib.sha256()

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._hash.update(content)

    def __enter__(self) -> "_HashedFile":
        return self

    def __exit__(self, *_) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def digest(self) -> str:
        return self._hash.hexdigest()


def _write(work: Path, split: Split, tokenizer: Tokenizer) -> None:
    dtype = np.dtype(next(d for d in ("<u1", "<u2", "<u4") if tokenizer.vocab_size <= 1 << 8 * np.dtype(d).itemsize))
    num_tokens = end = 0
    with _HashedFile(work / "tokens.bin") as tokens, _HashedFile(work / "offsets.bin") as offsets:
        offsets.write(end.to_bytes(8, "little"))
        for ids, ends_document in _encode(split, tokenizer):
            tokens.write(ids.astype(dtype).tobytes())
            num_tokens += len(ids)
            if ends_document and num_tokens > end:  # a document without tokens is none
                end = num_tokens
                offsets.write(end.to_bytes(8, "little"))
    about = {
        "dtype": dtype.str,
        "fingerprint": _fingerprint(dtype.str, tokens.digest(), offsets.digest()),
        "num_tokens": num_tokens,
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "corpus": split.corpus.name,
        "split": split.name,
    }
    with _HashedFile(work / "about.json") as file:
        file.write(json.dumps(about, indent=1).encode())


def _encode(split: Split, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, bool]]:
    """Ids of successive chunks, and whether a document ends with them (in this split)."""
    end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
    log.info("Encoding %d bytes of %s (%s).", split.num_bytes, split.corpus.name, split.name)
    done_bytes, said_s = 0, time.monotonic()
    for texts, ends_document, num_bytes in _batches(split.pieces()):
        for ids, ends in zip(tokenizer.encode_batch(texts), ends_document, strict=True):
            yield (np.append(ids, np.array(end, ids.dtype)) if ends and end else ids), ends
        done_bytes += num_bytes
        if time.monotonic() > said_s + 30:
            said_s = time.monotonic()
            log.info("Encoded %d of %d bytes.", done_bytes, split.num_bytes)


def _batches(pieces: Iterator[Piece]) -> Iterator[tuple[list[str], list[bool], int]]:
    texts, ends_document, num_bytes = [], [], 0
    for piece in pieces:
        start = 0
        while start < len(piece.data):
            stop = start + _chunk_bytes(piece.data[start : start + CHUNK_BYTES + 1])
            try:
                texts.append(str(piece.data[start:stop], "utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{piece.name} is not UTF-8 at byte {piece.start + start + error.start} ({error.reason}), but a tokenizer "
                    "needs text. Convert it, or leave it out of --data.path."
                ) from None
            ends_document.append(stop == len(piece.data))
            num_bytes += stop - start
            start = stop
            if num_bytes >= BATCH_BYTES:
                yield texts, ends_document, num_bytes
                texts, ends_document, num_bytes = [], [], 0
    if texts:
        yield texts, ends_document, num_bytes


def _chunk_bytes(data: np.ndarray) -> int:
    """How much of data (up to one byte more than a chunk) is the next chunk: to the last line end, space or character."""
    if len(data) <= CHUNK_BYTES:
        return len(data)
    content = data[:CHUNK_BYTES].tobytes()
    line_end = content.rfind(b"\n") + 1
    if line_end > 0:
        return line_end
    space = content.rfind(b" ")  # begins the next chunk, as tokenizers have a space before a word
    if space > 0:
        return space
    return next((n for n in range(CHUNK_BYTES, CHUNK_BYTES - 4, -1) if data[n] & 0xC0 != 0x80), CHUNK_BYTES)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(folder: Path) -> TokenFiles | None:
    """The files in a folder; None where they are missing, or their sizes or SHA-256 are not those of what was written."""
    try:
        about = json.loads((folder / "about.json").read_bytes())
        tokens, offsets = MappedFile.of(folder / "tokens.bin"), MappedFile.of(folder / "offsets.bin")
        dtype, fingerprint, num_tokens = about["dtype"], about["fingerprint"], about["num_tokens"]
        size = num_tokens * np.dtype(dtype).itemsize
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if tokens.num_bytes != size or not tokens.num_bytes:
        # An empty split has no file that could be mapped; it says so where its windows are counted.
        return TokenFiles(tokens, offsets, dtype, fingerprint) if tokens.num_bytes == size == 0 else None
    if _fingerprint(dtype, tokens.digest().hex(), offsets.digest().hex()) != fingerprint:
        return None
    return TokenFiles(tokens, offsets, dtype, fingerprint)


def _fingerprint(dtype: str, tokens_digest: str, offsets_digest: str) -> str:
    return hashlib.sha256(f"{dtype} {tokens_digest} {offsets_digest}".encode()).hexdigest()
