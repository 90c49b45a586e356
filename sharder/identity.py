"""Which settings decide the numbers of a run, and which may change between its attempts or between runs that must agree."""

from sharder.config import RunConfig, to_dict

FREE_SECTIONS = {"checkpoint", "cluster", "log", "weights"}
FREE_FIELDS = {
    "parallel.policy", "parallel.data", "parallel.fsdp", "parallel.replicate", "data.path", "data.token_cache", "data.prefetch", "data.workers", "data.cache_mb", "train.steps", "train.log_every",
    "train.validate_every", "train.validation_batches", "train.max_minutes", "train.on_nonfinite",
}  # fmt: skip
FREE_IN_FAST_MODE = {
    "parallel.tensor", "parallel.virtual_workers", "parallel.exact_memory", "parallel.allow_nondeterministic", "train.microbatch_size",
    "model.remat",
}  # fmt: skip
"""They change the order of additions, which only exact mode fixes."""
OF_A_PROCESS = {"data.path", "data.tokenizer", "data.token_cache", "data.prefetch", "data.workers", "data.cache_mb"}
"""What processes of one run may have otherwise, beside the sections cluster and log: paths and resources of their machines."""
TOKENIZER = "data.tokenizer"
"""Its path may change, whether there is one may not: the content is compared where it is read (train/own_files.py) and stands in
the fingerprint of the data."""


def _flat(config: RunConfig) -> dict[str, object]:
    return {f"{s}.{k}": v for s, section in to_dict(config).items() for k, v in section.items()}


def shared_settings(config: RunConfig) -> dict[str, object]:
    """Every setting that must be the same in all processes of a run, by option."""
    of_a_section = ("cluster.", "log.")
    return {_option(k): v for k, v in _flat(config).items() if k not in OF_A_PROCESS and not k.startswith(of_a_section)}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def differences(was: RunConfig, now: RunConfig) -> list[tuple[str, object, object]]:
    """(option, value before, value now) of every setting that decides the numbers and is not what it was."""
    before, after = _flat(was), _flat(now)
    free = FREE_FIELDS if "exact" in (was.parallel.reduction, now.parallel.reduction) else FREE_FIELDS | FREE_IN_FAST_MODE
    return [
        (_option(name), before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
        and name.split(".")[0] not in FREE_SECTIONS
        and name not in free
        and not (name == TOKENIZER and before.get(name) and after.get(name))
    ]
