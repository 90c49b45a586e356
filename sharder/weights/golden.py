"""Compares our model with recorded outputs of the original: `sharder weights check GOLDEN.npz`.

NAME.npz holds parameters in openpi's tree, a batch with noise and time, and what the original made of them; NAME.json
beside it holds sizes, loss and the norm of every parameter's gradient.
"""

import json
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sharder.config import Pi0Config, UserError
from sharder.models.build import declare, flatten, unflatten
from sharder.models.openpi_weights import detect, openpi_shapes, to_openpi, to_ours

CAMERAS = Pi0Config.cameras
NAMES = {
    "prefix_tokens", "prefix_mask", "suffix_tokens", "suffix_mask", "prefix_out", "suffix_out", "adarms_cond", "velocity", "loss",
    "sampled_actions",
}  # fmt: skip


INPUTS = tuple(f"input/{name}" for name in ("tokens", "token_mask", "state", "actions", "noise", "time"))


@dataclass(frozen=True)
class Tolerance:
    """What may lie between us and the original at one compute dtype."""

    array: float
    """float32: largest absolute error of velocity and samples, and of others relative to their largest value where that is above 1.
    bfloat16: root of the mean square of the error relative to that of the values; single elements are off by their rounding."""
    loss: float
    """Relative."""
    grad_norm: float
    """Relative."""
    floor: float
    """Of gradient norms, as a share of the largest: some are zero but for rounding, e.g. of the bias of SigLIP's keys."""


TOLERANCES = {"float32": Tolerance(1e-4, 1e-5, 1e-4, 1e-6), "bfloat16": Tolerance(2e-2, 2e-2, 2e-2, 1e-3)}


@dataclass(frozen=True)
class Quantity:
    """One number or array that the original gave, and ours beside it."""

    name: str
    absolute: float
    """Largest absolute error."""
    relative: float
    """Largest absolute error / largest absolute value; of a norm or a loss, its relative error."""
    ok: bool
    expected: float
    """The number, or the mean of the array."""
    found: float


@dataclass(frozen=True)
class Golden:
    """A recorded case."""

    config: Pi0Config
    params: dict
    batch: dict[str, np.ndarray]
    noise: np.ndarray
    time: np.ndarray
    expected: dict[str, np.ndarray]
    """Intermediates and outputs by name."""
    facts: dict


def read(path: Path, compute_dtype: str | None = None) -> Golden:
    """Raises UserError where the files are missing or not in this format, or do not fit each other."""
    facts_path = path.with_suffix(".json")
    for file in (path, facts_path):
        if not file.is_file():
            raise UserError(f"{file} does not exist: a golden vector is NAME.npz with NAME.json beside it.")
    facts, arrays = _read_facts(facts_path), _read_arrays(path)
    params = {name.removeprefix("params/"): x for name, x in arrays.items() if name.startswith("params/")}
    pictures = {m[1]: arrays[name] for name in arrays if (m := re.fullmatch(r"image\d*/(.+)", name))}
    # openpi's order, whatever that of the file.
    pictures = {
        camera: pictures[camera]
        for camera in sorted(pictures, key=lambda c: (c not in CAMERAS, CAMERAS.index(c) if c in CAMERAS else 0))
    }
    lacking = [what for what, there in (("params/...", params), ("image<size>/<camera>", pictures)) if not there]
    lacking += [name for name in INPUTS if name not in arrays]
    if lacking:
        raise UserError(f"{path} is no whole golden vector: {', '.join(lacking)} is missing.")
    shapes = {name: x.shape for name, x in params.items()}
    config = detect(
        shapes, cameras=tuple(pictures), action_horizon=arrays["input/actions"].shape[1],
        max_prompt_len=arrays["input/tokens"].shape[1], compute_dtype=compute_dtype or facts.get("dtype", "float32"), remat="none",
    )  # fmt: skip
    check_sizes(config, facts, path)
    check_tree(config, shapes, path)
    batch = {name: arrays[f"input/{name}"] for name in ("tokens", "token_mask", "state", "actions")}
    for camera, image in pictures.items():
        times = config.image_size[0] // image.shape[1]
        batch[f"image/{camera}"] = image.repeat(times, axis=1).repeat(times, axis=2)
        if f"image_mask/{camera}" in arrays:
            batch[f"image_mask/{camera}"] = arrays[f"image_mask/{camera}"]
    expected = {name.split("/", 1)[1]: x for name, x in arrays.items() if name.split("/")[0] in ("intermediate", "output")}
    check_recorded(facts, expected, shapes, path)
    return Golden(config, to_ours(config, params), batch, arrays["input/noise"], arrays["input/time"], expected, facts)


