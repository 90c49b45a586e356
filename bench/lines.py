"""What the benchmarks share: parts in processes of their own, the pieces of a run, and figures as JSON lines.

Imports nothing but the standard library at first: PyTorch's interpreter need not have sharder, and a child's peak
memory counts what its parent held when it was started.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# One CPU device, whatever else the machine has, and nothing between the steps.
OPTIONS = (
    "--cluster.cpu-devices", "1", "--train.validate-every", "0", "--train.validation-batches", "1", "--checkpoint.every", "0",
)  # fmt: skip
QUICK = (
    "--model.embed-dim", "32", "--model.mlp-dim", "64", "--model.num-layers", "2", "--model.max-seq-len", "32",
    "--data.seq-len", "32", "--train.global-batch-size", "8",
)  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """A process that has ended well."""

    stdout: str
    started_s: float
    """Seconds since the epoch, just before the process was made."""
    peak_bytes: int


def run(command: list[str]) -> Finished:
    """Runs a command to its end. Raises RuntimeError with its last words if it fails."""
    # No setting for JAX, XLA or Python (whether it keeps what it compiled, for one) leaks in from outside.
    settings = ("JAX_", "XLA_", "PYTHON")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(settings)} | {"JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryFile("w+") as errors:
        started_s = time.time()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{errors.read()[-2000:]}")
    # getrusage counts in KiB, on macOS in bytes.
    return Finished(output, started_s, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def run_part(script: str, name: str, python: str = sys.executable, **arguments) -> dict:
    """What a part of a benchmark, `PARTS[name]` of the script, returns from a fresh process."""
    return json.loads(run([python, script, "--part", name, json.dumps(arguments)]).stdout.splitlines()[-1])


def serve_part(parts: dict) -> None:
    """The other end of `run_part`: where this process was started for a part, does it and exits."""
    if sys.argv[1:2] == ["--part"]:
        print(json.dumps(parts[sys.argv[2]](**json.loads(sys.argv[3]))))
        sys.exit()


def resolve(options: tuple[str, ...], recipe: str = "tiny_lm") -> dict:
    """The configuration of a recipe with these options, as the command line resolves it."""
    return json.loads(run([sys.executable, "-m", "sharder", "train", recipe, *options, "--print-config"]).stdout)


def gather_facts(config: dict, torch_python: str = sys.executable) -> dict:
    """What figures depend on, to be gathered before the benchmark itself makes the machine busy."""
    from sharder.config import from_dict
    from sharder.data.open import open_datasets

    load, model = round(os.getloadavg()[0], 2), config["model"]
    if load > 0.5:
        print(f"warning: the load of this machine is {load} already: times will be too long", file=sys.stderr)
    asked = subprocess.run([torch_python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    return {
        "model": f"{model['num_layers']} layers of {model['embed_dim']}",
        "torch": asked.stdout.strip() if asked.returncode == 0 else None,
        "load_before": load,
        "data_sha256": open_datasets(from_dict(config))[0].fingerprint,
    }


def print_figure(bench: str, figure: str, value: float | None, unit: str | None, how: str, facts: dict | None = None) -> None:
    """One JSON line, with the versions and what else the figure depends on."""
    value = float(f"{value:.6g}") if isinstance(value, float) else value
    machine = {"python": sys.version.split()[0], "jax": metadata.version("jax"), "cpu_count": os.cpu_count()}
    line = {"bench": bench, "figure": figure, "value": value, "unit": unit, "how": how}
    print(json.dumps(line | machine | (facts or {})), flush=True)


class Records(list):
    """A writer that keeps the records of the steps."""

    write = list.append


class Pieces:
    """A run as `sharder.train.loop` puts it together, its step compiled, but in the hands of a benchmark."""

    def __init__(self, tree: dict):
        from sharder import cluster
        from sharder.config import from_dict
        from sharder.data.open import open_datasets, open_order
        from sharder.events import EventLog
        from sharder.train.attempt import Attempt
        from sharder.train.opening import step_facts
        from sharder.train.setup import prepare
        from sharder.train.state import create_state
        from sharder.train.stepping import Stepper

        config = from_dict(tree)
        cluster.initialize(config.cluster)
        self.setup = prepare(config)
        self.layout = self.setup.train_batch
        self.dataset, _ = open_datasets(config)
        self.order = open_order(config, self.dataset)
        self.state = create_state(config, self.setup.declared, self.setup.state_shardings)
        self.step, self.records = 0, Records()
        facts = step_facts(self.setup, self.order, Attempt(Path(), 1, None))
        self.stepper = Stepper(self.setup, facts, [self.records], EventLog(None, 1))
        self.compile()

    def compile(self):
        """Compiles the step anew, and returns it."""
        from sharder.train.opening import compile_ahead

        compile_ahead(self.stepper, self.state, self.layout.abstract(self.read(0)), self.stepper.events)
        return self.stepper.train_step

    def read(self, step: int) -> dict:
        """The examples of a step, in host memory."""
        from sharder.data.loader import read_step

        return read_step(self.dataset, self.order, self.layout, step)

    def take_steps(self, loader, num_steps: int) -> list[dict]:
        """The records of the next steps, taken as the loop takes them."""
        self.records.clear()
        self.stepper.resume_clock()
        for _ in range(num_steps):
            batch = next(loader)
            self.step += 1
            self.state = self.stepper.dispatch(self.state, batch, self.step, loader.wait_s, False)
        self.stepper.write_pending()
        return list(self.records)


def export_steps(pieces: Pieces, path: str, num_steps: int) -> None:
    """Writes what PyTorch needs to take the first steps: parameters by path, batches (steps, B, T), learning rates (steps,)."""
    import jax
    import numpy as np

    from sharder.models.build import flatten
    from sharder.train.optimizer import schedule

    arrays = {}
    for name, x in flatten(jax.device_get(pieces.state.params)).items():
        *parents, leaf = name.split("/")
        for layer, x in enumerate(x) if parents == ["blocks"] else [("", x)]:
            arrays["/".join(["params", *parents, f"{layer}{leaf}"])] = np.ascontiguousarray(as_torch(leaf, x))
    # PyTorch's own layers form queries, keys and values by one product.
    for name in [name for name in arrays if name.endswith(("q", "q_bias")) and name.startswith("params/blocks/")]:
        base, end = name.removesuffix("_bias")[:-1], "_bias" * name.endswith("_bias")
        arrays[f"{base}qkv{end}"] = np.concatenate([arrays.pop(f"{base}{letter}{end}") for letter in "qkv"])
    batches = [pieces.read(step) for step in range(num_steps)]
    rate = schedule(pieces.setup.config.optimizer)
    arrays |= {name: np.stack([batch[name] for batch in batches]).astype(np.int64) for name in ("inputs", "targets")}
    np.savez(path, rates=np.array([rate(step) for step in range(num_steps)]), **arrays)


def as_torch(leaf: str, x):
    """A parameter of ours as PyTorch's layers take it: matrices (out, in)."""
    if leaf.endswith(("bias", "scale")):
        return x.reshape(-1)
    if leaf in ("tokens", "positions"):
        return x
    return (x.reshape(-1, x.shape[-1]) if leaf == "attn_out" else x.reshape(x.shape[0], -1)).T
