"""Prompts of robot policies as tokens: the task for pi0, the task and the state for pi0.5.

Formats: openpi (commit 15a9616), models/tokenizer.py and transforms.py.
"""

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np

from sharder.config import UserError
from sharder.data.tokenize import ByteTokenizer, JsonTokenizer, SentencePieceTokenizer, Tokenizer, open_tokenizer

STATE_BINS = 256

PALIGEMMA_VOCAB_SIZE = 257_152
PALIGEMMA_CACHES = ("~/.cache/sharder/paligemma_tokenizer.model", "~/.cache/openpi/big_vision/paligemma_tokenizer.model")
PALIGEMMA_SOURCE = "gs://big_vision/paligemma_tokenizer.model"


def open_prompt_tokenizer(path: str | None, vocab_size: int) -> Tokenizer:
    """The tokenizer at `path`; unset: bytes, or PaliGemma's from a cache for a model with its vocabulary. Raises UserError
    where there is none."""
    if path is None and vocab_size >= PALIGEMMA_VOCAB_SIZE:
        path = next((found for c in PALIGEMMA_CACHES if Path(found := str(Path(c).expanduser())).is_file()), None)
        if path is None:
            raise UserError(
                f"prompts are to be tokenised with PaliGemma's vocabulary, but none of {', '.join(PALIGEMMA_CACHES)} exists. Fetch"
                f" {PALIGEMMA_SOURCE} to one of them, or give --data.tokenizer PATH."
            )
    return open_tokenizer(path)


def clean(text: str) -> str:
    """A task on one line, with spaces for underscores."""
    return text.strip().replace("_", " ").replace("\n", " ")


def digitize(state: np.ndarray) -> np.ndarray:
    """Normalised states to the bin of each number: 256 of equal width over [-1, 1), -1 below, int64.

    Edges are compared in float64, as numpy's own digitize does.
    """
    return np.digitize(state, np.linspace(-1, 1, STATE_BINS + 1)[:-1]) - 1


def with_state(text: str, state: np.ndarray) -> str:
    """pi0.5's prompt for a task and one normalised state (S,)."""
    return f"Task: {clean(text)}, State: {' '.join(map(str, digitize(state).tolist()))};\nAction: "


def begin_token(tokenizer: Tokenizer) -> int:
    """The id that begins a text. For bytes it is 256, one past the last. Raises UserError where a tokenizer has none."""
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer.vocab_size
    found = None
    if isinstance(tokenizer, SentencePieceTokenizer):
        found = tokenizer._library.bos_id()
    elif isinstance(tokenizer, JsonTokenizer):
        ids = (tokenizer._library.token_to_id(name) for name in ("<bos>", "<s>", "<|endoftext|>"))
        found = next((i for i in ids if i is not None), None)
    if found is None or found < 0:
        raise UserError("--data.tokenizer has no token for the beginning of a text (<bos>), which a prompt needs.")
    return found


class PromptEncoder:
    """(prompts, normalised states) to tokens int32 and mask bool, both (n, length); what is longer is cut off at the end."""

    def __init__(self, tokenizer: Tokenizer, with_states: bool, length: int, vocab_size: int):
        """`with_states`: pi0.5. Raises UserError where the model has fewer ids than the tokenizer."""
        self.tokenizer, self.with_states, self.length = tokenizer, with_states, length
        self.begin = begin_token(tokenizer)
        largest = max(self.begin, tokenizer.vocab_size - 1)
        if largest >= vocab_size:
            raise UserError(
                f"prompts have ids up to {largest}, but --model.vocab-size is {vocab_size}. Set it to {largest + 1} or more."
            )
        self._encode = lru_cache(maxsize=65536)(self._encode_text)

    @property
    def name(self) -> str:
        """What decides the tokens, for a fingerprint."""
        what = (self.tokenizer.fingerprint, self.with_states, self.length, self.begin)
        return hashlib.sha256(repr(("prompts 1", *what)).encode()).hexdigest()

    def _encode_text(self, text: str) -> tuple[int, ...]:
        if self.with_states:
            return (self.begin, *map(int, self.tokenizer.encode(text)))
        # The end of the line is encoded by itself: within a text it could become part of another token.
        return (self.begin, *map(int, self.tokenizer.encode(clean(text))), *map(int, self.tokenizer.encode("\n")))

    def num_tokens(self, text: str, state_dim: int) -> int:
        """Tokens of a prompt before it is cut."""
        return len(self._encode_text(with_state(text, np.zeros(state_dim)) if self.with_states else text))

    def __call__(self, prompts: list[str], states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens, mask = np.zeros((len(prompts), self.length), np.int32), np.zeros((len(prompts), self.length), bool)
        for row, (text, state) in enumerate(zip(prompts, states, strict=True)):
            ids = (self._encode_text(with_state(text, state)) if self.with_states else self._encode(text))[: self.length]
            tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
        return tokens, mask
