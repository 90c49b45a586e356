"""The names and shapes of LeRobot's pi0 and pi0.5 in torch, and ours, both ways.

LeRobot keeps a tensor for each layer, matrices as torch's Linear does, (out, in), and a head and its dimension as one. It
stores the table of tokens under the name of the output projection, from which it takes it, and an output projection of the
action expert, which it never uses. Nothing but stacks, transposes and reshapes lies between the two, so every conversion
keeps all bits.

Letters: L layers, D, I, O model dimensions, N heads, H head dimension, P positions, X, Y pixels, C channels, V vocabulary.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sharder.config import ExpertConfig, Pi0Config, SiglipConfig, UserError

Shapes = Mapping[str, tuple[int, ...]]
PREFIX = "model."
"""Of every name in what LeRobot saves; released files may lack it."""
PALIGEMMA, EXPERT = "paligemma_with_expert.paligemma.", "paligemma_with_expert.gemma_expert."
VISION, LANGUAGE = PALIGEMMA + "model.vision_tower.vision_model.", PALIGEMMA + "model.language_model."
SHORT_VISION = PALIGEMMA + "model.vision_tower."
EMBEDDING, OUTPUT, EXPERT_OUTPUT = LANGUAGE + "embed_tokens.weight", PALIGEMMA + "lm_head.weight", EXPERT + "lm_head.weight"
NUM_HEADS, NUM_VISION_HEADS = 8, 16
"""LeRobot's, for which its code has no option; no shape tells them."""

MATRIX, VECTOR = ("IO", "O I"), ("D", "D")
MATRICES, VECTORS = ("LIO", "L O I"), ("LD", "L D")
INTO_HEADS, HEAD_BIASES, OUT_OF_HEADS = ("LDNH", "L NH D"), ("LNH", "L NH"), ("LNHD", "L D NH")

