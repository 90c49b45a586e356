import ast
import copy
import dataclasses
import inspect
import json
from dataclasses import replace

import pytest

from sharder import config, data_config, model_config, recipes
from sharder.config import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    ExpertConfig,
    LlamaConfig,
    LogConfig,
    MixturePart,
    MlpConfig,
    OptimizerConfig,
    ParallelConfig,
    Pi0Config,
    RobotConfig,
    RunConfig,
    SiglipConfig,
    TrainConfig,
    TransformerConfig,
    UserError,
    WeightsConfig,
    config_hash,
    from_dict,
    to_dict,
)

OTHER = RunConfig(
    model=TransformerConfig(dropout_rate=0.25, param_dtype="bfloat16"),
    data=DataConfig(path="x.txt", mixture=(MixturePart("a", 2.0, robot=RobotConfig(relative=(6, -1))), MixturePart("b"))),
    parallel=ParallelConfig(policy="fsdp", data=2, replicate=("embed/tokens", "head/out")),
    optimizer=OptimizerConfig(clip_norm=None),
    train=TrainConfig(microbatch_size=4, ema_decay=0.99),
    log=LogConfig(wandb_project="p"),
)

CASES = {name: recipes.load_recipe(name) for name in recipes.RECIPES} | {"other": OTHER}
cases = pytest.mark.parametrize("config", CASES.values(), ids=CASES)

REFUSED = [
    *((TransformerConfig, name, 0) for name in ("vocab_size", "max_seq_len", "embed_dim", "mlp_dim", "num_layers")),
    (TransformerConfig, "padded_vocab_size", 0),
    (TransformerConfig, "padded_vocab_size", 255),
    (TransformerConfig, "num_heads", 0),
    (TransformerConfig, "num_heads", 3),
    (TransformerConfig, "dropout_rate", -0.1),
    (TransformerConfig, "dropout_rate", 1.0),
    *((LlamaConfig, name, 0) for name in ("vocab_size", "max_seq_len", "embed_dim", "mlp_dim", "num_layers", "num_heads")),
    (LlamaConfig, "padded_vocab_size", 255),
    (LlamaConfig, "num_kv_heads", 0),
    (LlamaConfig, "num_kv_heads", 3),
    (LlamaConfig, "head_dim", 0),
    (LlamaConfig, "head_dim", 15),
    (LlamaConfig, "rope_theta", 1.0),
    (LlamaConfig, "rope_factor", 0.5),
    (LlamaConfig, "rope_low_freq_factor", 0.0),
    (LlamaConfig, "rope_high_freq_factor", 1.0),
    (LlamaConfig, "rope_original_seq_len", 0),
    (LlamaConfig, "norm_eps", 0.0),
    (LlamaConfig, "param_dtype", "float64"),
    *((MlpConfig, name, 0) for name in ("input_dim", "hidden_dim", "num_layers", "output_dim")),
    *((SiglipConfig, name, 0) for name in ("embed_dim", "num_layers", "mlp_dim", "patch_size")),
    (SiglipConfig, "num_heads", 7),
    *(
        (ExpertConfig, name, value)
        for name, value in (("embed_dim", 0), ("embed_dim", 7), ("mlp_dim", 0), ("lora_rank", -1), ("lora_alpha", 0.0))
    ),
    *(
        (Pi0Config, name, 0)
        for name in ("num_layers", "num_heads", "vocab_size", "max_prompt_len", "action_dim", "action_horizon")
    ),
    (WeightsConfig, "resize", "states=pad"),
    (WeightsConfig, "sizes", "mine"),
    (Pi0Config, "variant", "pi1"),
    (Pi0Config, "num_kv_heads", 3),
    (Pi0Config, "head_dim", 5),
    (Pi0Config, "cameras", ()),
    (Pi0Config, "image_size", (224, 225)),
    (Pi0Config, "loss_mask", "all"),
    (Pi0Config, "attention", "flash"),
    (Pi0Config, "freeze", "most"),
    (DataConfig, "seq_len", 0),
    (DataConfig, "validation_fraction", -0.1),
    (DataConfig, "validation_fraction", 1.0),
    (DataConfig, "num_examples", 0),
    (DataConfig, "num_examples", 2**62 + 1),
    (DataConfig, "shuffle_rounds", 6),
    (DataConfig, "shuffle_rounds", 9),
    (DataConfig, "shuffle_rounds", 1026),
    (DataConfig, "prefetch", 0),
    (DataConfig, "source", "pickle"),
    (DataConfig, "validation_split", "half"),
    (DataConfig, "workers", -1),
    (DataConfig, "cache_mb", -1),
    (MixturePart, "path", ""),
    (MixturePart, "weight", 0.0),
    (MixturePart, "source", "pickle"),
    (RobotConfig, "policy", "octopus"),
    (RobotConfig, "cameras", ("base_0_rgb",)),
    (RobotConfig, "relative", (6, 0)),
    (RobotConfig, "normalization", "l2"),
    (RobotConfig, "clip", 0.0),
    (RobotConfig, "least_range", -1.0),
    (RobotConfig, "episodes", " "),
    (ParallelConfig, "policy", "fsdpp"),
    (ParallelConfig, "reduction", "exactly"),
    (ParallelConfig, "virtual_workers", 6),
    (TransformerConfig, "param_dtype", "float64"),
    (TransformerConfig, "compute_dtype", "float16"),
    (MlpConfig, "remat", "all"),
    *((ParallelConfig, name, 0) for name in ("data", "fsdp", "tensor")),
    (OptimizerConfig, "name", "sgd"),
    (OptimizerConfig, "momentum", 1.0),
    (OptimizerConfig, "momentum", -0.1),
    (OptimizerConfig, "factored_min_dim", 0),
    (OptimizerConfig, "learning_rate", 0.0),
    (OptimizerConfig, "learning_rate", float("nan")),
    (OptimizerConfig, "warmup_steps", -1),
    (OptimizerConfig, "decay_steps", 20),
    (OptimizerConfig, "decay_steps", 2**31),
    (OptimizerConfig, "initial_lr_fraction", 1.1),
    (OptimizerConfig, "final_lr_fraction", -0.1),
    (OptimizerConfig, "final_lr_fraction", 1.1),
    (OptimizerConfig, "b1", -0.1),
    (OptimizerConfig, "b1", 1.0),
    (OptimizerConfig, "b2", -0.1),
    (OptimizerConfig, "b2", 1.0),
    (OptimizerConfig, "moments", "float16"),
    (OptimizerConfig, "eps", 0.0),
    (OptimizerConfig, "weight_decay", -0.1),
    (OptimizerConfig, "clip_norm", 0.0),
    (TrainConfig, "steps", 0),
    (TrainConfig, "steps", 2**31),
    (TrainConfig, "global_batch_size", 0),
    (TrainConfig, "microbatch_size", 0),
    (TrainConfig, "seed", -1),
    (TrainConfig, "seed", 2**32),
    (TrainConfig, "ema_decay", 0.0),
    (TrainConfig, "ema_decay", 1.0),
    (TrainConfig, "log_every", 0),
    (TrainConfig, "validate_every", -1),
    (TrainConfig, "validation_batches", 0),
    (TrainConfig, "max_minutes", 0.0),
    (CheckpointConfig, "every", -1),
    (CheckpointConfig, "keep_last", 0),
    (CheckpointConfig, "keep_every", 0),
    (CheckpointConfig, "snapshot_every", -1),
    (ClusterConfig, "cpu_devices", 0),
    (ClusterConfig, "cpu_devices", 1025),
    (ClusterConfig, "num_processes", 0),
    (ClusterConfig, "process_id", -1),
    (ClusterConfig, "bringup_timeout_s", 0),
    (ClusterConfig, "grace_s", 0.0),
]
SECTION = {
    MlpConfig: "model",
    LlamaConfig: "model",
    TransformerConfig: "model",
    Pi0Config: "model",
    SiglipConfig: "model.vision",
    ExpertConfig: "model.{backbone,action_expert}",
    MixturePart: "data.mixture",
} | {  # fmt: skip
    f.type: f.name for f in dataclasses.fields(RunConfig) if f.name != "model"
}