def _read_facts(path: Path) -> dict:
    try:
        facts = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(facts, dict):
        raise UserError(f"{path} holds a {type(facts).__name__}, but must hold an object with the sizes of a golden vector.")
    return facts


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged or no .npz: {error}.") from error


def check_tree(config: Pi0Config, shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    """Raises UserError where the parameters are not the tree of the model that was found in their sizes."""
    wanted = openpi_shapes(config, {name: x.shape for name, x in declare(config).params.items()})
    differ = [f"{p}: {shapes.get(p, 'missing')} in the file, {x} in the model" for p, x in wanted.items() if shapes.get(p) != x]
    differ += [f"{p}: {x} in the file, unknown to the model" for p, x in shapes.items() if p not in wanted]
    if differ:
        raise UserError(
            f"{path} does not fit the model of its own sizes in {len(differ)} of its parameters: {'; '.join(differ[:5])}"
        )


def check_recorded(facts: dict, expected: dict[str, np.ndarray], shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    """Raises UserError where there is nothing to compare, where the .json knows other parameters, or another loss."""
    norms = facts.get("grad_norms", {})
    if not norms and not expected:
        raise UserError(
            f"{path} has no output/... or intermediate/... arrays, and its .json no grad_norms: nothing to compare."
        )
    strange = sorted(set(norms) - set(shapes))
    if strange:
        raise UserError(
            f"the .json of {path} has {len(strange)} gradient norms of unknown parameters: {', '.join(strange[:5])}"
        )
    if facts.get("loss") is None:
        return
    loss = expected.setdefault("loss", np.asarray(facts["loss"], np.float32))
    if not np.isclose(loss, facts["loss"], rtol=1e-5, atol=0):
        raise UserError(f"{path} and its .json do not fit each other: loss: {facts['loss']} in the .json, {loss} in the arrays")


def check_sizes(config: Pi0Config, facts: dict, path: Path) -> None:
    """Raises UserError where the parameters are not of the sizes that the .json beside them says."""
    found = {
        "pi05": config.variant == "pi05", "vocab": config.vocab_size, "action_dim": config.action_dim, "action_horizon": config.action_horizon,
        "max_token_len": config.max_prompt_len,
        "gemma": {"width": config.backbone.embed_dim, "depth": config.num_layers, "mlp_dim": config.backbone.mlp_dim,
                  "num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim},
        "expert": {"width": config.action_expert.embed_dim, "mlp_dim": config.action_expert.mlp_dim},
        "siglip": {"width": config.vision.embed_dim, "depth": config.vision.num_layers, "mlp_dim": config.vision.mlp_dim,
                   "num_heads": config.vision.num_heads},
    }  # fmt: skip
    flat_found, flat_facts = flatten(found), flatten({k: v for k, v in facts.items() if k in found})
    differ = [
        f"{k}: {flat_facts[k]} in the .json, {x} in the arrays"
        for k, x in flat_found.items()
        if flat_facts.get(k) not in (None, x)
    ]
    if differ:
        raise UserError(f"{path} and its .json do not fit each other: " + "; ".join(differ))


def compute(golden: Golden) -> dict[str, np.ndarray]:
    """Everything that the original recorded, by our model: arrays by name, `loss`, and `grad_norm/<their path>`."""
    config = golden.config
    graphdef = declare(config).graphdef

    @jax.jit
    def forward(params, batch, noise, time):
        def loss(params):
            losses, weights, found = nnx.merge(graphdef, params).flow_losses(batch, noise, time)
            return losses.sum() / weights.sum(), found

        (loss, found), grads = jax.value_and_grad(loss, has_aux=True)(params)
        theirs = to_openpi(config, flatten(grads), jnp)
        norms = {f"grad_norm/{path}": jnp.sqrt(jnp.square(g).sum()) for path, g in theirs.items()}
        steps = golden.facts.get("num_steps", 10)
        sampled = nnx.merge(graphdef, params).sample(batch, noise, steps)
        return found | {"loss": loss, "sampled_actions": sampled} | norms

    arguments = (unflatten(golden.params), golden.batch, golden.noise, golden.time)
    # On CPU everything is computed once: without optimisation it compiles in half the time.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    with jax.default_matmul_precision("highest"):
        return jax.device_get(forward.lower(*arguments).compile(options)(*jax.device_put(arguments)))


def compare(golden: Golden) -> list[Quantity]:
    """Every recorded quantity beside ours."""
    found = compute(golden)
    narrow = golden.config.compute_dtype == "bfloat16"
    tolerance = TOLERANCES[golden.config.compute_dtype]
    rows = [_compare_array(name, x, found[name], tolerance, narrow) for name, x in golden.expected.items() if name in found]
    norms = golden.facts.get("grad_norms", {})
    floor = tolerance.floor * max(norms.values(), default=0.0)
    for path, expected in norms.items():
        ours = float(found[f"grad_norm/{path}"])
        error = abs(ours - expected)
        relative = error / max(expected, floor, np.finfo(np.float32).tiny)
        zero = expected < floor and ours < floor
        rows.append(
            Quantity(f"grad_norm/{path}", error, relative, bool(zero or relative <= tolerance.grad_norm), expected, ours)
        )
    return rows


def _compare_array(name: str, expected: np.ndarray, found: np.ndarray, tolerance: Tolerance, narrow: bool) -> Quantity:
    """Raises UserError where the shapes differ."""
    ours, theirs = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if ours.shape != theirs.shape:
        raise UserError(f"{name} is {theirs.shape} in the golden vector, but {ours.shape} by our model.")
    error, largest = float(np.abs(ours - theirs).max()), float(np.abs(theirs).max())
    relative = error / max(largest, np.finfo(np.float32).tiny)
    if name == "loss":
        ok = relative <= tolerance.loss
    elif narrow:
        ok = np.sqrt(np.square(ours - theirs).mean()) <= tolerance.array * np.sqrt(np.square(theirs).mean())
    else:
        ok = error <= tolerance.array * (1.0 if name in ("velocity", "sampled_actions") else max(largest, 1.0))
    return Quantity(name, error, relative, bool(ok), float(theirs.mean()), float(ours.mean()))


def unknown(golden: Golden) -> list[str]:
    """Recorded names that no quantity of ours corresponds to."""
    return sorted(set(golden.expected) - NAMES)


def describe(rows: list[Quantity]) -> str:
    """A table of at most 80 columns, and how many quantities agree."""
    lines = [f"{'quantity':49} {'absolute':>9} {'relative':>9}"]
    for row in rows:
        name = row.name.replace("PaliGemma/img/Transformer/encoderblock/", ".../")
        numbers = f"{row.absolute:9.2e} {row.relative:9.2e}{'' if row.ok else ' TOO LARGE'}"
        # A name that is still long has a line of its own.
        lines += [f"{name:49} {numbers}"] if len(name) <= 49 else [name, f"{'':49} {numbers}"]
    bad = sum(not row.ok for row in rows)
    return "\n".join([*lines, f"{len(rows) - bad} of {len(rows)} quantities agree with the original"])
