"""Weights that a run begins with: compared with the model leaf by leaf, loaded where the plan wants them, or not at all."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from sharder.config import Pi0Config, RunConfig, UserError
from sharder.models.build import flatten, unflatten
from sharder.models.lerobot_weights import Tensor, lerobot_shapes, tensors
from sharder.models.openpi_weights import Source, openpi_shapes, sources
from sharder.sharding.axes import ParamDecl
from sharder.train.optimizer import to_float32
from sharder.train.state import TrainState
from sharder.train.weight_files import WeightFile, described_model, open_weights

GROUP_BYTES = 1 << 30
"""About so much is read and converted at a time, over all devices."""
ACTION_PARAMS = {"action_in/kernel": 0, "action_out/kernel": 1, "action_out/bias": 0, "state/kernel": 0}
"""Parameters that have the action dimension, and where."""

Places = Mapping[str, NamedSharding]


@dataclass(frozen=True)
class Fit:
    """How a tree and a model go together; paths and shapes are the tree's."""

    missing: list[str]
    unexpected: list[str]
    misshapen: list[str]
    """Shape there and here differ, and no surgery was asked for."""
    resized: dict[str, str]
    """Our path: `pad`, `slice` or `reinit`."""
    fresh: list[str]
    """Our paths that the tree is not expected to have."""

    @property
    def ok(self) -> bool:
        return not (self.missing or self.unexpected or self.misshapen)


def map_of(file: WeightFile, model, params: Mapping[str, ParamDecl]) -> dict[str, Source] | dict[str, Tensor]:
    """For each of our parameters that the file can have: where it keeps it."""
    if file.kind == "sharder":
        return {path: Source(path) for path in params}
    if not isinstance(model, Pi0Config):
        raise UserError(f"{file.path} holds weights of {file.kind}, but the recipe's model is not pi0 or pi0.5.")
    return tensors(model) if file.kind == "lerobot" else sources(model)


def expected_shapes(file: WeightFile, model, params: Mapping[str, ParamDecl]) -> dict[str, tuple[int, ...]]:
    ours = {path: decl.shape for path, decl in params.items()}
    if file.kind == "lerobot":
        return lerobot_shapes(model, ours, file.shapes)
    return ours if file.kind == "sharder" else openpi_shapes(model, ours)


def fit(file: WeightFile, model, params: Mapping[str, ParamDecl], resize: str, accept: Collection[str] = ()) -> Fit:
    """Compares a file with a model; `resize` and `accept` are those of WeightsConfig."""
    where = map_of(file, model, params)
    wanted = expected_shapes(file, model, params)
    ours_of = {source.path: path for path, source in where.items()}

    def may_lack(path: str) -> bool:
        if ours_of.get(path) in accept:
            return True
        return "lora" in path or (file.kind == "paligemma" and (not path.startswith("PaliGemma/") or "_1" in path))

    missing = [p for p in wanted if p not in file.shapes]
    fresh = [ours for ours, source in where.items() if source.path in missing and may_lack(source.path)]
    misshapen, resized = [], {}
    for path in wanted.keys() & file.shapes.keys():
        there, here = file.shapes[path], wanted[path]
        if there != here:
            how = resize.partition("=")[2] if ours_of.get(path) in ACTION_PARAMS else ""
            fits = {
                "pad": all(a <= b for a, b in zip(there, here)),
                "slice": all(a >= b for a, b in zip(there, here)),
                "reinit": True,
            }
            if ours_of.get(path) in accept:
                resized[ours_of[path]] = "reinit"
            elif len(there) == len(here) and fits.get(how, False):
                resized[ours_of[path]] = how
            else:
                misshapen.append(path)
    unexpected = [p for p in file.shapes if p not in wanted]
    return Fit([p for p in missing if not may_lack(p)], sorted(unexpected), sorted(misshapen), resized, fresh)


