"""From a path to a policy: the weights, the model, the robot, its statistics and the tokenizer of its prompts."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from flax import nnx

from sharder import checkpoint
from sharder.config import ParallelConfig, Pi0Config, UserError
from sharder.data.assets import STATS, Usage, assets_beside, find_assets, read_usage, usual_names
from sharder.data.compare_stats import compare_stats
from sharder.data.normalize import read_norm_stats
from sharder.data.open_robot import choose_episodes, make_robot, open_source
from sharder.data.prompts import PromptEncoder, open_prompt_tokenizer
from sharder.data.robot_dataset import Numbers, Scaling
from sharder.data_config import RobotConfig
from sharder.facts import read_config
from sharder.models.build import declare, unflatten
from sharder.ops.layout import Layout
from sharder.serve.generate import place
from sharder.serve.options import ModelOptions, RobotOptions, SamplingOptions
from sharder.serve.policy import Policy
from sharder.sharding.compute import ComputeLayout
from sharder.train.initial_weights import load
from sharder.train.lerobot_file import FILE
from sharder.train.own_files import with_kept_tokenizer
from sharder.train.weight_files import model_of, open_average, open_weights

PROMPT_LENGTHS = {"pi0": 48, "pi05": 200}
"""Of openpi's models, which no shape of their weights tells."""


@dataclass(frozen=True)
class Found:
    """What lies at a path."""

    weights: Path
    model: Pi0Config
    assets: Path | None
    tokenizer: str | None
    examples: Literal["recorded", "made up", "unknown"]
    """What it was trained on; made-up examples are not normalised."""
    name: str


def find(path: Path, step: int | None, assets: Path | None = None) -> Found:
    """A run, one of its checkpoints, a folder of weights, or a checkpoint of openpi or LeRobot. Raises UserError where it is none."""
    run, weights, name = path, path, str(path)
    if (path / "config.json").is_file() and not (path / FILE).is_file():  # LeRobot's has a config.json of its own
        step = checkpoint.choose_step(path, step)
        weights, name = checkpoint.entry(path, step), f"{path} at step {step}"
    elif step is not None:
        raise UserError(f"--step is {step}, but {path} is not a run: leave it out.")
    elif path.resolve().parent.name == "checkpoints":
        run = path.resolve().parents[1]
    config = read_config(run) if (run / "config.json").is_file() and not (path / FILE).is_file() else None
    if config is not None and not isinstance(config.model, Pi0Config):
        raise UserError(f"{run} is a run of {type(config.model).__name__}; only pi0 and pi0.5 are served.")
    if assets is not None and not assets.is_dir():
        raise UserError(f"--assets {assets} is no folder.")
    assets = assets or assets_beside(path)
    assets = None if assets is None else find_assets(assets)
    if config is not None:
        examples = "recorded" if config.data.path or config.data.mixture else "made up"
        return Found(weights, config.model, assets, with_kept_tokenizer(run, config).data.tokenizer, examples, name)
    file = open_weights(weights)
    model = model_of(file)
    known = {"max_prompt_len": PROMPT_LENGTHS[model.variant]}
    recorded = None if assets is None else read_usage(assets)
    if recorded is not None:
        known = {
            "cameras": recorded.model_cameras,
            "action_horizon": recorded.action_horizon,
            "max_prompt_len": recorded.max_prompt_len,
        }
    model = replace(model, **{field: value for field, value in known.items() if value is not None})
    return Found(weights, model, assets, None, "unknown", name)


def with_options(model: Pi0Config, options: ModelOptions) -> Pi0Config:
    """The model with what was given in place of its own."""
    given = {f.name: getattr(options, f.name) for f in fields(options) if f.name != "state_in_prompt"}
    return replace(model, **{name: value for name, value in given.items() if value is not None})


def use(found: Found, model: Pi0Config, options: RobotOptions) -> Usage:
    """How the policy is asked, with what was given in place of what is recorded. Raises UserError where that does not fit."""
    recorded = None if found.assets is None else read_usage(found.assets)
    if recorded is None and options.policy is None and found.examples == "recorded":
        raise UserError(
            f"{found.name} has no assets/robot.json, which says how it is asked: resume the run, which writes it, or give --robot.policy and"
            " what else differs from it."
        )
    auto = {"pi0": "z_score", "pi05": "quantile"}[model.variant]
    usage = recorded or Usage(normalization="none" if found.examples == "made up" else auto)
    given = {f.name: getattr(options, f.name) for f in fields(options) if getattr(options, f.name) is not None}
    if given.get("normalization") == "auto":
        given["normalization"] = auto
    if recorded is None or options.policy not in (None, usage.policy):
        usage = replace(usage, adapt_to_pi=True, **usual_names(options.policy or usage.policy, model.cameras))
    usage = replace(usage, **given)
    for camera in (entry.split("=", 1)[0] for entry in usage.cameras):
        if camera not in model.cameras:
            raise UserError(f"--robot.cameras names {camera!r}, but the model's cameras are {', '.join(model.cameras)}.")
    return usage


