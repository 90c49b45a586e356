"""Tokenizers: text to ids and back."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from sharder.config import UserError

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")


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
