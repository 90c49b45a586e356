"""Prompts of pi0 and pi0.5 as tokens: a task, for pi0.5 also the state in words of 256 levels.

The formats are openpi's (commit 15a9616): pi0 reads `task\\n`, pi0.5 `Task: task, State: 12 255 ...;\\nAction: `, both after a
token for the beginning.
"""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from sharder.config import Pi0Config, UserError

PALIGEMMA_VOCAB_SIZE = 257_152
PALIGEMMA_CACHES = ("~/.cache/sharder/paligemma_tokenizer.model", "~/.cache/openpi/big_vision/paligemma_tokenizer.model")
PALIGEMMA_SOURCE = "gs://big_vision/paligemma_tokenizer.model"
NUM_LEVELS = 256

log = logging.getLogger(__name__)

EncodePrompts = Callable[[list[str], np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(tasks, normalised states (n, S)) to tokens int32 and mask bool, (n, L) both."""


class PromptTokenizer(Protocol):
    begin: int
    """The token for the beginning."""

    def encode(self, text: str) -> list[int]: ...


class BytePrompts:
    """Bytes of UTF-8 after the three special tokens that PaliGemma has too: 0 filling, 1 end, 2 beginning. Needs no file."""

    begin = 2
    first = 3

    def encode(self, text: str) -> list[int]:
        return [self.first + byte for byte in text.encode()]


class SentencePiecePrompts:
    """A .model of sentencepiece, read when the first text is tokenised."""

    def __init__(self, path: str | None):
        """`path`: unset: PaliGemma's, where a cache has it."""
        self.path = path

    @functools.cached_property
    def _library(self):
        from sentencepiece import SentencePieceProcessor

        path = Path(self.path).expanduser() if self.path else next((p for c in PALIGEMMA_CACHES if (p := Path(c).expanduser()).is_file()), None)
        if path is None:
            raise UserError(
                f"a prompt is to be tokenised with PaliGemma's vocabulary, but none of {', '.join(PALIGEMMA_CACHES)} exists. Fetch"
                f" {PALIGEMMA_SOURCE} to one of them, or give --data.tokenizer PATH."
            )
        if not path.is_file():
            raise UserError(f"--data.tokenizer is {path}, which does not exist.")
        try:
            return SentencePieceProcessor(model_file=str(path))
        except Exception as error:
            raise UserError(f"--data.tokenizer is {path}, which is not a model of sentencepiece: {error}") from error

    @property
    def begin(self) -> int:
        return self._library.bos_id()

    def encode(self, text: str) -> list[int]:
        return self._library.encode(text)


def open_prompt_tokenizer(path: str | None, vocab_size: int) -> PromptTokenizer:
    """The tokenizer at `path`; unset: bytes, or PaliGemma's for a model with its vocabulary."""
    if path is None and vocab_size < PALIGEMMA_VOCAB_SIZE:
        return BytePrompts()
    return SentencePiecePrompts(path)


def clean(task: str) -> str:
    return task.strip().replace("_", " ").replace("\n", " ")


def state_levels(state: np.ndarray) -> np.ndarray:
    """Normalised states to levels 0 .. 255 of equal width over [-1, 1]; what lies below is -1, what lies above 255."""
    return np.digitize(state, np.linspace(-1, 1, NUM_LEVELS + 1)[:-1]) - 1


def prompt_tokens(variant: str, tokenizer: PromptTokenizer, task: str, state: np.ndarray) -> list[int]:
    """Tokens of one prompt, `state` (S,) normalised and not filled up."""
    if variant == "pi0":
        # The end of line is encoded apart, so that it is always a token of its own.
        return [tokenizer.begin, *tokenizer.encode(clean(task)), *tokenizer.encode("\n")]
    levels = " ".join(map(str, state_levels(state)))
    return [tokenizer.begin, *tokenizer.encode(f"Task: {clean(task)}, State: {levels};\nAction: ")]


def prompt_encoder(model: Pi0Config, tokenizer: PromptTokenizer) -> EncodePrompts:
    """Encodes a batch, filled up with 0 to --model.max-prompt-len, or cut there, which is said once."""
    warned = []

    def encode(tasks: list[str], states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        length = model.max_prompt_len
        tokens, mask = np.zeros((len(tasks), length), np.int32), np.zeros((len(tasks), length), bool)
        for row, (task, state) in enumerate(zip(tasks, states)):
            found = prompt_tokens(model.variant, tokenizer, task, state)
            if len(found) > length and not warned:
                warned.append(task)
                log.warning("a prompt of %d tokens is cut to the %d of --model.max-prompt-len: %r", len(found), length, task)
            if max(found) >= model.vocab_size:
                raise UserError(f"a prompt has token {max(found)}, but --model.vocab-size is {model.vocab_size}: give the model's own --data.tokenizer.")
            tokens[row, : len(found)], mask[row, : len(found)] = found[:length], True
        return tokens, mask

    return encode
