"""`sharder serve RUN`: parses, opens, and answers robots until it is stopped."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import tyro

from sharder.config import ClusterConfig, ParallelConfig, UserError
from sharder.options import parse
from sharder.serve.options import ModelOptions, RobotOptions, SamplingOptions, ServerOptions

USAGE = "sharder serve RUN [--port 8000]"
LOCAL = ("127.0.0.1", "::1", "localhost")


def run(arguments: list[str]) -> int:
    """Answer robots over a websocket with a trained policy (openpi's protocol)."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        raise UserError(f"RUN is missing. Usage: {USAGE}")

    def command(
        run: tyro.conf.Positional[Path],
        step: int | None = None,
        assets: Path | None = None,
        dataset: str | None = None,
        server: Annotated[ServerOptions, tyro.conf.arg(name="")] = ServerOptions(),
        sampling: Annotated[SamplingOptions, tyro.conf.arg(name="")] = SamplingOptions(),
        model: ModelOptions = ModelOptions(),
        robot: RobotOptions = RobotOptions(),
        tokenizer: Annotated[str | None, tyro.conf.arg(name="data.tokenizer")] = None,
        # One device, however the run was trained.
        parallel: ParallelConfig = ParallelConfig(policy="dp"),
        cluster: ClusterConfig = ClusterConfig(),
    ) -> tuple:
        """What is served, and how.

        Args:
            run: A run, one of its checkpoints, imported weights, or a checkpoint of openpi.
            step: Checkpoint of a run; unset: the latest.
            assets: Folder with norm_stats.json (and robot.json); unset: that of the run or checkpoint.
            dataset: Recordings of the robot that will ask: how far their states and actions lie from what the policy knows is said first.
            tokenizer: tokenizer.json or .model of the prompts; unset: the run's own, else as in training.
            parallel: How devices share the work; unset degrees are 1.
        """
        return (run, step, assets, dataset), (server, sampling), (model, robot, tokenizer), (parallel, cluster)

    where, (server, sampling), asked, placed = parse(command, args=arguments, prog="sharder serve", description=run.__doc__)
    try:
        import msgpack  # noqa: F401
        import websockets  # noqa: F401
    except ImportError as error:
        raise UserError(f"{error.name} is not installed, which the server needs: install sharder-jax[serve].") from None
    return serve(where, server, sampling, asked, placed)


def serve(where: tuple, options: ServerOptions, sampling: SamplingOptions, asked: tuple, placed: tuple) -> int:
    """Listens only when everything is compiled; returns when it is stopped by a signal."""
    metadata, key = read_metadata(options.metadata), read_key(options.api_key_file)
    from sharder.serve.server import PolicyServer, bind

    sock = bind(options.host, options.port)
    (path, step, assets, dataset), (model, robot, tokenizer), (parallel, cluster_config) = where, asked, placed
    import jax

    from sharder import cluster
    from sharder.serve.opening import differences, find, open_policy

    cluster.initialize(cluster_config)
    if jax.process_count() > 1:
        raise UserError(f"there are {jax.process_count()} processes, but a server is one: start it alone.")
    found = find(path, step, assets)
    if dataset is not None:
        far = differences(found, model, robot, dataset)
        for line in far or [f"{dataset}: states and actions lie where {found.name} knows them"]:
            print(f"note: {line}", file=sys.stderr, flush=True)
    policy = open_policy(found, model, robot, sampling, parallel, tokenizer)
    server = PolicyServer(policy, options, policy.describe() | {"served": found.name} | metadata, key)
    print(f"{found.name}: {json.dumps(policy.describe())}", flush=True)
    server.warm_up()
    address = f"{f'[{options.host}]' if ':' in options.host else options.host}:{sock.getsockname()[1]}"
    if options.host not in LOCAL and key is None:
        print(
            f"note: anyone who reaches {address} may ask this policy; --api-key-file keeps others out",
            file=sys.stderr,
            flush=True,
        )

    async def until_stopped() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await server.run(sock, stop, lambda: print(f"serving at ws://{address}", flush=True))

    asyncio.run(until_stopped())
    return 0


def read_metadata(path: str | None) -> dict:
    """Raises UserError where the file is no JSON object."""
    if path is None:
        return {}
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--metadata {path} cannot be read: {error}.") from None
    if not isinstance(found, dict):
        raise UserError(f"--metadata {path} holds a {type(found).__name__}, but must be a JSON object.")
    return found


def read_key(path: str | None) -> str | None:
    """Raises UserError where the file holds none."""
    if path is None:
        return None
    try:
        key = Path(path).read_text().split("\n")[0].strip()
    except (OSError, ValueError) as error:
        raise UserError(f"--api-key-file {path} cannot be read: {error}.") from None
    if not key or not key.isascii():
        raise UserError(f"--api-key-file {path} must hold a key of ASCII characters in its first line.")
    return key
