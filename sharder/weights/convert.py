"""Weights in and out: from checkpoints of openpi and LeRobot to a folder of ours, and from a run or such a folder to theirs.

A folder of ours holds the orbax item `params` and `manifest.json` (model, fingerprints), as a run's checkpoint does.
"""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sharder import __version__, checkpoint
from sharder.config import ParallelConfig, Pi0Config, UserError, model_to_dict
from sharder.data.assets import carry_assets
from sharder.models.build import Declared, declare, unflatten
from sharder.models.lora import without_lora
from sharder.models.openpi_weights import by_source, to_openpi
from sharder.sharding.mesh import make_mesh, resolve_mesh_shape
from sharder.sharding.plan import Plan, make_plan
from sharder.train.fingerprint import combine, digests, hex_digest
from sharder.train.initial_weights import describe_load, fit, load
from sharder.train.lerobot_file import FILE
from sharder.train.weight_files import WeightFile, model_of, open_average, open_weights
from sharder.weights.lerobot import write_lerobot


def divided_plan(declared: Declared) -> tuple[Plan, jax.sharding.Mesh]:
    """Everything divided over all devices, but for what does not divide evenly."""
    parallel = ParallelConfig(policy="fsdp")
    shape = resolve_mesh_shape(parallel, jax.device_count(), jax.local_device_count())
    plan = make_plan(declared.params, declared.rules, parallel, shape)
    whole = tuple({x.path for x in plan.indivisible()})
    return make_plan(declared.params, declared.rules, dataclasses.replace(parallel, replicate=whole), shape), make_mesh(shape)


def load_all(file: WeightFile, model: Pi0Config) -> tuple[dict[str, jax.Array], Declared]:
    """All parameters, divided over the devices of this process."""
    declared = declare(model)
    plan, mesh = divided_plan(declared)
    return load(file, model, declared.params, plan.shardings("storage", mesh)), declared


def fingerprint_of(leaves: Mapping[str, jax.Array]) -> tuple[str, dict[str, str]]:
    """Of all parameters, and of each, by paths that begin with `params/`."""
    named = {f"params/{path}": x for path, x in sorted(leaves.items())}
    mesh = next(iter(named.values())).sharding.mesh
    found = np.asarray(jax.jit(digests, out_shardings=NamedSharding(mesh, PartitionSpec()))(named))
    return combine(found, list(named)), {path: hex_digest(digest) for path, digest in zip(named, found)}


def new_folder(out: Path) -> Path:
    """Raises UserError where there is something already."""
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out is {out}, which exists and is not empty: choose another folder.")
    out.mkdir(parents=True, exist_ok=True)
    return out.resolve()


def write_tree(folder: Path, tree: dict) -> None:
    """An orbax item as openpi's orbax reads it: OCDBT, zarr 2."""
    import orbax.checkpoint as ocp

    shutil.rmtree(folder, ignore_errors=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=False)) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree))


def import_weights(path: Path, out: Path, param_dtype: str | None = None) -> str:
    """Writes a folder of ours from a checkpoint of openpi or LeRobot; returns what to print."""
    file = open_weights(path)
    model = model_of(file)
    dtypes = set(file.dtypes.values())
    model = dataclasses.replace(model, param_dtype=param_dtype or ("bfloat16" if dtypes == {"bfloat16"} else "float32"))
    out = new_folder(out)
    leaves, declared = load_all(file, model)
    fingerprint, each = fingerprint_of(leaves)
    write_tree(out / "params", unflatten(leaves))
    carry_assets(path, out)
    described = {
        f"params/{p}": {"shape": list(x.shape), "dtype": str(x.dtype), "fingerprint": each[f"params/{p}"]}
        for p, x in leaves.items()
    }
    manifest = {
        "fingerprint": fingerprint,
        "model": model_to_dict(model),
        "versions": {"sharder": __version__, "jax": jax.__version__},
    }
    checkpoint.write_manifest(out, {**manifest, "leaves": described})
    loaded = describe_load(file, leaves, declared.params, fit(file, model, declared.params, "none"))
    return f"{model.variant}{' with LoRA' if model.backbone.lora_rank else ''}, {'/'.join(sorted(dtypes))}\n{loaded}\nfingerprint {fingerprint}, written to {out}"


def with_average(path: Path, leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The moving average in place of the parameters; what is frozen has none, and stays."""
    average = open_average(path)
    target = {p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for p, x in leaves.items() if p in average.shapes}
    return leaves | average.read(target)


def export_weights(
    path: Path, out: Path, *, format: Literal["openpi", "lerobot"] = "openpi", merge_lora: bool = True, value: bool = True,
    average: bool = False, asset_id: str | None = None,
) -> str:  # fmt: skip
    """Writes openpi's tree or LeRobot's file from a run, a checkpoint or a folder of ours; returns what to print.

    `value`: paths end with `value`, as openpi's trainer writes them. `average`: the moving average, as openpi's `params` of a
    run that keeps one. `asset_id`: folder below `assets` for the statistics.
    """
    file = open_weights(path)
    model = model_of(file)
    has_lora = bool(model.backbone.lora_rank or model.action_expert.lora_rank)
    merged = merge_lora and has_lora
    if format == "lerobot" and has_lora and not merged:
        raise UserError("LeRobot's file has no place for low-rank additions: leave --no-merge-lora out.")
    if format == "lerobot" and jax.process_count() > 1:
        raise UserError("LeRobot's file is written by one process: export without the others.")
    leaves, _ = load_all(file, model)
    leaves = with_average(path, leaves) if average else leaves
    fingerprint, _ = fingerprint_of(leaves)
    if merged:
        leaves, model = without_lora(leaves, model)
    out = new_folder(out)
    if format == "lerobot":
        number, what = write_lerobot(out / FILE, model, leaves), "tensors of LeRobot's file"
    else:
        number, what = write_openpi(out / "params", model, leaves, value), "arrays of openpi's tree"
    carry_assets(path, out, asset_id)
    done = "; low-rank additions merged into the weights" if merged else ""
    return f"{number} {what} written to {out}{done}\nfingerprint {fingerprint}"


def write_openpi(folder: Path, model: Pi0Config, leaves: Mapping[str, jax.Array], value: bool) -> int:
    """openpi's tree, each array divided as its parts are, and the number of its arrays."""
    mesh = next(iter(leaves.values())).sharding.mesh

    def spec(parts) -> NamedSharding:
        ours, source = next(iter(parts.items()))
        entries = leaves[ours].sharding.spec
        return NamedSharding(mesh, PartitionSpec(*source.layout(entries + (None,) * (leaves[ours].ndim - len(entries)))))

    places = {theirs: spec(parts) for theirs, parts in by_source(model).items()}
    theirs = jax.jit(lambda x: to_openpi(model, x, jax.numpy), out_shardings=places)(leaves)
    write_tree(folder, {"params": unflatten({p + ("/value" if value else ""): x for p, x in theirs.items()})})
    return len(theirs)
