"""Steps without one of their parts: what the whole step loses with it is what it costs, wherever fusion put its operations.

While a step is traced, the method that computes the part is replaced by a stand-in that hands its input on, forward and
backward. Such a step is for its time only: its numbers mean nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from sharder.config import LlamaConfig, ModelConfig, Pi0Config, TransformerConfig, UserError
from sharder.models import gemma, llama, transformer

STAND_INS = {
    "attention": {
        TransformerConfig: (transformer.Block, "attention", lambda self, x, *_: (x, None)),
        LlamaConfig: (llama.Block, "attention", lambda self, x, *_: (x, None)),
        Pi0Config: (gemma, "attention", lambda experts, xs, *_: (dict(xs), None)),
    },
    "feed-forward": {
        TransformerConfig: (transformer.Block, "feed_forward", lambda self, x, *_: x),
        LlamaConfig: (llama.Block, "feed_forward", lambda self, x, *_: x),
        Pi0Config: (gemma, "feed_forward", lambda experts, xs, *_: dict(xs)),
    },
}
"""By part and model: what is replaced, and by what."""


def check_part(part: str, model: ModelConfig) -> None:
    """Raises UserError where the model has no such part."""
    if part not in STAND_INS:
        raise UserError(f"--ablate is {part}, but must be one of {', '.join(STAND_INS)}.")
    if type(model) not in STAND_INS[part]:
        raise UserError(f"--ablate {part}: a {type(model).__name__.removesuffix('Config')} has no such part.")


@contextmanager
def standing_in(part: str, model: ModelConfig) -> Iterator[None]:
    """Whatever is traced meanwhile lacks this part."""
    owner, name, stand_in = STAND_INS[part][type(model)]
    with mock.patch.object(owner, name, stand_in):
        yield
