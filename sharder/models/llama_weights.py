"""Llama weights in the files of Hugging Face transformers: names, shapes, and the configuration beside them.

transformers keeps matrices as (out, in), one tensor for each layer, with the rotary pairs in the two halves of a head, as
ours are.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sharder.config import LlamaConfig, UserError
from sharder.sharding.axes import ParamDecl

INDEX = "model.safetensors.index.json"
FILE = "model.safetensors"

OUTER = {"embed/tokens": "model.embed_tokens.weight", "head/norm_scale": "model.norm.weight", "head/out": "lm_head.weight"}
BLOCK = {
    "norm1_scale": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj", "norm2_scale": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}  # fmt: skip
NUM_INPUT_DIMS = {"attn_out": 2}
"""Dimensions of a layer's input in our shape, where not 1."""


def tensor_names(path: str, decl: ParamDecl) -> list[str]:
    """The tensors that make up a parameter: one, or one for each layer."""
    if path in OUTER:
        return [OUTER[path]]
    name = BLOCK[path.removeprefix("blocks/")]
    return [f"model.layers.{layer}.{name}.weight" for layer in range(decl.shape[0])]


def _is_linear(path: str) -> bool:
    return not path.endswith("_scale") and path != "embed/tokens"


def _their_shape(path: str, shape: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Of one tensor, from the shape of ours without layers; without padded vocabulary entries."""
    if path == "embed/tokens":
        return (vocab_size, shape[1])
    if not _is_linear(path):
        return shape
    inputs = NUM_INPUT_DIMS.get(path.split("/")[-1], 1)
    out = vocab_size if path == "head/out" else math.prod(shape[inputs:])
    return (out, math.prod(shape[:inputs]))


def _padded(x: np.ndarray, dim: int, size: int) -> np.ndarray:
    return np.pad(x, [(0, size - n if d == dim else 0) for d, n in enumerate(x.shape)])


def _to_ours(path: str, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    x = x.T if _is_linear(path) else x
    if path == "embed/tokens":
        return _padded(x, 0, shape[0])
    return _padded(x, 1, shape[1]) if path == "head/out" else x.reshape(shape)


def _to_theirs(path: str, x: np.ndarray, vocab_size: int) -> np.ndarray:
    out, *rest = _their_shape(path, x.shape, vocab_size)
    x = x[:out] if path == "embed/tokens" else x.reshape(rest[0], -1)[:, :out].T if _is_linear(path) else x
    return np.ascontiguousarray(x)


def read_params(folder: Path, config: LlamaConfig, decls: Mapping[str, ParamDecl]) -> dict[str, np.ndarray]:
    """Our parameters by path in their declared dtypes, in host memory.

    Raises UserError where the folder's configuration is another model's, or a tensor is missing or has another shape.
    """
    from safetensors import safe_open

    check_same_model(folder, config)
    files = _files(folder)
    opened = {file: safe_open(folder / file, framework="numpy") for file in sorted(set(files.values()))}
    found = {}
    for path, decl in decls.items():
        names, stacked = tensor_names(path, decl), path.startswith("blocks/")
        shape = decl.shape[1:] if stacked else decl.shape
        wanted, tensors = _their_shape(path, shape, config.vocab_size), []
        for name in names:
            if name not in files:
                raise UserError(f"{folder} has no tensor {name}, which {path} is made of.")
            x = opened[files[name]].get_tensor(name)
            if x.shape != wanted:
                raise UserError(f"{folder}: tensor {name} has shape {x.shape}, but {path} of this recipe needs {wanted}.")
            tensors.append(_to_ours(path, x.astype(decl.dtype), shape))
        found[path] = np.stack(tensors) if stacked else tensors[0]
    return found


def _files(folder: Path) -> dict[str, str]:
    """The file of every tensor."""
    from safetensors import SafetensorError, safe_open

    if (folder / INDEX).is_file():
        return json.loads((folder / INDEX).read_text())["weight_map"]
    if not (folder / FILE).is_file():
        raise UserError(f"{folder} has neither {FILE} nor {INDEX}: name the folder of a model in safetensors.")
    try:
        with safe_open(folder / FILE, framework="numpy") as opened:
            return dict.fromkeys(opened.keys(), FILE)
    except SafetensorError as error:
        raise UserError(f"{folder / FILE} cannot be read: {error}.") from error


def write_params(folder: Path, config: LlamaConfig, params: Mapping[str, np.ndarray]) -> None:
    """model.safetensors and config.json, as transformers reads them. Raises UserError where the folder holds a model already."""
    from safetensors.numpy import save_file

    if (folder / FILE).exists() or (folder / INDEX).exists():
        raise UserError(f"{folder} holds a model already: choose another folder.")
    tensors = {}
    for path, x in params.items():
        stacked = path.startswith("blocks/")
        for name, layer in zip(tensor_names(path, ParamDecl(x.shape, str(x.dtype), ())), x if stacked else [x]):
            tensors[name] = _to_theirs(path, layer, config.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    dtype = str(params["embed/tokens"].dtype)
    (folder / "config.json").write_text(json.dumps(their_config(config) | {"torch_dtype": dtype}, indent=1))


def their_config(config: LlamaConfig) -> dict:
    """What transformers' LlamaConfig is made from."""
    rope = {"rope_type": "default"}
    if config.rope_factor is not None:
        rope = {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_seq_len,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_factor is None else rope,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    }


def check_same_model(folder: Path, config: LlamaConfig) -> None:
    """Raises UserError with every field in which the folder's config.json describes another model than ours."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} has no config.json: name the folder of a model as transformers saves it.")
    theirs, ours = json.loads(path.read_text()), their_config(config)
    theirs = theirs | (theirs.get("rope_parameters") or {})  # the name in transformers 5
    if theirs.get("rope_type", "default") != "default" and not theirs.get("rope_scaling"):
        theirs["rope_scaling"] = {k: theirs[k] for k in ("rope_type", *(ours["rope_scaling"] or {})) if k in theirs}
    # Their sequence length is a limit, not a shape; what a file leaves out has the defaults that ours has too.
    skipped = {"architectures", "max_position_embeddings"}
    differ = [f"{k} is {theirs[k]!r}, ours {v!r}" for k, v in ours.items() if k not in skipped and theirs.get(k, v) != v]
    if differ:
        raise UserError(f"{path} describes another model than the recipe:" + "".join(f"\n- {x}" for x in differ))