def scale(found: Found, usage: Usage) -> Scaling:
    """Raises UserError where there are no statistics, or not those that are needed."""
    if usage.normalization == "none":
        return Scaling({}, "none")
    if found.assets is None or not (found.assets / STATS).is_file():
        raise UserError(
            f"{found.name} has no assets/.../{STATS}, which says how states and actions are normalised: name its folder with --assets,"
            " or give --robot.normalization none."
        )
    stats = read_norm_stats(found.assets)
    for name in ("state", "actions"):
        if name not in stats:
            raise UserError(f"{found.assets / STATS} has no {name!r}, only {', '.join(stats)}.")
        if usage.normalization == "quantile" and (stats[name].q01 is None or stats[name].q99 is None):
            raise UserError(f"{found.assets / STATS}, {name}, has no q01 and q99: give --robot.normalization z_score.")
    return Scaling(stats, usage.normalization, usage.clip, usage.least_range)


def differences(found: Found, model: ModelOptions, robot: RobotOptions, dataset: str) -> list[str]:
    """Where the states and actions of a dataset lie far from what the policy was trained on, in sentences.

    Raises UserError where the dataset cannot be read as this robot's, or the policy has no statistics.
    """
    model = with_options(found.model, model)
    usage = use(found, model, robot)
    known = scale(found, usage).stats
    if not known:
        raise UserError(f"--dataset has nothing to be compared with: {found.name} does not normalise.")
    source = open_source(dataset, check_pictures=False)
    # Requests to a generic robot have the names of the columns that it was trained on, unless they were renamed.
    state = usage.state if set(usage.state) <= set(source.columns) else ()
    reads = RobotConfig(policy=usage.policy, state=state, adapt_to_pi=usage.adapt_to_pi, relative=usage.relative)
    numbers = Numbers(source, make_robot(reads, source, model.cameras), model.action_horizon).check()
    return compare_stats(numbers.statistics(choose_episodes(None, source)), known)


def load_params(found: Found, model: Pi0Config, parallel: ParallelConfig, average: bool) -> tuple[dict, Layout]:
    """The parameters, verified where their fingerprints are known, and how the devices share the work."""
    declared, file = declare(model), open_weights(found.weights)
    plan, mesh = place(model, parallel)
    places = plan.shardings("storage", mesh)
    leaves = load(file, model, declared.params, places)
    missing = sorted(set(declared.params) - set(leaves))
    if missing:
        raise UserError(f"{file.path} lacks {len(missing)} parameters of the model: {', '.join(missing[:5])}.")
    if average:
        kept = open_average(found.weights)
        leaves |= kept.read(
            {p: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[p]) for p, x in leaves.items() if p in kept.shapes}
        )
    return unflatten(leaves), ComputeLayout(mesh, plan, "storage", divide_batch=False)


def make_sample(model: Pi0Config, params: dict, layout: Layout, num_steps: int) -> Callable:
    """The model's own sampler, compiled once for each size of a batch."""
    graphdef = declare(model).graphdef

    @jax.jit
    def sample(params, batch, noise):
        return nnx.merge(graphdef, params).sample(batch, noise, num_steps, layout=layout)

    return lambda batch, noise: np.asarray(sample(params, batch, noise))


def open_policy(
    found: Found, model: ModelOptions, robot: RobotOptions, sampling: SamplingOptions, parallel: ParallelConfig, tokenizer: str | None
) -> Policy:  # fmt: skip
    """Everything that can be wrong is said before weights are read. Raises UserError."""
    in_prompt = model.state_in_prompt
    model = with_options(found.model, model)
    if in_prompt and model.variant == "pi0":
        raise UserError("--model.state-in-prompt is of pi0.5: pi0 has a token for its state.")
    with_states = model.variant == "pi05" and in_prompt is not False
    prompts = PromptEncoder(
        open_prompt_tokenizer(tokenizer or found.tokenizer, model.vocab_size),
        with_states,
        model.max_prompt_len,
        model.vocab_size,
    )
    usage = use(found, model, robot)
    needed = max(usage.robot().num_actions or 0, usage.state_dim or 0)
    if needed > model.action_dim:
        raise UserError(
            f"--robot.policy {usage.policy} has {needed} numbers, but the model's states and actions have {model.action_dim}."
        )
    scaling = scale(found, usage)
    params, layout = load_params(found, model, parallel, sampling.average)
    return Policy(
        model, usage, usage.robot(), scaling, prompts, make_sample(model, params, layout, sampling.num_steps), sampling.seed
    )
