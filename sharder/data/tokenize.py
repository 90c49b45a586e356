"""Tokenizers, and the memory-mapped token files that a split of a corpus becomes.

The files are made once, in a cache, and found again by what they were made from. They appear under their
name only when they are complete, so that a kill at any moment or a second process never shows half of them.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from sharder.config import UserError
from sharder.data.corpus import MappedFile, Piece, Split

DEFAULT_CACHE = "~/.cache/sharder/tokens"
FORMAT = 1
"""Part of the key: raise it when the same corpus and tokenizer would give other files."""
CHUNK_BYTES = 1 << 20
"""Documents longer than this are encoded in chunks cut at line ends: a tokenizer needs many times the size of its text."""
BATCH_BYTES = 1 << 22
"""Text handed to the tokenizer at once, which encodes the chunks in it in parallel."""
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")

log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """Text to ids and back."""

    vocab_size: int
    """One more than the largest id."""
    end_of_document: int | None
    """The id put after each document, where the tokenizer has one."""
    fingerprint: str
    """SHA-256 (hex) of everything that decides the ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: no token for its beginning or end is added."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each, in parallel where the library can."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; ids that are not in the vocabulary are left out, broken UTF-8 becomes U+FFFD."""
        ...


class ByteTokenizer:
    """The bytes of UTF-8 as ids 0 to 255."""

    vocab_size = 256
    end_of_document = None
    fingerprint = hashlib.sha256(b"bytes").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class JsonTokenizer:
    """A tokenizer.json of the tokenizers library.

    The end of a document is the eos_token of a tokenizer_config.json beside it, else a special token with one of END_NAMES.
    """

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Library

        self._library = Library.from_file(str(path))
        # Tokenizers of sentence encoders come with both, and would drop all of a document but its first words.
        self._library.no_truncation()
        self._library.no_padding()
        self.vocab_size = max(self._library.get_vocab(with_added_tokens=True).values()) + 1
        special = {token.content: i for i, token in self._library.get_added_tokens_decoder().items() if token.special}
        self.end_of_document = next((special[name] for name in (_configured_end(path), *END_NAMES) if name in special), None)
        self.fingerprint = _digest(path.read_bytes(), self.end_of_document)

    def encode(self, text: str) -> list[int]:
        return self._library.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode([i for i in ids if i < self.vocab_size])


class SentencePieceTokenizer:
    """A .model of the sentencepiece library."""

    def __init__(self, path: Path):
        from sentencepiece import SentencePieceProcessor

        self._library = SentencePieceProcessor(model_file=str(path))
        self.vocab_size = self._library.vocab_size()
        self.end_of_document = self._library.eos_id() if self._library.eos_id() >= 0 else None
        self.fingerprint = _digest(path.read_bytes(), self.end_of_document)

    def encode(self, text: str) -> list[int]:
        return self._library.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, np.uint32) for ids in self._library.encode(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode([int(i) for i in ids if i < self.vocab_size])


KINDS = {".json": JsonTokenizer, ".model": SentencePieceTokenizer}


def open_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer in a file, by its suffix (KINDS); bytes if None. Raises UserError if it is missing, unknown or broken."""
    if path is None:
        return ByteTokenizer()
    file = Path(path).expanduser()
    if file.suffix not in KINDS:
        raise UserError(
            f"--data.tokenizer {path} ends in {file.suffix or 'no suffix'!r}, but must be a tokenizer.json of tokenizers or a "
            ".model of sentencepiece. Leave it out to train on bytes."
        )
    if not file.is_file():
        raise UserError(f"--data.tokenizer {path} does not exist (looked for {file.absolute()}).")
    try:
        return KINDS[file.suffix](file)
    except Exception as error:  # tokenizers raises Exception itself
        raise UserError(f"--data.tokenizer {path} cannot be read as a {file.suffix} tokenizer: {error}") from None


def _configured_end(path: Path) -> str | None:
    try:
        end = json.loads((path.parent / "tokenizer_config.json").read_text()).get("eos_token")
    except FileNotFoundError:
        return None
    return end["content"] if isinstance(end, dict) else end


def _digest(content: bytes, end_of_document: int | None) -> str:
    return hashlib.sha256(f"{end_of_document}\n".encode() + content).hexdigest()


@dataclass(frozen=True)
class TokenFiles:
    """The tokens of a split: documents one after the other in tokens.bin, where each begins and ends in offsets.bin."""

    tokens_file: MappedFile
    offsets_file: MappedFile
    dtype: str
    fingerprint: str
    """SHA-256 (hex) of the tokens and offsets: the same ids give the same one, whatever version of a library made them."""

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
    if not folder.exists():
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _lock(root / f"{key}.lock") as locked:
                for left in root.glob(f"{key}.tmp-*") if locked else ():
                    shutil.rmtree(left, ignore_errors=True)  # of a process that was killed: a live one would have the lock
                if not folder.exists():
                    _make(folder, split, tokenizer)
        except OSError as error:
            raise UserError(
                f"Token files of {split.corpus.name} cannot be written to {root}: {error.strerror or error}. "
                "Choose another folder with --data.token-cache."
            ) from None
    return _open(folder)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Holds a lock that the kernel releases when the process ends; yields False where the file system has none."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


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


def _write(work: Path, split: Split, tokenizer: Tokenizer) -> None:
    dtype = np.dtype(next(d for d in ("<u1", "<u2", "<u4") if tokenizer.vocab_size <= 2 ** (8 * np.dtype(d).itemsize)))
    hashes = {"tokens": hashlib.sha256(), "offsets": hashlib.sha256()}
    with open(work / "tokens.bin", "wb") as tokens_file, open(work / "offsets.bin", "wb") as offsets_file:
        num_tokens, ends = 0, [0]
        for ids, is_end in _encode(split, tokenizer):
            content = ids.astype(dtype).tobytes()
            tokens_file.write(content)
            hashes["tokens"].update(content)
            num_tokens += len(ids)
            if is_end and num_tokens > ends[-1]:  # a document without tokens is none
                ends.append(num_tokens)
            if len(ends) > 1 << 16:
                _flush(ends, offsets_file, hashes["offsets"])
        _flush([*ends, None], offsets_file, hashes["offsets"])
        for file in (tokens_file, offsets_file):
            file.flush()
            os.fsync(file.fileno())
    about = {
        "format": FORMAT,
        "dtype": dtype.str,
        "tokens_sha256": hashes["tokens"].hexdigest(),
        "offsets_sha256": hashes["offsets"].hexdigest(),
        "num_tokens": num_tokens,
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "corpus": split.corpus.name,
        "split": split.name,
    }
    with open(work / "about.json", "w") as file:
        json.dump(about, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
