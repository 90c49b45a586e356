"""Frozen configurations of the models: sizes, dtypes and checks of their own fields (`sharder.config` has the rest of a run)."""

from dataclasses import dataclass, field
from typing import Literal, Union

from sharder.fields import check_fields, require

Dtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "dots", "block", "offload"]
Freeze = Literal["none", "vision", "backbone", "vision-and-backbone", "language-but-lora", "all-but-lora"]
LossMask = Literal["none", "padded"]
Attention = Literal["auto", "reference", "xla", "cudnn", "chunked"]


@dataclass(frozen=True)
class TransformerConfig:
    """Decoder-only language model with learned positions and pre-layer-norm blocks (GPT-2 family)."""

    vocab_size: int = 256
    """Number of token ids that the data may contain."""
    padded_vocab_size: int = 256
    """Rows of the embedding table; rows from vocab_size on are masked in the loss."""
    max_seq_len: int = 256
    """Number of learned positions, and the length of the key-value cache in generation."""
    embed_dim: int = 256
    num_heads: int = 4
    mlp_dim: int = 1024
    num_layers: int = 4
    dropout_rate: float = 0.0
    tie_embeddings: bool = False
    """Use the embedding table as the output projection."""
    param_dtype: Dtype = "float32"
    """Dtype of parameters and gradients; of optimizer moments --optimizer.moments decides."""
    compute_dtype: Dtype = "float32"
    """Dtype of matrix products and activations; the loss is always float32."""
    remat: Remat = "none"
    """What the backward pass recomputes: nothing; what lies between matrix products (dots); each block from its input (block);
    the same with the inputs kept in the host's memory (offload, where the backend can)."""

    def __post_init__(self):
        check_fields(self, "model")
        for name in ("vocab_size", "padded_vocab_size", "max_seq_len", "embed_dim", "num_heads", "mlp_dim", "num_layers"):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
        require(
            self.padded_vocab_size >= self.vocab_size, "model.padded_vocab_size", self.padded_vocab_size,
            f"at least --model.vocab-size, which is {self.vocab_size}",
        )  # fmt: skip
        require(
            self.embed_dim % self.num_heads == 0, "model.num_heads", self.num_heads,
            f"a divisor of --model.embed-dim, which is {self.embed_dim}",
        )  # fmt: skip
        require(0.0 <= self.dropout_rate < 1.0, "model.dropout_rate", self.dropout_rate, "in [0, 1)")


@dataclass(frozen=True)
class MlpConfig:
    """Stack of dense layers with GELU and a scalar-free regression head (the weak-scaling workload)."""

    input_dim: int = 256
    hidden_dim: int = 1024
    num_layers: int = 4
    """Hidden layers of hidden_dim x hidden_dim, scanned."""
    output_dim: int = 16
    param_dtype: Dtype = "float32"
    compute_dtype: Dtype = "float32"
    remat: Remat = "none"

    def __post_init__(self):
        check_fields(self, "model")
        for name in ("input_dim", "hidden_dim", "num_layers", "output_dim"):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")


@dataclass(frozen=True)
class LlamaConfig:
    """Decoder-only language model with rotary positions, grouped queries, RMS norms and a gated feed-forward (Llama family)."""

    vocab_size: int = 256
    padded_vocab_size: int = 256
    """Rows of the embedding table; rows from vocab_size on are masked in the loss."""
    max_seq_len: int = 256
    """Longest sequence, and the length of the key-value cache in generation."""
    embed_dim: int = 128
    num_heads: int = 8
    num_kv_heads: int = 2
    """Key-value heads, each shared by num_heads / num_kv_heads query heads."""
    head_dim: int = 16
    mlp_dim: int = 384
    num_layers: int = 4
    rope_theta: float = 500_000.0
    """Base of the rotary wavelengths."""
    rope_factor: float | None = None
    """Stretch long wavelengths by this factor, as Llama 3.1 does; unset: none are."""
    rope_low_freq_factor: float = 1.0
    """Wavelengths beyond rope_original_seq_len / this are stretched whole."""
    rope_high_freq_factor: float = 4.0
    """Wavelengths below rope_original_seq_len / this stay."""
    rope_original_seq_len: int = 8192
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    param_dtype: Dtype = "float32"
    compute_dtype: Dtype = "float32"
    remat: Remat = "none"

    def __post_init__(self):
        check_fields(self, "model")
        counts = (
            "vocab_size", "padded_vocab_size", "max_seq_len", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim",
            "num_layers", "rope_original_seq_len",
        )  # fmt: skip
        for name in counts:
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
        require(
            self.padded_vocab_size >= self.vocab_size, "model.padded_vocab_size", self.padded_vocab_size,
            f"at least --model.vocab-size, which is {self.vocab_size}",
        )  # fmt: skip
        require(
            self.num_heads % self.num_kv_heads == 0, "model.num_kv_heads", self.num_kv_heads,
            f"a divisor of --model.num-heads, which is {self.num_heads}",
        )  # fmt: skip
        require(self.head_dim % 2 == 0, "model.head_dim", self.head_dim, "even: rotary positions turn pairs")
        require(self.rope_theta > 1, "model.rope_theta", self.rope_theta, "above 1")
        require(self.rope_factor is None or self.rope_factor >= 1, "model.rope_factor", self.rope_factor, "at least 1, or None")
        require(self.rope_low_freq_factor > 0, "model.rope_low_freq_factor", self.rope_low_freq_factor, "above 0")
        require(
            self.rope_high_freq_factor > self.rope_low_freq_factor, "model.rope_high_freq_factor", self.rope_high_freq_factor,
            f"above --model.rope-low-freq-factor, which is {self.rope_low_freq_factor}",
        )  # fmt: skip
        require(self.norm_eps > 0, "model.norm_eps", self.norm_eps, "above 0")