def refuse(file: WeightFile, wanted: Mapping[str, tuple[int, ...]], found: Fit) -> None:
    """Raises UserError with what differs, side by side."""
    rows = [(p, "missing", wanted[p]) for p in found.missing] + [(p, file.shapes[p], "unexpected") for p in found.unexpected]
    rows += [(p, file.shapes[p], wanted[p]) for p in found.misshapen]
    width = max(len(p) for p, _, _ in rows)
    table = "".join(f"\n  {p:{width}}  {there!s:>24}  {here!s:>24}" for p, there, here in rows[:60])
    more = f"\n  and {len(rows) - 60} more" if len(rows) > 60 else ""
    hint = ""
    if any(p.startswith(("action_", "state_proj", "state/")) for p in found.misshapen):
        hint = "\nOther action dimensions: --weights.resize actions=pad, actions=slice or actions=reinit."
    if any("lora" in p for p in found.unexpected):
        hint += "\nThe weights have low-rank additions: use a recipe with them (pi0_lora, pi05_lora), or export them merged."
    hint += "\n--weights.accept PATH ... names parameters of the model that may be missing or of another shape, and are then drawn afresh."
    raise UserError(
        f"{file.path} does not fit the model, and nothing was loaded: {len(found.missing)} missing, {len(found.unexpected)} unexpected,"
        f" {len(found.misshapen)} of another shape.\n  {'parameter':{width}}  {'in the file':>24}  {'in the model':>24}{table}{more}{hint}"
    )


def load(
    file: WeightFile, model, params: Mapping[str, ParamDecl], places: Places, resize: str = "none", accept: Collection[str] = ()
) -> dict[str, jax.Array]:  # fmt: skip
    """Our parameters by path, each on its own shards; those that the file is not expected to have are left out.

    Raises UserError with every difference where the file does not fit; nothing is loaded then.
    """
    found = fit(file, model, params, resize, accept)
    wanted = expected_shapes(file, model, params)
    if not found.ok:
        refuse(file, wanted, found)
    skipped = {path for path, how in found.resized.items() if how == "reinit"} | set(found.fresh)
    groups: dict[str, dict[str, Source | Tensor]] = {}
    for path, source in map_of(file, model, params).items():
        if path not in skipped:
            groups.setdefault(source.path, {})[path] = source
    loaded: dict[str, jax.Array] = {}
    for batch in batches(groups, wanted, params):
        loaded |= load_batch(file, batch, params, places)
    return loaded


def batches(groups: Mapping[str, dict[str, Source]], shapes, params) -> list[dict[str, dict[str, Source]]]:
    """The leaves of a file in batches of about GROUP_BYTES."""
    found: list[dict[str, dict[str, Source]]] = [{}]
    total = 0
    for path, parts in groups.items():
        size = math.prod(shapes[path]) * jnp.dtype(params[next(iter(parts))].dtype).itemsize
        if found[-1] and total + size > GROUP_BYTES:
            found.append({})
            total = 0
        found[-1][path] = parts
        total += size
    return found


def load_batch(file: WeightFile, batch: Mapping[str, dict[str, Source]], params, places: Places) -> dict[str, jax.Array]:
    """Reads leaves of a file, divided as what becomes of them, and makes ours of them."""
    target, out = {}, {}
    for path, parts in batch.items():
        first, source = next(iter(parts.items()))
        shape = file.shapes[path]
        sharding = places[first]
        same = source.layout(params[first].shape, len(parts)) == shape
        # What is to be resized is small and comes whole.
        spec = (
            PartitionSpec(*source.layout(sharding.spec + (None,) * (len(params[first].shape) - len(sharding.spec))))
            if same
            else PartitionSpec()
        )
        target[path] = jax.ShapeDtypeStruct(shape, params[first].dtype, sharding=NamedSharding(sharding.mesh, spec))
        out |= {ours: places[ours] for ours in parts}

    def convert(theirs):
        return {
            ours: resize_to(s.take(theirs[path]), params[ours].shape)
            for path, parts in batch.items()
            for ours, s in parts.items()
        }

    return jax.jit(convert, out_shardings=out)(file.read(target))


