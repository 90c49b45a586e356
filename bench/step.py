"""A training step of tiny_lm on one CPU device: its time, beside PyTorch's; its fingerprint; the way to the first step.

Prints one JSON line for each figure. Parts that are compared run in turns, each in a process of its own.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lines import OPTIONS, QUICK, Pieces, export_steps, gather_facts, print_figure, resolve, run, run_part, serve_part

WARM_UP = 3


def ours(config: dict, num_steps: int, export: str | None) -> dict:
    """Seconds of each step and the losses; `export` also writes what PyTorch needs in order to take the same steps."""
    from sharder.data.loader import open_loader

    pieces = Pieces(config)
    if export:
        export_steps(pieces, export, num_steps)
    loader = open_loader(pieces.dataset, pieces.order, pieces.layout, 0, config["data"]["prefetch"])
    records = pieces.take_steps(loader, num_steps)
    loader.close()
    return {"seconds": [r["step_time_s"] for r in records], "losses": [r["loss"] for r in records]}


def pytorch(config: dict, num_steps: int, saved: str) -> dict:
    """The same steps, eagerly, from the same parameters, on batches that lie in memory already."""
    import numpy as np
    import torch

    torch.set_num_threads(os.cpu_count())
    arrays, given = np.load(saved), config["optimizer"]
    p = {name[7:]: torch.tensor(arrays[name]).requires_grad_() for name in arrays.files if name.startswith("params/")}
    groups = [{"params": [], "weight_decay": given["weight_decay"]}, {"params": [], "weight_decay": 0.0}]
    for name, x in p.items():
        groups[x.ndim < 2 or name == "embed/positions"]["params"].append(x)
    # Fused is the fastest of the eager implementations.
    adamw = torch.optim.AdamW(groups, betas=(given["b1"], given["b2"]), eps=given["eps"], fused=True)
    inputs, targets = torch.from_numpy(arrays["inputs"]), torch.from_numpy(arrays["targets"])
    seconds, losses = [], []
    for x_BT, y_BT, rate in zip(inputs, targets, arrays["rates"].tolist()):
        started = time.perf_counter()
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.zero_grad()
        loss = torch_loss(p, config["model"], x_BT, y_BT, torch.nn.functional)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(p.values(), given["clip_norm"])
        adamw.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds, "losses": losses}


def torch_qkv(p: dict, x_BTD, block: str, F):
    """Queries, keys and values by one product, as PyTorch's own layer does (nn.MultiheadAttention)."""
    weight, bias = (p[f"{block}qkv{end}"] for end in ("", "_bias"))
    return F.linear(x_BTD, weight, bias).chunk(3, dim=-1)