@dataclass(frozen=True)
class SiglipConfig:
    """Image encoder; the defaults are SigLIP So400m (arXiv:2303.15343)."""

    embed_dim: int = 1152
    num_layers: int = 27
    mlp_dim: int = 4304
    num_heads: int = 16
    patch_size: int = 14
    """Pixels along each side of a patch."""

    def __post_init__(self):
        check_fields(self, "model.vision")
        for name in ("embed_dim", "num_layers", "mlp_dim", "num_heads", "patch_size"):
            require(getattr(self, name) >= 1, f"model.vision.{name}", getattr(self, name), "at least 1")
        require(
            self.embed_dim % self.num_heads == 0, "model.vision.num_heads", self.num_heads,
            f"a divisor of --model.vision.embed-dim, which is {self.embed_dim}",
        )  # fmt: skip


@dataclass(frozen=True)
class ExpertConfig:
    """One of the sets of weights that share Gemma's attention."""

    embed_dim: int = 2048
    mlp_dim: int = 16384
    lora_rank: int = 0
    """Rank of the low-rank additions to attention and feed-forward; 0: none."""
    lora_alpha: float = 16.0
    """The additions are scaled by alpha / rank."""

    def __post_init__(self):
        check_fields(self, "model.{backbone,action_expert}")
        for name, least in (("embed_dim", 2), ("mlp_dim", 1), ("lora_rank", 0)):
            require(
                getattr(self, name) >= least,
                f"model.{{backbone,action_expert}}.{name}",
                getattr(self, name),
                f"at least {least}",
            )
        require(self.lora_alpha > 0, "model.{backbone,action_expert}.lora_alpha", self.lora_alpha, "more than 0")
        require(self.embed_dim % 2 == 0, "model.{backbone,action_expert}.embed_dim", self.embed_dim, "even")


@dataclass(frozen=True)
class Pi0Config:
    """pi0 (arXiv:2410.24164) and pi0.5 (arXiv:2504.16054): images, a prompt and a state to a chunk of actions."""

    variant: Literal["pi0", "pi05"] = "pi0"
    """pi05: no state token, and the time enters through adaptive norms."""
    vision: SiglipConfig = field(default_factory=SiglipConfig)
    backbone: ExpertConfig = field(default_factory=ExpertConfig)
    """Reads images and prompt."""
    action_expert: ExpertConfig = field(default_factory=lambda: ExpertConfig(1024, 4096, lora_alpha=32.0))
    """Reads state and actions."""
    num_layers: int = 18
    num_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 256
    vocab_size: int = 257152
    max_prompt_len: int = 48
    """Tokens of a prompt, filled up."""
    action_dim: int = 32
    """Of states and actions, filled up."""
    action_horizon: int = 50
    """Steps of a chunk of actions."""
    cameras: tuple[str, ...] = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    """In the order in which the model sees them."""
    image_size: tuple[int, int] = (224, 224)
    """Height and width in pixels."""
    loss_mask: LossMask = "none"
    """padded: action dimensions and steps that were only filled up do not count; none: they do, as in the original."""
    augment: bool = False
    """Change the training pictures at random: crop, rotation, brightness, contrast, saturation."""
    attention: Attention = "auto"
    freeze: Freeze = "none"
    """Parameters that are not trained: they are kept in bfloat16, and have no optimizer state."""
    param_dtype: Dtype = "float32"
    compute_dtype: Dtype = "bfloat16"
    """Of images, prompt and attention; projections of state, actions and time are always float32."""
    remat: Remat = "block"

    def __post_init__(self):
        check_fields(self, "model")
        for name in (
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_prompt_len",
            "action_dim",
            "action_horizon",
        ):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "at least 1")
        require(self.variant in ("pi0", "pi05"), "model.variant", self.variant, "pi0 or pi05")
        require(
            self.num_heads % self.num_kv_heads == 0, "model.num_kv_heads", self.num_kv_heads,
            f"a divisor of --model.num-heads, which is {self.num_heads}",
        )  # fmt: skip
        require(self.head_dim % 2 == 0, "model.head_dim", self.head_dim, "even, for the rotary embedding")
        require(len(set(self.cameras)) == len(self.cameras) >= 1, "model.cameras", self.cameras, "one or more distinct names")
        patch = self.vision.patch_size
        require(
            len(self.image_size) == 2 and all(size >= patch and size % patch == 0 for size in self.image_size), "model.image_size",
            self.image_size, f"height and width, multiples of --model.vision.patch-size, which is {patch}",
        )  # fmt: skip
        require(
            "lora" not in self.freeze or self.backbone.lora_rank or self.action_expert.lora_rank, "model.freeze", self.freeze,
            "another preset where no expert has a lora_rank",
        )  # fmt: skip


ModelConfig = Union[TransformerConfig, LlamaConfig, MlpConfig, Pi0Config]
LANGUAGE_MODELS = (TransformerConfig, LlamaConfig)
