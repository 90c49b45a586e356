"""What `sharder profile` found, as JSON for programs and as tables for people; both ways to be wrong beside the right one."""

from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from sharder.config import RunConfig
from sharder.instrument.flops import count_step, step_flops_6nd, tokens_of_example, utilisation
from sharder.instrument.peak import matrix_ceiling, memory_ceiling
from sharder.instrument.products import products_of
from sharder.instrument.profile import ADVICE, Programs, Shares, Timing, direction_shares, verdict
from sharder.instrument.words import sentences
from sharder.instrument.work import work_of

NUM_SCOPES = 12
"""Rows of the table of scopes."""


@dataclass(frozen=True)
class Measured:
    recipe: str
    config: dict
    versions: dict[str, str]
    platform: str
    device_kind: str
    num_devices: int
    num_processes: int
    num_params: int
    run: RunConfig
    timing: Timing
    shares: Shares
    programs: Programs
    memory: dict
    collective_s: list[float]
    """By process."""
    ablation: dict | None


def to_json(m: Measured) -> dict:
    """Everything found, in plain values; shares of `shares` and of `kinds` sum to 1."""
    flops, peak, bandwidth = count_step(m.run), matrix_ceiling(m.run.model.compute_dtype), memory_ceiling()
    tokens = m.run.train.global_batch_size * tokens_of_example(m.run.model, m.run.data.seq_len)
    by_convention, step_time_s = step_flops_6nd(m.num_params, tokens), m.timing.step_time_s

    def used(work: float | None, seconds: float = step_time_s) -> float | None:
        return None if work is None else utilisation(work, seconds, peak.value, m.num_devices)

    bound, bound_share = verdict(m.shares.kinds)
    standings = work_of(m.programs, m.shares.categories)
    return {
        "recipe": m.recipe, "versions": m.versions, "num_processes": m.num_processes,
        "devices": {"kind": m.device_kind, "platform": m.platform, "count": m.num_devices},
        "global_batch_size": m.run.train.global_batch_size, "tokens_per_step": tokens, "num_params": m.num_params,
        "step_time_s": step_time_s, "steps_s": m.timing.steps_s, "data_wait_s": m.timing.data_wait_s,
        "coverage": m.shares.least_coverage, "coverage_by_device": m.shares.coverage,
        "shares": m.shares.categories, "unattributed": m.shares.categories.get("unattributed", 0.0),
        "kinds": m.shares.kinds, "directions": direction_shares(m.shares),
        "verdict": {"bound": bound, "share": bound_share, "advice": ADVICE[bound]},
        "scopes": scopes_of(m.shares),
        "flops": flops.model, "flops_forward": flops.forward, "flops_hardware": flops.hardware, "flops_6nd": by_convention,
        "flops_forward_visible": flops.forward_visible, "flops_compiled": m.programs.flops,
        "flops_by_module": modules_of(m, tokens),
        "mfu": used(by_convention), "mfu_exact": used(flops.model), "hfu": used(flops.hardware),
        "peak_flops": peak.value, "peak_source": peak.source,
        "memory_bytes_per_s": bandwidth.value, "memory_source": bandwidth.source,
        "tflops_per_s": flops.model / step_time_s / 1e12,
        "naive": {
            "step_time_traced_s": m.shares.traced_step_s, "step_time_summed_s": m.shares.traced_sum_s,
            "shares_of_calls": m.shares.calls, "coverage_of_calls": m.shares.coverage_of_calls,
            "flops_counted_by_the_compiler": m.programs.counted_flops,
            "mfu_of_summed_time": used(flops.model, m.shares.traced_sum_s), "mfu_of_counted_flops": used(m.programs.counted_flops),
        },
        "roofline": {
            name: asdict(s) | {"intensity": s.intensity(), "achieved_flops": s.achieved(step_time_s, m.num_devices),
                               "attainable_flops": s.attainable(peak.value, bandwidth.value)}
            for name, s in standings.items()
        },
        "collectives": {"seconds_by_process": m.collective_s, "exposed_share": m.shares.exposed_share, "waiting_s": [s - min(m.collective_s) for s in m.collective_s]},
        "traffic": traffic_of(m), "memory": m.memory, "ablation": m.ablation, "config": m.config,
    }  # fmt: skip