def torch_loss(p: dict, model: dict, x_BT, y_BT, F):
    """Mean cross-entropy of the pre-layer-norm transformer with learned positions, from PyTorch's own layers."""
    B, T = x_BT.shape
    N, D = model["num_heads"], model["embed_dim"]

    def norm(x_BTD, at):
        return F.layer_norm(x_BTD, (D,), p[f"{at}_scale"], p[f"{at}_bias"], eps=1e-5)

    def linear(x_BTD, at):
        return F.linear(x_BTD, p[at], p[f"{at}_bias"])

    x_BTD = F.embedding(x_BT, p["embed/tokens"]) + p["embed/positions"][:T]
    for layer in range(model["num_layers"]):
        block = f"blocks/{layer}"
        q, k, v = (z.view(B, T, N, D // N).transpose(1, 2) for z in torch_qkv(p, norm(x_BTD, block + "norm1"), block, F))
        y_BTD = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
        x_BTD = x_BTD + linear(y_BTD, block + "attn_out")
        h_BTF = F.gelu(linear(norm(x_BTD, block + "norm2"), block + "mlp_in"), approximate="tanh")
        x_BTD = x_BTD + linear(h_BTF, block + "mlp_out")
    logits = F.linear(norm(x_BTD, "head/norm"), p["head/out"])
    return F.cross_entropy(logits.view(B * T, -1), y_BT.view(-1))


def fingerprint(config: dict, num_steps: int) -> dict:
    """Seconds of the step with and without the digests and of the digests alone, in turns, each waited for."""
    import jax
    import jax.numpy as jnp

    from sharder.train import step
    from sharder.train.state import by_path

    pieces, digests = Pieces(config), step.digests
    batch, programs = pieces.layout.to_devices(pieces.read(0)), {"with": pieces.stepper.train_step}
    # A program that was kept is found by what it is made from, and nobody changes the source while it runs but this.
    jax.config.update("jax_compilation_cache_dir", None)
    step.digests = lambda leaves: jnp.zeros((len(leaves), 2), jnp.uint32)
    programs |= {"without": pieces.compile(), "alone": jax.jit(lambda state: digests(by_path(state)))}
    seconds = {name: [] for name in programs}
    for _ in range(num_steps):
        for name, program in programs.items():
            given = (pieces.state,) if name == "alone" else pieces.stepper.arguments(pieces.state, batch, False)
            started = time.perf_counter()
            result = jax.block_until_ready(program(*given))
            seconds[name].append(time.perf_counter() - started)
            if name != "alone":
                pieces.state, metrics = result
                assert metrics["digests"].any() == (name == "with"), f"the step {name} digests is not what it should be"
    return {name: statistics.median(values[WARM_UP:]) for name, values in seconds.items()}


PARTS = {"ours": ours, "pytorch": pytorch, "fingerprint": fingerprint}


def pool(parts: list[dict]) -> tuple[float, str]:
    """Median of the steps of all parts after their warm-up, and how it came about."""
    warm = [part["seconds"][WARM_UP:] for part in parts]
    each = ", ".join(f"{statistics.median(seconds):.4g}" for seconds in warm)
    how = f"median of {len(warm[0])} steps after {WARM_UP} in each of {len(warm)} processes, which alone have {each} s"
    return statistics.median(itertools.chain(*warm)), how


def measure_step(show: Callable, config: dict, torch_python: str | None, folder: Path, rounds: int, num_steps: int) -> None:
    saved = str(folder / "steps.npz")
    num_tokens = config["train"]["global_batch_size"] * config["data"]["seq_len"]
    arguments, mine, theirs = {"config": config, "num_steps": WARM_UP + num_steps}, [], []
    for _ in range(rounds):
        mine.append(run_part(__file__, "ours", export=saved if torch_python and not theirs else None, **arguments))
        if torch_python:
            theirs.append(run_part(__file__, "pytorch", torch_python, saved=saved, **arguments))
    step_s, how = pool(mine)
    show("step_s", step_s, "s", f"tiny_lm, 1 CPU device, fingerprint, metrics and loader included; {how}")
    show("tokens_per_s", num_tokens / step_s, "tokens/s", f"{num_tokens} tokens in step_s")
    if not torch_python:
        show("torch", None, None, "PyTorch is not installed: nothing to compare with (see --torch-python)")
        return
    torch_s, how = pool(theirs)
    apart = max(abs(a - b) for a, b in zip(mine[0]["losses"], theirs[0]["losses"], strict=True))
    if apart > 1e-3:  # 1.4e-5 after 23 steps; 0.3 with q, k and v mixed up
        raise RuntimeError(f"PyTorch's losses are up to {apart} nats away from ours: it trains another model or on other data")
    show("torch_step_s", torch_s, "s", f"PyTorch on CPU, eager, fused AdamW, all cores, in turns with ours; {how}")
    show("torch_tokens_per_s", num_tokens / torch_s, "tokens/s", f"{num_tokens} tokens in torch_step_s")
    show("ratio_to_torch", torch_s / step_s, "x", "tokens_per_s / torch_tokens_per_s; aim 1.2")
    show("loss_apart", apart, "nats", "largest difference of our loss and PyTorch's at a step, from equal parameters")


def measure_fingerprint(show: Callable, config: dict, num_steps: int) -> None:
    seconds = run_part(__file__, "fingerprint", config=config, num_steps=WARM_UP + num_steps)
    share, growth = seconds["alone"] / seconds["with"], seconds["with"] / seconds["without"] - 1
    how = f"median of {num_steps}, in turns with the other two in one process, each waited for"
    show("fingerprint_alone_s", seconds["alone"], "s", f"digests of the whole state as a program of their own; {how}")
    show("fingerprint_share", 100 * share, "%", "fingerprint_alone_s / step with fingerprint")
    show("step_without_fingerprint_s", seconds["without"], "s", f"step whose digests are zeros; {how}")
    show("fingerprint_growth", 100 * growth, "%", "growth of the step from without to with fingerprint")


def measure_start(show: Callable, options: tuple[str, ...], folder: Path, rounds: int) -> None:
    """Real commands, in pairs: with an empty folder of compiled programs, then with what the first left in it."""
    seconds, peaks = {"cold": [], "warm": []}, {"cold": [], "warm": []}
    for number, temperature in itertools.product(range(rounds), ("cold", "warm")):
        run_dir, cache = folder / f"{temperature}-{number}", folder / f"compiled-{number}"
        command = [sys.executable, "-m", "sharder", "train", "tiny_lm", "--run-dir", str(run_dir), "--train.steps", "1"]
        finished = run([*command, *options, "--cluster.compile-cache", str(cache)])
        events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
        first = next(event["time_s"] for event in events if event["kind"] == "first_step")
        seconds[temperature].append(first - finished.started_s)
        peaks[temperature].append(finished.peak_bytes)
    for temperature, meaning in (("cold", "an empty compile cache"), ("warm", "a warm compile cache, aim 1.5 s")):
        each = ", ".join(f"{value:.2f}" for value in seconds[temperature])
        how = f"`sharder train tiny_lm`, process start to first step finished, {meaning}; median of {each} s"
        show(f"first_step_{temperature}_s", statistics.median(seconds[temperature]), "s", how)
        how = f"largest resident set of that command (getrusage), from start to final save, median of {rounds}"
        show(f"peak_memory_{temperature}", statistics.median(peaks[temperature]), "bytes", how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model and few steps, to see that everything works")
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter that has PyTorch, if not this one")
    given = parser.parse_args()
    options = OPTIONS + (QUICK if given.quick else ())
    rounds, num_steps, starts = (1, 3, 1) if given.quick else (3, 20, 3)
    with tempfile.TemporaryDirectory(prefix="bench-step-") as name:
        folder = Path(name)
        config = resolve((*options, "--cluster.compile-cache", str(folder / "compiled")))
        facts = gather_facts(config, given.torch_python)
        show = partial(print_figure, "step", facts=facts)
        measure_step(show, config, given.torch_python if facts["torch"] else None, folder, rounds, num_steps)
        measure_fingerprint(show, config, num_steps)
        measure_start(show, options, folder, starts)


if __name__ == "__main__":
    serve_part(PARTS)
    main()
