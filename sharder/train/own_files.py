"""What a run keeps of the files that it was started with, so that it works from any folder and after they have moved."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from sharder.config import RunConfig, UserError
from sharder.data.tokenize import KINDS, open_tokenizer
from sharder.facts import called


def kept_tokenizer(run_dir: Path) -> Path | None:
    """The copy of the tokenizer in a run, if it has one."""
    return next((path for suffix in KINDS if (path := run_dir / f"tokenizer{suffix}").is_file()), None)


def keep_tokenizer(run_dir: Path, config: RunConfig) -> None:
    """Copies the tokenizer into the run, with the file beside it that may name the end of a document.

    Raises UserError where there is none: data without text has not opened it.
    """
    if config.data.tokenizer is None or kept_tokenizer(run_dir) is not None:
        return
    source = Path(config.data.tokenizer).expanduser()
    beside = source.parent / "tokenizer_config.json"
    copies = [(beside, run_dir / beside.name)] if source.suffix == ".json" and beside.is_file() else []
    # The tokenizer comes last: where it is, all is.
    for original, copy in (*copies, (source, run_dir / f"tokenizer{source.suffix}")):
        temporary = copy.with_name(copy.name + ".tmp")
        try:
            shutil.copyfile(original, temporary)
        except OSError as error:
            raise UserError(
                f"--data.tokenizer {original} cannot be copied into the run {called(run_dir)}: {error.strerror or error}."
            ) from error
        temporary.rename(copy)


def with_kept_tokenizer(run_dir: Path, config: RunConfig) -> RunConfig:
    """The configuration with the run's own copy in place of the path that was given.

    Raises UserError where the file at that path is another tokenizer than the run's.
    """
    copy = kept_tokenizer(run_dir)
    if copy is None or config.data.tokenizer is None:
        return config
    given = Path(config.data.tokenizer).expanduser()
    if given.is_file() and open_tokenizer(str(given)).fingerprint != open_tokenizer(str(copy)).fingerprint:
        raise UserError(
            f"--data.tokenizer {given} is not the tokenizer that {called(run_dir)} was started with, which is kept as {copy}: give that, or"
            " choose another --run-dir."
        )
    return replace(config, data=replace(config.data, tokenizer=str(copy)))


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The configuration with paths that hold in any folder."""

    def absolute(path: str | None) -> str | None:
        return path if path is None or "://" in path else os.path.abspath(os.path.expanduser(path))

    data = replace(
        config.data,
        path=absolute(config.data.path),
        tokenizer=absolute(config.data.tokenizer),
        token_cache=absolute(config.data.token_cache),
    )
    cache = config.cluster.compile_cache
    return replace(
        config, data=data, cluster=replace(config.cluster, compile_cache=cache if cache == "off" else absolute(cache))
    )
