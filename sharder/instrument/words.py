"""What a profile says, in sentences. Knows profile.json and nothing of jax: the report says the same."""

from collections.abc import Mapping

LEAST_COVERAGE = 0.8
"""Below, the trace misses too much for its shares to be shown without saying so."""
WARNING = "WARNING: "


def doubt(used: float | None, peak_source: str | None) -> str | None:
    """What to say where a step reaches more than the peak that was measured; None where nothing is wrong.

    `used`: exact FLOPs over the peak. 6 N D may exceed it rightly: it charges what nobody computes.
    """
    if used is None or used <= 1.0 or peak_source != "measured":
        return None
    return (
        f"{WARNING}{used:.1%} of the peak cannot be: it was measured here while others used this machine, and is too low. Every start of"
        " sharder profile or sharder train measures it again: repeat it while nothing else runs"
    )


def sentences(found: dict) -> list[str]:
    """The figures in words, each with where it comes from."""
    devices, naive, percent = found["devices"], found["naive"], lambda x: "unknown" if x is None else f"{x:.1%}"  # noqa: E731
    lines = [
        f"step {found['step_time_s'] * 1e3:.1f} ms: median of {len(found['steps_s'])} blocked steps outside of the profiler,"
        f" {min(found['steps_s']) * 1e3:.1f} to {max(found['steps_s']) * 1e3:.1f}; {devices['count']} x {devices['kind']},"
        f" {found['num_processes']} process(es)",
        f"coverage {found['coverage']:.1%}: summed device time / blocked step, the least of {len(found['coverage_by_device'])} device(s)",
    ]
    if found["coverage"] < LEAST_COVERAGE:
        lines.append(
            f"{WARNING}coverage below {LEAST_COVERAGE:.0%}: the trace misses part of the step, and the shares above hold only for the rest"
        )
    if devices["platform"] == "cpu" and devices["count"] > 1:
        lines.append("simulated devices share the cores of one host: their times say nothing about speed-up")
    bound = found["verdict"]
    lines.append(f"verdict: {bound['bound']}-bound ({bound['share']:.1%} of the step): {bound['advice']}")
    lines.append(
        f"MFU {percent(found['mfu'])} by 6ND, {percent(found['mfu_exact'])} by exact products, HFU {percent(found['hfu'])};"
        f" peak {found['peak_flops'] / 1e12:.3f} TFLOP/s per device, {found['peak_source']}"
    )
    lines += filter(None, [doubt(found["hfu"], found["peak_source"])])
    lines.append(
        f"FLOPs of a step: {found['flops_hardware']:.4g} analytic with what is computed again, {found['flops_compiled']:.4g} in the compiled"
        f" program ({found['flops_compiled'] / found['flops_hardware']:.4f})"
    )
    counted = naive["flops_counted_by_the_compiler"]
    counted_text = "nothing" if counted is None else f"{counted:.4g} FLOPs, an MFU of {percent(naive['mfu_of_counted_flops'])}"
    lines.append(
        f"the wrong ways: traced operations add up to {naive['step_time_summed_s'] * 1e3:.1f} ms, an MFU of"
        f" {percent(naive['mfu_of_summed_time'])}; the compiler's cost analysis counts {counted_text}"
    )
    calls = naive.get("coverage_of_calls")
    if calls is not None and calls < found["coverage"]:
        lines.append(
            f"operations go on in other threads after their calls return: the calls alone would cover {calls:.1%} of the step, and what"
            " these threads do would pass for idle time"
        )
    collectives = found["collectives"]["seconds_by_process"]
    if len(collectives) > 1:
        waits = ", ".join(f"{i}: {s * 1e3:.1f}" for i, s in enumerate(found["collectives"]["waiting_s"]))
        lines.append(
            f"collectives contain waiting: {min(collectives) * 1e3:.1f} ms in the process that waits least; waiting beyond that, ms by process: {waits}"
        )
    elif any(name.startswith("collectives") for name in found["shares"]):
        lines.append("the time of collectives contains waiting for the other devices")
    exposed = found["collectives"].get("exposed_share")
    if exposed is not None:
        lines.append(f"{1 - exposed:.1%} of the collectives' time is hidden behind other work of the same device")
    beyond = beyond_the_roof(found["roofline"])
    if beyond:
        measured = "measured" in found["memory_source"]
        lines.append(
            f"roofline: {', '.join(beyond)} reach{'es' if len(beyond) == 1 else ''} more than memory bandwidth allows: what they move stays in"
            f" a cache{', or the bandwidth was measured too low' if measured else ''}"
        )
    if found["ablation"]:
        a = found["ablation"]
        traced = found["shares"].get(a["scope"], 0.0)
        between = f", half of all pairs between {a['share_low']:.1%} and {a['share_high']:.1%}" if "share_low" in a else ""
        lines.append(
            f"ablation: without {a['scope']} the step takes {a['without_s'] * 1e3:.1f} instead of {a['whole_s'] * 1e3:.1f} ms; in pairs of"
            f" steps that is {a['share']:.1%} of it{between}; by the trace {traced:.1%}"
        )
        if min(a["share"], a.get("share_low", a["share"])) < 0:
            lines.append(
                f"{WARNING}leaving {a['scope']} out cannot slow a step down: others used this machine meanwhile, and the ablation tells"
                " nothing. Repeat it while nothing else runs"
            )
    return lines


def beyond_the_roof(roofline: Mapping[str, Mapping]) -> list[str]:
    """Parts that reach more FLOP/s than peak and bandwidth allow, by more than 2 %."""
    return [name for name, r in roofline.items() if (r.get("achieved_flops") or 0.0) > 1.02 * r["attainable_flops"]]