@cases
def test_dict_through_json_gives_the_config_back(config):
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("cls, name, value", REFUSED)
def test_a_value_out_of_range_is_refused_by_option_and_value(cls, name, value):
    with pytest.raises(UserError) as error:
        cls(**{name: value})
    option = f"--{SECTION[cls]}.{name}".replace("_", "-")
    assert str(error.value).startswith(f"{option} is {value!r}, but must be ")


def test_every_check_has_a_refused_value():
    checked = set()
    modules = (config, data_config, model_config)
    for call in (node for module in modules for node in ast.walk(ast.parse(inspect.getsource(module)))):
        if (
            isinstance(call, ast.Call)
            and getattr(call.func, "id", "") in ("require", "require_choice")
            and isinstance(call.args[1], ast.Constant)
        ):
            checked.add(call.args[1].value)
    assert len(checked) > 20 and checked <= {f"{SECTION[cls]}.{name}" for cls, name, _ in REFUSED}


@pytest.mark.parametrize(
    "make",
    [
        lambda: TransformerConfig(dropout_rate=0.0, padded_vocab_size=256),
        lambda: DataConfig(shuffle_rounds=1024, validation_fraction=0.0),
        lambda: OptimizerConfig(warmup_steps=0, decay_steps=1, b1=0.0, b2=0.0, weight_decay=0.0, final_lr_fraction=1.0),
        lambda: TrainConfig(seed=2**32 - 1, validate_every=0),
        lambda: CheckpointConfig(every=0),
    ],
)
def test_values_at_the_limits_are_accepted(make):
    make()