def modules_of(m: Measured, tokens: int) -> list[dict]:
    """Per part of the model its exact FLOPs of a step beside what 6 N D charges for it."""
    batch, rows = m.run.train.global_batch_size, []
    products = products_of(m.run.model, m.run.data.seq_len)
    for p in products:
        rows.append({
            "module": p.module, "num_params": p.num_params, "num_tokens": batch * p.num_tokens, "forward": batch * p.forward,
            "backward": batch * p.backward, "recomputed": batch * p.recomputed, "flops_6nd": step_flops_6nd(p.num_params, tokens),
        })  # fmt: skip
    rest = m.num_params - sum(p.num_params for p in products)
    return [*rows, {"module": "biases, norms, positions", "num_params": rest, "num_tokens": 0, "forward": 0.0, "backward": 0.0, "recomputed": 0.0,
                    "flops_6nd": step_flops_6nd(rest, tokens)}]  # fmt: skip


def traffic_of(m: Measured) -> list[dict]:
    """Collectives of a step, per device, the most bytes first."""
    found = []
    for program, _, _, traffic in m.programs.each():
        for c in traffic.collectives:
            times = c.executions * program.runs // m.num_devices
            found.append({"kind": c.kind, "axes": "+".join(c.axes), "executions": times, "bytes_each": c.bytes_each,
                          "payload_bytes": times * c.bytes_each, "received_bytes": times * c.received_bytes / c.executions,
                          "program": program.name, "scope": c.scope})  # fmt: skip
    return sorted(found, key=lambda c: -c["payload_bytes"])


def scopes_of(shares: Shares) -> list[dict]:
    """Shares by source scope, the largest first."""
    found: dict[tuple[str, str], float] = {}
    for part, share in shares.parts.items():
        key = part.category, part.scope
        found[key] = found.get(key, 0.0) + share
    return [{"category": c, "scope": s, "share": x} for (c, s), x in sorted(found.items(), key=lambda kv: -kv[1])]


def describe(m: Measured, console: Console, run_dir: Path | None) -> None:
    found = to_json(m)
    calls = found["naive"]["shares_of_calls"]
    console.print(_shares_table("time of a step by part", found["shares"], found["step_time_s"], calls))
    console.print(_shares_table("the same by kind of work", found["kinds"], found["step_time_s"]))
    for line in sentences(found):
        console.print(line, highlight=False, markup=False)
    console.print(_memory_line(found["memory"]), highlight=False, markup=False)
    console.print(_scopes_table(found))
    console.print(_flops_table(found))
    console.print(_roofline_table(found))
    if run_dir is not None:
        console.print(
            f"{run_dir}/profile: profile.json, and the trace for TensorBoard or xprof; sharder report {run_dir} draws it",
            highlight=False,
            soft_wrap=True,
        )


def _shares_table(title: str, shares: dict[str, float], step_time_s: float, calls: dict[str, float] | None = None) -> Table:
    """`calls`: the shares where operations end with their calls, as a column of their own where that is not the same."""
    table, apart = Table(title=title, box=box.SIMPLE), calls not in (None, shares)
    for heading, justify in (("", "left"), ("share", "right"), ("ms", "right"), ("", "left")):
        table.add_column(heading, justify=justify)
    if apart:
        table.add_column("calls alone", justify="right")
    for name, share in shares.items():
        naive = [f"{calls.get(name, 0.0):.1%}"] if apart else []
        table.add_row(name, f"{share:.1%}", f"{share * step_time_s * 1e3:.1f}", "#" * round(40 * share), *naive)
    return table