def resize_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Cut off at the end, or filled up with zeros, to `shape`."""
    x = x[tuple(slice(0, size) for size in shape)]
    return jnp.pad(x, [(0, size - have) for size, have in zip(shape, x.shape)])


def describe_load(file: WeightFile, loaded: Mapping[str, jax.Array], params: Mapping[str, ParamDecl], found: Fit) -> str:
    """`Loaded n of m`, and what was not or was changed."""
    elements = sum(x.size for x in loaded.values())
    text = f"Loaded {len(loaded)} of {len(params)} parameters ({elements:,} elements) from {file.path} ({file.kind})"
    if found.resized:
        text += "; resized: " + ", ".join(f"{p} {how}" for p, how in sorted(found.resized.items()))
    left = sorted(set(params) - set(loaded))
    return text + (
        f"; drawn afresh: {', '.join(left[:6])}{f' and {len(left) - 6} more' if len(left) > 6 else ''}" if left else ""
    )


def with_sizes_of_weights(config: RunConfig, run_dir: Path | None = None) -> tuple[RunConfig, str | None]:
    """The config with the model's sizes taken from --weights.path, and what that changed (None: nothing).

    A run that exists keeps its own. Actions, cameras, prompt length and low-rank additions stay the recipe's.
    """
    weights = config.weights
    if weights.path is None or weights.sizes == "recipe" or not isinstance(config.model, Pi0Config):
        return config, None
    if run_dir is not None and (run_dir / "config.json").exists():
        from sharder.facts import read_config

        was = read_config(run_dir)
        return (dataclasses.replace(config, model=was.model) if was.weights == weights else config), None
    file = open_weights(weights.path)
    if file.kind == "paligemma":
        return config, None
    model, found = config.model, described_model(file)
    if not isinstance(found, Pi0Config):
        raise UserError(f"{weights.path} holds weights of a {type(found).__name__}, but the recipe's model is pi0 or pi0.5.")
    taken = {
        name: getattr(found, name)
        for name in ("variant", "vision", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    }
    for name in ("backbone", "action_expert"):
        theirs, ours = getattr(found, name), getattr(model, name)
        taken[name] = (
            theirs if theirs.lora_rank else dataclasses.replace(theirs, lora_rank=ours.lora_rank, lora_alpha=ours.lora_alpha)
        )
    patches = lambda size: math.prod(side // found.vision.patch_size for side in size)  # noqa: E731
    fits = all(side % found.vision.patch_size == 0 for side in model.image_size) and patches(model.image_size) == patches(
        found.image_size
    )
    taken["image_size"] = model.image_size if fits else found.image_size
    new = dataclasses.replace(model, **taken)
    changed = [
        f"{f.name} {getattr(new, f.name)}" for f in dataclasses.fields(new) if getattr(new, f.name) != getattr(model, f.name)
    ]
    said = f"sizes of the model are those of {weights.path}, not the recipe's: " + ", ".join(changed) if changed else None
    return dataclasses.replace(config, model=new), said


def initialise(
    state: TrainState, config: RunConfig, params: Mapping[str, ParamDecl], places: TrainState
) -> tuple[TrainState, str]:
    """A fresh state with its parameters, and their average, replaced by those of --weights.path; and what to say of it."""
    file, how = open_weights(config.weights.path), (config.weights.resize, config.weights.accept)
    unknown = sorted(set(config.weights.accept) - set(params))
    if unknown:
        raise UserError(
            f"--weights.accept names {', '.join(unknown)}, but the model has no such parameter; {list(params)[:5]} are some of its."
        )
    loaded = load(file, config.model, params, flatten(places.params), *how)
    said = describe_load(file, loaded, params, fit(file, config.model, params, *how))
    new = unflatten(flatten(state.params) | loaded)
    averaged = flatten(state.ema or {})
    average = unflatten({path: x for path, x in flatten(new).items() if path in averaged})
    ema = None if state.ema is None else jax.jit(to_float32, out_shardings=places.ema)(average)
    return TrainState(state.step, new, state.opt_state, ema), said