def test_what_a_value_depends_on_is_named():
    with pytest.raises(UserError, match="at least --model.vocab-size, which is 300"):
        TransformerConfig(vocab_size=300, padded_vocab_size=256)


def test_unknown_section_is_refused_by_name():
    with pytest.raises(UserError, match=r"unknown sections \['extra'\].*another version"):
        from_dict(to_dict(OTHER) | {"extra": {}})


@pytest.mark.parametrize("section", to_dict(OTHER))
def test_unknown_key_is_refused_by_name(section):
    tree = to_dict(OTHER)
    tree[section]["extra"] = 1
    with pytest.raises(UserError, match=rf"section {section}: .*'extra'.*another version"):
        from_dict(tree)


def test_a_value_out_of_range_in_a_file_is_refused():
    tree = to_dict(OTHER)
    tree["train"]["steps"] = 0
    with pytest.raises(UserError, match="--train.steps"):
        from_dict(tree)


@pytest.mark.parametrize("kind", [None, "DiffusionConfig"])
def test_a_model_of_another_version_is_refused(kind):
    tree = to_dict(OTHER)
    if kind is None:
        del tree["model"]["kind"]
    else:
        tree["model"]["kind"] = kind
    with pytest.raises(UserError):
        from_dict(tree)


def test_a_config_without_a_model_is_refused():
    tree = to_dict(OTHER)
    del tree["model"]
    with pytest.raises(UserError):
        from_dict(tree)


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OTHER.train.steps = 5


FIELDS = [
    (section.name, field.name)
    for section in dataclasses.fields(RunConfig)
    for field in dataclasses.fields(getattr(OTHER, section.name))
]


@pytest.mark.parametrize("section, field", FIELDS, ids=".".join)
def test_the_hash_changes_with_every_field(section, field):
    changed = copy.copy(getattr(OTHER, section))
    object.__setattr__(changed, field, "something else")  # past the checks
    assert config_hash(replace(OTHER, **{section: changed})) != config_hash(OTHER)


def test_the_hash_is_16_hex_digits_and_survives_a_file():
    found = config_hash(from_dict(json.loads(json.dumps(to_dict(OTHER)))))
    assert found == config_hash(OTHER) and len(found) == 16 and int(found, 16) >= 0


def test_recipes_differ():
    assert len({config_hash(config) for config in CASES.values()}) == len(CASES)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_recipes_say_what_they_are(name):
    assert recipes.find_recipe(name).__doc__


def test_a_recipe_comes_from_a_function_of_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\nfrom sharder.recipes.tiny_lm import tiny_lm\n"
        "def short():\n    c = tiny_lm()\n    return replace(c, train=replace(c.train, steps=7))\n"
    )
    assert recipes.load_recipe(f"{tmp_path}/mine.py:short").train.steps == 7


def test_a_recipe_file_may_hold_dataclasses_with_postponed_annotations(tmp_path):
    # dataclasses looks its module up by name.
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom sharder.recipes.mlp import mlp\n"
        "@dataclass\nclass Size:\n    hidden: int = 8\n"
        "def small():\n    return mlp()\n"
    )
    assert recipes.load_recipe(f"{tmp_path}/mine.py:small") == recipes.load_recipe("mlp")


@pytest.mark.parametrize("name", ["tiny", "tiny_lm:tiny_lm", "mine.txt:short", "mine.py"])
def test_an_unknown_recipe_is_answered_with_those_that_exist(name):
    with pytest.raises(UserError) as error:
        recipes.find_recipe(name)
    assert repr(name) in str(error.value) and all(known in str(error.value) for known in recipes.RECIPES)


def test_a_missing_recipe_file_is_named():
    with pytest.raises(UserError, match=r"recipe no/mine.py:short: there is no file no/mine.py"):
        recipes.find_recipe("no/mine.py:short")


@pytest.mark.parametrize(
    "source, message",
    [
        ("def other(): pass", "has no function 'short'"),
        ("short = 5", "has no function 'short'"),
        ("import no_such_module", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def short(", "cannot be imported: SyntaxError"),
        ("import sys; sys.exit(1)", "cannot be imported: SystemExit: 1"),
        ("def short(): raise SystemExit(3)", "failed: SystemExit: 3"),
        ("def short(): return 5", "returned int, but must return a sharder.config.RunConfig"),
    ],
    ids=["other function", "no function", "import", "syntax", "exit", "exit in the function", "other value"],
)
def test_a_recipe_file_that_does_not_serve_says_why(tmp_path, source, message):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(UserError, match="mine.py") as error:
        recipes.load_recipe(f"{tmp_path}/mine.py:short")
    assert message in str(error.value)
