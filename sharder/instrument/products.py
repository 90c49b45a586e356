"""The matrix products of every model, written down from its configuration: what `sharder.instrument.flops` adds up.

Letters: D model dimension, F feed-forward dimension, N query heads, K key-value heads, H head dimension, V vocabulary
(padded), T tokens, R rank of low-rank additions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from sharder.config import ExpertConfig, LlamaConfig, MlpConfig, ModelConfig, Pi0Config, TransformerConfig
from sharder.models.freeze import PRESETS


@dataclass(frozen=True)
class Product:
    """All products of one kind in one example, over all layers. FLOPs of one example."""

    module: str
    """The part of the model, as a person would name it."""
    forward: float
    num_params: int
    """Elements of the weights; 0 where both operands are activations."""
    num_tokens: int
    """Vectors that are multiplied with the weights."""
    gradients: int = 2
    """Operands that have a gradient."""
    again: float = 0.0
    """How often it is computed again for the backward pass."""
    seen: float = 1.0
    """Share of the scores that the mask leaves."""
    tokens_of_example: int = 0
    """Of the whole model, for 6 N D."""

    @property
    def backward(self) -> float:
        return self.gradients * self.forward

    @property
    def recomputed(self) -> float:
        return self.again * self.forward

    @property
    def visible(self) -> float:
        return self.seen * self.forward


def products_of(model: ModelConfig, seq_len: int) -> list[Product]:
    """Every matrix product of an example; `seq_len` is that of language models."""
    found, tokens = PRODUCTS[type(model)](model, seq_len)
    return [replace(p, tokens_of_example=tokens) for p in found]


def _weights(module: str, num_params: int, num_tokens: int, **more) -> Product:
    return Product(module, 2.0 * num_params * num_tokens, num_params, num_tokens, **more)


def _scores(num_layers: int, num_queries: int, num_keys: int, heads: int, head_dim: int, seen: float, again: float) -> Product:
    """Queries with keys, and weights with values: the full rectangle, as it is computed."""
    return Product(
        "attention scores", 4.0 * num_layers * num_queries * num_keys * heads * head_dim, 0, num_queries, 2, again, seen
    )


def _repeats(remat: str) -> int:
    """Whether the products of a block are computed again: `dots` keeps them all."""
    return int(remat in ("block", "offload"))


def _language_model(model: TransformerConfig | LlamaConfig, seq_len: int) -> tuple[list[Product], int]:
    T, L, D, F, N = seq_len, model.num_layers, model.embed_dim, model.mlp_dim, model.num_heads
    K, H, matrices = (N, D // N, 1) if isinstance(model, TransformerConfig) else (model.num_kv_heads, model.head_dim, 2)
    again = _repeats(model.remat)
    return [
        Product("embedding", 0.0, 0 if model.tie_embeddings else model.padded_vocab_size * D, T, 0),
        _weights("attention projections", L * D * H * (2 * N + 2 * K), T, again=again),
        _scores(L, T, T, N, H, (T + 1) / (2 * T), again),
        _weights("feed-forward in", L * matrices * D * F, T, again=again),
        # Nothing needs a block's last product for its gradient.
        _weights("feed-forward out", L * F * D, T),
        # Logits are never kept: sharder.ops.cross_entropy.
        _weights("head and loss", D * model.padded_vocab_size, T, again=1),
    ], T


def _mlp(model: MlpConfig, seq_len: int) -> tuple[list[Product], int]:
    D = model.hidden_dim
    return [
        _weights("first layer", model.input_dim * D, 1, gradients=1),  # inputs have none
        _weights("feed-forward", model.num_layers * D * D, 1, again=_repeats(model.remat)),
        _weights("last layer", D * model.output_dim, 1),
    ], 1


def _pi0(model: Pi0Config, seq_len: int) -> tuple[list[Product], int]:
    patches = model.image_size[0] * model.image_size[1] // model.vision.patch_size**2
    num_images, pi0 = len(model.cameras), model.variant == "pi0"
    prefix = num_images * patches + model.max_prompt_len
    suffix = model.action_horizon + pi0
    tokens, is_frozen = prefix + suffix, PRESETS[model.freeze]
    found = _vision(model, patches, num_images, trained=not is_frozen("vision/blocks/query"))
    found.append(Product("embedding", 0.0, model.vocab_size * model.backbone.embed_dim, model.max_prompt_len, 0))
    sees = {
        "backbone": prefix / tokens,
        "action": ((prefix + 1 if pi0 else 0) + model.action_horizon * tokens) / (suffix * tokens),
    }
    for name, expert, count in (("backbone", model.backbone, prefix), ("action", model.action_expert, suffix)):
        found += _expert(model, name, expert, count, tokens, sees[name], is_frozen)
    return found + _projections(model, suffix, is_frozen), tokens


def _vision(model: Pi0Config, patches: int, num_images: int, trained: bool) -> list[Product]:
    config, T = model.vision, num_images * patches
    L, D, F, N = config.num_layers, config.embed_dim, config.mlp_dim, config.num_heads
    again = _repeats(model.remat)
    scores = _scores(L, T, patches, N, D // N, 1.0, again)
    found = [
        _weights("vision patches", 3 * config.patch_size**2 * D, T, gradients=1),  # pictures have none
        _weights("vision attention projections", 4 * L * D * D, T, again=again),
        replace(scores, module="vision attention scores"),
        _weights("vision feed-forward in", L * D * F, T, again=again),
        _weights("vision feed-forward out", L * F * D, T),
        _weights("vision head", D * model.backbone.embed_dim, T),
    ]
    return found if trained else [replace(p, gradients=0, again=0.0) for p in found]


def _expert(
    model: Pi0Config, name: str, expert: ExpertConfig, count: int, tokens: int, sees: float, is_frozen: Callable[[str], bool]
) -> list[Product]:
    L, N, K, H, D, F = model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim, expert.embed_dim, expert.mlp_dim
    again, adaptive = _repeats(model.remat), model.variant == "pi05" and name == "action"
    label = "backbone" if name == "backbone" else "action expert"

    def weights(part: str, num_params: int, path: str, again: float, tokens: int = count) -> Product:
        return _weights(f"{label} {part}", num_params, tokens, gradients=2 - is_frozen(f"llm/{name}/{path}"), again=again)

    found = [
        weights("attention projections", L * D * H * (2 * N + 2 * K), "blocks/attention/query/weight", again),
        replace(_scores(L, count, tokens, N, H, sees, again), module=f"{label} attention scores"),
        weights("feed-forward in", L * 2 * D * F, "blocks/mlp/gate/weight", again),
        # Where a gate multiplies the block's last product, its gradient needs it.
        weights("feed-forward out", L * F * D, "blocks/mlp/down/weight", again if adaptive else 0.0),
    ]
    if expert.lora_rank:
        R = expert.lora_rank
        attention = L * (R * (N + 2 * K) * (D + H) + R * N * (H + D))
        found.append(weights("low-rank attention", attention, "blocks/attention/query/lora_a", again))
        found.append(weights("low-rank feed-forward in", L * 2 * R * (D + F), "blocks/mlp/gate/lora_a", again))
        # The second factor's output is a block's last product, but the first one's is an operand.
        found.append(weights("low-rank feed-forward out", L * R * F, "blocks/mlp/down/lora_a", again))
        found.append(weights("low-rank feed-forward out", L * R * D, "blocks/mlp/down/lora_b", again if adaptive else 0.0))
    if adaptive:
        found.append(weights("norms", L * 2 * D * 3 * D, "blocks/mlp_norm/kernel", again, tokens=1))
        found.append(weights("norms", D * 3 * D, "final_norm/kernel", 0.0, tokens=1))
    return found


def _projections(model: Pi0Config, suffix: int, is_frozen: Callable[[str], bool]) -> list[Product]:
    """State, actions and time in, velocity out."""
    A, D, T = model.action_dim, model.action_expert.embed_dim, model.action_horizon
    trained = not is_frozen("action_in/kernel")
    found = [_weights("action in", A * D, T, gradients=int(trained))]
    if model.variant == "pi0":
        found.append(_weights("state", A * D, 1, gradients=int(trained)))
        found += [
            _weights("time in", 2 * D * D, T, gradients=2 * trained),
            _weights("time out", D * D, T, gradients=2 * trained),
        ]
    else:
        found += [_weights("time in", D * D, 1, gradients=int(trained)), _weights("time out", D * D, 1, gradients=2 * trained)]
    return [*found, _weights("action out", D * A, T, gradients=1 + trained)]


PRODUCTS: dict[type, Callable[..., tuple[list[Product], int]]] = {
    TransformerConfig: _language_model, LlamaConfig: _language_model, MlpConfig: _mlp, Pi0Config: _pi0,
}  # fmt: skip
"""By the class of the configuration: products, and tokens of an example."""
