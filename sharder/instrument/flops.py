"""Arithmetic of a training step, counted analytically: every matrix product of a model, and the convention 6 N D beside it.

A product of (n, d) with (d, f) takes 2 n d f operations. Its backward pass takes as many for the gradient of each operand that
has one; what activation checkpointing computes again is counted apart. Look-ups, norms, softmax and the optimizer multiply no
matrices, and count nothing.

    MFU   forward + backward, whatever was computed again (arXiv:2204.02311, appendix B)
    HFU   with what was computed again
    6ND   all parameters x all tokens (arXiv:2001.08361, section 2.1): look-ups count, attention's scores do not, and every
          part of a model is charged for the tokens of all others
"""

from dataclasses import dataclass

from sharder.config import ModelConfig, RunConfig
from sharder.instrument.products import Product, products_of


@dataclass(frozen=True)
class StepFlops:
    """Of some examples; forward and backward together are the model's own arithmetic."""

    forward: float
    backward: float
    recomputed: float
    """Computed a second time for the backward pass."""
    forward_visible: float
    """Of the forward pass, with scores only where the mask lets a query look."""

    @property
    def model(self) -> float:
        return self.forward + self.backward

    @property
    def hardware(self) -> float:
        return self.model + self.recomputed


def step_flops(products: list[Product], num_examples: int) -> StepFlops:
    """The sum of products, each given for one example, over a step."""
    total = lambda name: num_examples * sum(getattr(p, name) for p in products)  # noqa: E731
    return StepFlops(total("forward"), total("backward"), total("recomputed"), total("visible"))


def count_step(config: RunConfig) -> StepFlops:
    """Of one optimizer step of a run, over all devices."""
    return step_flops(products_of(config.model, config.data.seq_len), config.train.global_batch_size)


def step_flops_6nd(num_params: int, num_tokens: int) -> float:
    """6 N D: forward 2 and backward 4 FLOPs per parameter and token (arXiv:2001.08361, section 2.1).

    All parameters count, embeddings too; attention's product of queries and keys does not.
    """
    return 6.0 * num_params * num_tokens


def tokens_of_example(model: ModelConfig, seq_len: int) -> int:
    """Tokens D of 6 N D that an example has: of all its parts, pictures too. An example of the MLP is one."""
    return max(p.tokens_of_example for p in products_of(model, seq_len))


def utilisation(flops: float, step_time_s: float, peak_flops: float | None, num_devices: int) -> float | None:
    """Share of the devices' peak that `flops` in `step_time_s` amounts to, or None without a known peak."""
    return None if peak_flops is None else flops / (step_time_s * peak_flops * num_devices)
