"""`sharder report RUN...`: what runs recorded, as one HTML file that needs no network and no jax.

Every figure is drawn from recorded files; what was not recorded leaves a gap with its name and the command that would fill it.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median

from sharder.config import UserError
from sharder.instrument.words import WARNING, doubt, sentences
from sharder.launch.ledger import make_ledger
from sharder.report import plots
from sharder.report.html import card, cards, details, escape, figure, gap, number, page, section, table
from sharder.report.read import Recorded, read_run
from sharder.report.timeline import make_timeline
from sharder.report.verify import compare, describe

CURVES = (
    ("loss", "loss", False), ("validation_loss", "validation loss", False), ("grad_norm", "gradient norm", True),
    ("learning_rate", "learning rate", False), ("tokens_per_s", "tokens/s", False), ("examples_per_s", "examples/s", False),
    ("step_time_s", "step time, s", True),
)  # fmt: skip
USE = (("mfu", "MFU, 6ND"), ("mfu_exact", "MFU, exact"), ("hfu", "HFU"))
MAX_ROWS = 400
"""Of the table of parameters."""


def write_report(run_dirs: list[Path], out: Path | None) -> Path:
    """Writes the page, of a single run into its folder; returns its path. Raises UserError for what is no run."""
    if out is None and len(run_dirs) > 1:
        raise UserError("a report of several runs belongs to none of them: name its file with --out.")
    runs = _named_apart([read_run(run_dir) for run_dir in run_dirs])
    out = out or run_dirs[0] / "report.html"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(make_page(runs))
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}. Choose another --out.") from None
    return out


def _named_apart(runs: list[Recorded]) -> list[Recorded]:
    """Folders of the same name in different places keep their whole paths: figures and tables know a run by its name."""
    names = Counter(r.name for r in runs)
    found = [r if names[r.name] == 1 else replace(r, name=str(r.run_dir)) for r in runs]
    twice = [name for name, count in Counter(r.name for r in found).items() if count > 1]
    if twice:
        raise UserError(f"{twice[0]} is named more than once: a run is not overlaid with itself.")
    return found


def make_page(runs: list[Recorded]) -> str:
    body = [_summary(runs), _where(runs), _curves(runs)]
    if len(runs) > 1:
        body.append(_agreement(runs))
    for run in runs:
        label = f"{run.name}: " if len(runs) > 1 else ""
        body += [f(run, label) for f in (_time, _processes, _attribution, _roofline, _memory, _collectives, _plan)]
    return page("Sharder: " + ", ".join(r.name for r in runs), "\n".join(body))


def _summary(runs: list[Recorded]) -> str:
    parts = []
    for run in runs:
        last = list(run.last_of_step.values())[-1:]
        found = (
            [
                card("step", last[0]["step"]),
                card("loss", number(last[0].get("loss"))),
                card("fingerprint", last[0].get("fingerprint", "-")),
            ]
            if last
            else []
        )
        found += [card("steps done again", run.num_redone)] if run.num_redone else []
        mfu = run.series("mfu_exact")[1]
        found += [card("MFU, exact, median", f"{median(mfu):.1%}")] if mfu else []
        attempts = {e["attempt"] for e in run.events if isinstance(e.get("attempt"), int)}
        found += [card("attempts", len(attempts))] if attempts else []
        cut = "".join(
            f'<p class="note">{count} unreadable line(s) of {escape(name)} skipped (a kill cuts the last one off)</p>'
            for name, count in run.num_unreadable.items()
        )
        parts.append(f"<h2>{escape(run.name)}</h2>{cards(found)}{cut}")
    return "\n".join(parts)


def _where(runs: list[Recorded]) -> str:
    rows: dict[str, list[str]] = {}
    for run in runs:
        facts, plan = run.facts or {}, run.plan or {}
        config = facts.get("config") or (run.profile or {}).get("config", {})
        devices, mesh = facts.get("devices") or (run.profile or {}).get("devices", {}), plan.get("mesh", {})
        versions, data = facts.get("versions") or (run.profile or {}).get("versions", {}), facts.get("data", {})
        peak = facts.get("peak_flops") or (run.profile or {}).get("peak_flops")
        peak_source = facts.get("peak_source") or (run.profile or {}).get("peak_source")
        model, train, parallel = (config.get(s, {}) for s in ("model", "train", "parallel"))
        values = {
            "folder": str(run.run_dir),
            "model": f"{model.get('kind', '?').removesuffix('Config')}, {plan.get('num_params') or (run.profile or {}).get('num_params', 0):,} parameters",
            "devices": f"{devices.get('count', '?')} x {devices.get('kind', '?')} ({devices.get('platform', '?')})",
            "processes": f"{facts.get('num_processes') or (run.profile or {}).get('num_processes', '?')} process(es)",
            "mesh": " x ".join(f"{k} {v}" for k, v in mesh.items()) or "not recorded",
            "policy, mode": f"{plan.get('policy') or parallel.get('policy', '?')}, {parallel.get('reduction', '?')}",
            "batch, seed": f"{train.get('global_batch_size', '?')} examples per step, seed {train.get('seed', '?')}",
            "data": f"{data['num_examples']:,} examples, SHA-256 {str(data.get('fingerprint'))[:16]}..."
            if "num_examples" in data
            else "not recorded",
            "versions": ", ".join(f"{k} {v}" for k, v in versions.items()) or "not recorded",
            "peak of a device": f"{peak / 1e12:.3f} TFLOP/s, {peak_source}" if peak else "unknown",
            "configuration": facts.get("config_hash", "not recorded"),
        }
        for name, value in values.items():
            rows.setdefault(name, []).append(value)
    return section("What ran where", table(["", *(r.name for r in runs)], [[k, *v] for k, v in rows.items()]))


def _curves(runs: list[Recorded]) -> str:
    if not any(r.records for r in runs):
        return section("Training", gap("metrics.jsonl", "sharder train RECIPE --run-dir DIR"))
    figures = []
    for field, label, log in CURVES:
        series = {r.name if len(runs) > 1 else label: r.series(field) for r in runs}
        series = {k: v for k, v in series.items() if v[0]}
        if series:
            figures.append(
                figure(plots.lines(label, series, label, log and all(min(y) > 0 for _, y in series.values())), label)
            )
    use = {(f"{r.name}, " if len(runs) > 1 else "") + label: r.series(field) for r in runs for field, label in USE}
    use = {k: v for k, v in use.items() if v[0]}
    figures.append(
        figure(plots.lines("utilisation", use, "share of peak"), "utilisation of the devices")
        if use
        else gap("MFU", "sharder train RECIPE --run-dir DIR")
    )
    doubts = [(r.name, doubt(median(hfu), (r.facts or {}).get("peak_source"))) for r in runs if (hfu := r.series("hfu")[1])]
    text = "".join(_sentence(f"{said} ({name}, median HFU)") for name, said in doubts if said)
    return section("Training", '<div class="grid">' + "".join(figures) + "</div>" + text)


def _sentence(text: str) -> str:
    return f"<p{' class=bad' if text.startswith(WARNING) else ''}>{escape(text)}</p>"


def _agreement(runs: list[Recorded]) -> str:
    rows = []
    for other in runs[1:]:
        try:
            result = compare(runs[0].run_dir, other.run_dir)
            rows.append([f"{runs[0].name}, {other.name}", "identical" if result.identical else "DIFFERENT", describe(result)])
        except UserError as error:
            rows.append([f"{runs[0].name}, {other.name}", "not comparable", str(error)])
    return section("Fingerprints of the runs", table(["runs", "", "how"], rows))


def _time(run: Recorded, label: str) -> str:
    found = make_timeline(run.events, run.ledgers.last_signs if run.ledgers else None)
    if found is None:
        return section(f"{label}Attempts and faults", gap("events.jsonl", "sharder train RECIPE --run-dir DIR"))
    ledger = make_ledger(run.events, run.records)
    wall_s = ledger.wall_s or 1.0
    rows = [[kind, f"{s:.1f}", f"{s / wall_s:.1%}"] for kind, s in ledger.seconds.items() if s]
    rows.append(["all", f"{ledger.wall_s:.1f}", "100.0%"])
    marks = [[f"{m.time_s:.1f}", "fault" if m.is_fault else "stop", m.label] for m in found.marks]
    text = figure(plots.timeline(f"{run.name} attempts", found), "every attempt; faults are crosses", wide=True) + table(
        ["", "seconds", "share"], rows
    )
    text += f"<p>Goodput {ledger.goodput:.1%}: new steps, of the time that the run was not stopped for.</p>"
    text += table(["second", "", "what happened"], marks) if marks else "<p>No fault and no stop.</p>"
    text += f'<p class="note">{run.num_redone} steps were done again after a restart.</p>' if run.num_redone else ""
    return section(f"{label}Attempts and faults", text)


def _processes(run: Recorded, label: str) -> str:
    title = f"{label}Time of the processes"
    if run.ledgers is None:
        return section(title, gap("steps/process_N.jsonl", "sharder train RECIPE --run-dir DIR"))
    ledgers = run.ledgers
    shares = {
        f"process {p.process}": {k: v / p.wall_s if p.wall_s else 0.0 for k, v in p.parts.items()} for p in ledgers.processes
    }
    parts = [k for k in next(iter(shares.values())) if any(s[k] for s in shares.values())]
    rows = [
        [name, f"{p.wall_s:.1f}", p.num_steps, *(f"{s[k]:.1%}" for k in parts)]
        for (name, s), p in zip(shares.items(), ledgers.processes)
    ]
    text = figure(
        plots.stacked(f"{run.name} processes", shares, "share of the time between steps"), "where each process spends its time"
    )
    text += table(["", "seconds", "steps", *(p.replace("_", " ") for p in parts)], rows)
    if ledgers.slowest is not None:
        named = ", ".join(map(str, ledgers.stragglers))
        text += f"<p>Slowest: process {ledgers.slowest}. " + (
            f"<strong>Stragglers: {named}</strong>, persistently slower than the median by 10 %.</p>"
            if named
            else "No straggler.</p>"
        )
    return section(title, text)


def _attribution(run: Recorded, label: str) -> str:
    title, p = f"{label}Where the time of a step goes", run.profile
    if p is None:
        return section(title, gap("profile/profile.json", "sharder profile RECIPE --run-dir DIR"))
    figures = [
        figure(plots.bars(f"{run.name} parts", p["shares"], "percent of the step"), "by part"),
        figure(plots.bars(f"{run.name} kinds", p["kinds"], "percent of the step"), "by kind of work"),
    ]
    flops = [
        [
            r["module"],
            f"{r['num_params']:,}",
            f"{r['num_tokens']:,}",
            *(f"{x:.4g}" for x in (r["forward"], r["backward"], r["recomputed"], r["flops_6nd"])),
        ]
        for r in p["flops_by_module"]
    ]
    flops.append(
        [
            "all",
            f"{p['num_params']:,}",
            f"{p['tokens_per_step']:,}",
            "",
            f"{p['flops']:.4g} exact",
            f"{p['flops_hardware']:.4g} with again",
            f"{p['flops_6nd']:.4g}",
        ]
    )
    text = '<div class="grid">' + "".join(figures) + "</div>" + "".join(map(_sentence, sentences(p)))
    text += details("FLOPs by module", table(["module", "parameters", "tokens", "forward", "backward", "again", "6ND"], flops))
    scopes = [[s["scope"] or "(none)", s["category"], f"{s['share']:.2%}"] for s in p["scopes"][:60]]
    return section(title, text + details("source scopes", table(["scope", "part", "share"], scopes)))


def _roofline(run: Recorded, label: str) -> str:
    title, p = f"{label}Roofline", run.profile
    if p is None or not p.get("peak_flops"):
        return section(title, gap("profile/profile.json", "sharder profile RECIPE --run-dir DIR"))
    count = p["devices"]["count"]
    rows = [
        [name, f"{r['flops'] / count / 1e9:.2f}", f"{r['moved_bytes'] / count / 2**20:.1f}", f"{r['intensity']:.2f}", number(r["achieved_flops"] and r["achieved_flops"] / 1e9), f"{r['attainable_flops'] / 1e9:.1f}"]
        for name, r in p["roofline"].items()
    ]  # fmt: skip
    text = figure(
        plots.roofline(f"{run.name} roofline", p["roofline"], p["peak_flops"], p["memory_bytes_per_s"]),
        "achieved, below what a device can",
    )
    note = f'<p class="note">Peak {p["peak_flops"] / 1e12:.3f} TFLOP/s ({p["peak_source"]}), memory {p["memory_bytes_per_s"] / 1e9:.1f} GB/s ({p["memory_source"]}), per device.</p>'
    return section(title, text + table(["part", "GFLOP", "MiB", "FLOP/byte", "GFLOP/s achieved", "attainable"], rows) + note)


def _memory(run: Recorded, label: str) -> str:
    title, p = f"{label}Memory of a device", run.profile
    if p is None:
        return section(title, gap("predicted and measured memory", "sharder profile RECIPE --run-dir DIR"))
    mib = lambda x: "-" if x is None else f"{x / 2**20:,.1f}"  # noqa: E731
    memory = p["memory"]
    rows = [[name, mib(size), "", ""] for name, size in memory["predicted"].items() if size and name != "total"]
    rows.append(["total", mib(memory["predicted"]["total"]), mib(memory["compiled"]), mib(memory["measured"])])
    notes = {
        "measured": "This backend counts no memory: nothing was measured.",
        "compiled": "A step in exact mode is several programs: no program's memory is that of the step.",
    }
    missing = "".join(f'<p class="note">{note}</p>' for column, note in notes.items() if memory[column] is None)
    return section(title, table(["MiB", "predicted", "compiled", "measured"], rows) + missing)


def _collectives(run: Recorded, label: str) -> str:
    title, p = f"{label}Collectives", run.profile
    if p is None or "traffic" not in p:
        return section(title, gap("collectives of the compiled step", "sharder profile RECIPE --run-dir DIR"))
    if not p["traffic"]:
        return section(title, "<p>None: a single device, or devices that share nothing.</p>")
    rows = [
        [
            c["kind"],
            c["axes"],
            c["executions"],
            f"{c['bytes_each'] / 2**20:.2f}",
            f"{c['payload_bytes'] / 2**20:.1f}",
            c["scope"],
        ]
        for c in p["traffic"][:60]
    ]
    return section(title, table(["kind", "axes", "times", "MiB each", "MiB per step", "scope"], rows))


def _plan(run: Recorded, label: str) -> str:
    title, plan = f"{label}Plan", run.plan
    if plan is None:
        return section(title, gap("plan.json", "sharder train RECIPE --run-dir DIR"))
    mib = lambda x: f"{x / 2**20:,.2f}"  # noqa: E731
    rows = [[k, mib(v), mib(plan["bytes_total"].get(k, 0))] for k, v in plan["bytes_per_device"].items()]
    params = [[path, " x ".join(map(str, leaf["shape"])), leaf["dtype"], *(_spec(leaf[x]) for x in ("storage", "compute", "update")), mib(_size(leaf))]
              for path, leaf in list(plan["params"].items())[:MAX_ROWS]]  # fmt: skip
    whole = table(["parameter", "shape", "dtype", "storage", "compute", "update", "MiB at rest"], params)
    return section(title, table(["MiB", "per device", "whole"], rows) + details(f"{len(plan['params'])} parameters", whole))


def _size(leaf: dict) -> float:
    size = leaf.get("bytes_per_device", 0)
    return size.get("storage", next(iter(size.values()), 0)) if isinstance(size, dict) else size


def _spec(spec: list) -> str:
    return ", ".join("+".join(e) if isinstance(e, list) else e or "-" for e in spec)