def _memory_line(memory: dict) -> str:
    mib = lambda x, missing: missing if x is None else f"{x / 2**20:,.1f} MiB"  # noqa: E731
    predicted = memory["predicted"]
    parts = ", ".join(f"{name} {x / 2**20:,.1f}" for name, x in predicted.items() if x and name != "total")
    return (
        f"memory of a device at its peak: {mib(predicted['total'], '')} predicted ({parts}); compiled"
        f" {mib(memory['compiled'], 'unknown, since exact mode is several programs')}; measured"
        f" {mib(memory['measured'], 'nothing, since this backend does not count')}"
    )


def _scopes_table(found: dict) -> Table:
    table = Table(title=f"the {NUM_SCOPES} largest source scopes", box=box.SIMPLE)
    for heading, justify in (("scope", "left"), ("part", "left"), ("share", "right")):
        table.add_column(heading, justify=justify)
    for row in found["scopes"][:NUM_SCOPES]:
        table.add_row(row["scope"] or "(none)", row["category"], f"{row['share']:.1%}")
    return table


def _narrow_table(title: str, headings: tuple[str, ...]) -> Table:
    """Fits 80 columns: only the first, of names, is broken into lines, and no number."""
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(
            heading, justify="right" if number else "left", no_wrap=number > 0, overflow="ellipsis" if number else "fold"
        )
    return table


def _flops_table(found: dict) -> Table:
    units = (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")
    scale, unit = next((u for u in units if found["flops"] > 10 * u[0]), units[-1])
    table = _narrow_table(
        f"{unit} of a step: exact products beside 6 x parameters x all tokens",
        ("module", "params,\nM", "tokens", "for-\nward", "back-\nward", "again", "exact", "6ND", "exact\n- 6ND"),
    )
    for r in found["flops_by_module"]:
        exact = r["forward"] + r["backward"]
        numbers = (r["forward"], r["backward"], r["recomputed"], exact, r["flops_6nd"], exact - r["flops_6nd"])
        table.add_row(
            r["module"], f"{r['num_params'] / 1e6:.3f}", f"{r['num_tokens']:,}", *(f"{x / scale:.4g}" for x in numbers)
        )
    table.add_section()
    total = found["flops"], found["flops_6nd"], found["flops"] - found["flops_6nd"]
    whole = f"{found['num_params'] / 1e6:.3f}", f"{found['tokens_per_step']:,}"
    table.add_row("all", *whole, "", "", "", *(f"{x / scale:.4g}" for x in total))
    table.caption = (
        "6ND charges look-ups as products, every part for the tokens of all, and leaves out scores; scores count the full rectangle:"
        f" under the mask the forward pass needs {found['flops_forward_visible'] / found['flops_forward']:.1%} of it"
    )
    return table


def _roofline_table(found: dict) -> Table:
    headings = "part", "GFLOP", "MiB", "FLOP\n/byte", "bound", "attain-\nable\nGFLOP/s", "achieved\nGFLOP/s", "achieved"
    table = _narrow_table("roofline, per device", headings)
    count = found["devices"]["count"]
    ridge = found["peak_flops"] / found["memory_bytes_per_s"]
    for name, r in found["roofline"].items():
        attainable, achieved = r["attainable_flops"], r["achieved_flops"]
        share = f"{achieved / attainable:.1%}" if achieved is not None and attainable else "-"
        table.add_row(
            name, f"{r['flops'] / count / 1e9:.2f}", f"{r['moved_bytes'] / count / 2**20:.1f}", f"{r['intensity']:.2f}",
            "compute" if r["intensity"] > ridge else "bandwidth", f"{attainable / 1e9:.1f}",
            "-" if achieved is None else f"{achieved / 1e9:.1f}", share,
        )  # fmt: skip
    table.caption = (
        f"ridge at {ridge:.1f} FLOP/byte; bandwidth {found['memory_bytes_per_s'] / 1e9:.1f} GB/s, {found['memory_source']}"
    )
    return table