VISION_OUTER = {
    "patches/kernel": (VISION + "embeddings.patch_embedding.weight", ("XYCD", "D C X Y")),
    "patches/bias": (VISION + "embeddings.patch_embedding.bias", VECTOR),
    "patches/positions": (VISION + "embeddings.position_embedding.weight", ("PD", "P D")),
    "head/norm_scale": (VISION + "post_layernorm.weight", VECTOR),
    "head/norm_bias": (VISION + "post_layernorm.bias", VECTOR),
    "head/kernel": (PALIGEMMA + "model.multi_modal_projector.linear.weight", MATRIX),
    "head/bias": (PALIGEMMA + "model.multi_modal_projector.linear.bias", VECTOR),
}
VISION_BLOCK = {
    "norm1_scale": ("layer_norm1.weight", VECTORS), "norm1_bias": ("layer_norm1.bias", VECTORS),
    "query": ("self_attn.q_proj.weight", INTO_HEADS), "query_bias": ("self_attn.q_proj.bias", HEAD_BIASES),
    "key": ("self_attn.k_proj.weight", INTO_HEADS), "key_bias": ("self_attn.k_proj.bias", HEAD_BIASES),
    "value": ("self_attn.v_proj.weight", INTO_HEADS), "value_bias": ("self_attn.v_proj.bias", HEAD_BIASES),
    "out": ("self_attn.out_proj.weight", OUT_OF_HEADS), "out_bias": ("self_attn.out_proj.bias", VECTORS),
    "norm2_scale": ("layer_norm2.weight", VECTORS), "norm2_bias": ("layer_norm2.bias", VECTORS),
    "mlp_in": ("mlp.fc1.weight", MATRICES), "mlp_in_bias": ("mlp.fc1.bias", VECTORS),
    "mlp_out": ("mlp.fc2.weight", MATRICES), "mlp_out_bias": ("mlp.fc2.bias", VECTORS),
}  # fmt: skip
EXPERT_BLOCK = {
    "attention/query": ("self_attn.q_proj", INTO_HEADS), "attention/key": ("self_attn.k_proj", INTO_HEADS),
    "attention/value": ("self_attn.v_proj", INTO_HEADS), "attention/out": ("self_attn.o_proj", OUT_OF_HEADS),
    "mlp/gate": ("mlp.gate_proj", MATRICES), "mlp/up": ("mlp.up_proj", MATRICES), "mlp/down": ("mlp.down_proj", MATRICES),
}  # fmt: skip
NORMS = {
    "blocks/attention_norm": "layers.*.input_layernorm",
    "blocks/mlp_norm": "layers.*.post_attention_layernorm",
    "final_norm": "norm",
}
PROJECTIONS = {
    "pi0": {"action_in": "action_in_proj", "action_out": "action_out_proj", "state": "state_proj",
            "time_in": "action_time_mlp_in", "time_out": "action_time_mlp_out"},
    "pi05": {"action_in": "action_in_proj", "action_out": "action_out_proj", "time_in": "time_mlp_in", "time_out": "time_mlp_out"},
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """Where a parameter of ours stands in LeRobot's file; the methods are those of `openpi_weights.Source`."""

    path: str
    """`*` stands for the layer: the tensors of all layers, stacked."""
    ours: str
    """A letter for each of our dimensions."""
    theirs: str
    """Theirs by the same letters; those of one dimension stand together."""
    head_dim: int

    def take(self, theirs):
        sizes = [
            n
            for letters, size in zip(self.theirs.split(), theirs.shape)
            for n in ((size,) if len(letters) == 1 else (size // self.head_dim, self.head_dim))
        ]
        order = self.theirs.replace(" ", "")
        return theirs.reshape(sizes).transpose([order.index(letter) for letter in self.ours])

    def untake(self, ours):
        order = [self.ours.index(letter) for letter in self.theirs.replace(" ", "")]
        return ours.transpose(order).reshape(self.layout(ours.shape))

    def layout(self, entries: Iterable, fill: object = None) -> tuple:
        """What belongs to our dimensions (a size, a partition), by their dimensions."""
        of = dict(zip(self.ours, entries))
        return tuple(_merged([of[letter] for letter in letters]) for letters in self.theirs.split())


def _merged(entries: list) -> Any:
    """Sizes multiply; a partition of several dimensions as one can only be that of the first."""
    if all(isinstance(entry, int) for entry in entries):
        return math.prod(entries)
    return entries[0] if not any(entries[1:]) else None


def tensors(config: Pi0Config) -> dict[str, Tensor]:
    """For every parameter of the model but low-rank additions, by its path: where LeRobot keeps it."""
    found: dict[str, tuple[str, tuple[str, str]]] = {}
    for ours, theirs in PROJECTIONS[config.variant].items():
        found |= {f"{ours}/kernel": (f"{theirs}.weight", MATRIX), f"{ours}/bias": (f"{theirs}.bias", VECTOR)}
    found |= {f"vision/{ours}": theirs for ours, theirs in VISION_OUTER.items()}
    found |= {f"vision/blocks/{ours}": (f"{VISION}encoder.layers.*.{name}", how) for ours, (name, how) in VISION_BLOCK.items()}
    found["llm/tokens"] = (EMBEDDING, ("VD", "V D"))
    for expert, root in (("backbone", LANGUAGE), ("action", EXPERT + "model.")):
        for ours, (name, how) in EXPERT_BLOCK.items():
            found[f"llm/{expert}/blocks/{ours}/weight"] = (f"{root}layers.*.{name}.weight", how)
        for ours, name in NORMS.items():
            matrix, vector = (MATRICES, VECTORS) if ours.startswith("blocks/") else (MATRIX, VECTOR)
            if expert == "action" and config.variant == "pi05":
                found[f"llm/{expert}/{ours}/kernel"] = (f"{root}{name}.dense.weight", matrix)
                found[f"llm/{expert}/{ours}/bias"] = (f"{root}{name}.dense.bias", vector)
            else:
                found[f"llm/{expert}/{ours}/scale"] = (f"{root}{name}.weight", vector)
    vision_head_dim = config.vision.embed_dim // config.vision.num_heads
    return {
        ours: Tensor(name, *how, vision_head_dim if ours.startswith("vision/") else config.head_dim)
        for ours, (name, how) in sorted(found.items())
    }


def lerobot_shapes(config: Pi0Config, ours: Shapes, found: Shapes) -> dict[str, tuple[int, ...]]:
    """Shapes of LeRobot's stacked tensors for those of our parameters; where those `found` are not all there and alike, of each."""
    wanted = {tensor.path: tensor.layout(ours[path]) for path, tensor in tensors(config).items()}
    for path, (size, *shape) in [(p, s) for p, s in wanted.items() if "*" in p and p not in found]:
        layers = [path.replace("*", str(layer)) for layer in range(size)]
        if any(layer in found for layer in layers):
            del wanted[path]
            wanted |= dict.fromkeys(layers, tuple(shape))
    return wanted


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Of the tensors of a file that are used: the path in `tensors`, with the layer's number.

    Newer versions of transformers leave `vision_model` out. Where both tables of tokens are there, LeRobot takes the embedding.
    """
    plain = {name: name.removeprefix(PREFIX).replace(".vision_model.", ".").replace(SHORT_VISION, VISION) for name in names}
    unused = {EXPERT_OUTPUT, *([OUTPUT] if EMBEDDING in plain.values() else [])}
    return {name: EMBEDDING if p == OUTPUT else p for name, p in plain.items() if p not in unused}


def stacked(name: str) -> tuple[str, int]:
    """The path in `tensors` of a name with a layer's number, and the layer; 0 of what is in no layer."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    return (name, 0) if found is None else (f"{name[: found.start(1)]}*{name[found.end(1) :]}", int(found[1]))


def file_names(path: str, num_layers: int) -> list[str]:
    """What LeRobot calls the tensors of a path in `tensors`, in the order of the layers."""
    name = PREFIX + (OUTPUT if path == EMBEDDING else path)
    return [name.replace("*", str(layer)) for layer in range(num_layers if "*" in path else 1)]


def detect(shapes: Shapes, **known) -> Pi0Config:
    """The model whose stacked tensors have these shapes; what no shape tells is as LeRobot has it, the default or `known`.

    Raises UserError for a file that is not of pi0 or pi0.5.
    """
    if not any(name in shapes for name in ("state_proj.weight", "time_mlp_in.weight")):
        raise UserError("the file has neither state_proj nor time_mlp_in, so it is not LeRobot's pi0 or pi0.5.")
    try:
        return _detect(shapes, known)
    except (KeyError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"the file is not whole: {error} is missing or has another number of dimensions.") from error


def _detect(shapes: Shapes, known: dict) -> Pi0Config:
    def expert(root: str) -> ExpertConfig:
        _, embed_dim, mlp_dim = shapes[root + "layers.*.mlp.down_proj.weight"]
        return ExpertConfig(embed_dim, mlp_dim)

    attention = LANGUAGE + "layers.*.self_attn."
    layers, queries, _ = shapes[attention + "q_proj.weight"]
    if queries % NUM_HEADS:
        raise UserError(
            f"the file's queries have {queries} dimensions, which {NUM_HEADS} heads do not divide: LeRobot has no other."
        )
    head_dim = queries // NUM_HEADS
    vision_dim, _, patch, _ = shapes[VISION + "embeddings.patch_embedding.weight"]
    vision_layers, vision_mlp_dim, _ = shapes[VISION + "encoder.layers.*.mlp.fc1.weight"]
    side = round(shapes[VISION + "embeddings.position_embedding.weight"][0] ** 0.5)
    sizes = {
        "variant": "pi0" if "state_proj.weight" in shapes else "pi05",
        "vision": SiglipConfig(vision_dim, vision_layers, vision_mlp_dim, NUM_VISION_HEADS, patch),
        "backbone": expert(LANGUAGE), "action_expert": expert(EXPERT + "model."), "num_layers": layers, "num_heads": NUM_HEADS,
        "num_kv_heads": shapes[attention + "k_proj.weight"][1] // head_dim, "head_dim": head_dim, "vocab_size": shapes[EMBEDDING][0],
        "action_dim": shapes["action_in_proj.weight"][1], "image_size": (side * patch, side * patch),
    }  # fmt: skip
    return Pi0Config(**(sizes | known))
