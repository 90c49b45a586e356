"""A step on a machine that need not be there: what it holds, moves and computes, whether it fits, and what would."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax

from sharder.config import RunConfig, UserError
from sharder.instrument.bound import Bounds, Purpose, compare, lower_bounds, purpose, warnings
from sharder.instrument.collectives import Collective, Traffic, read_traffic
from sharder.instrument.exact_traffic import Programs, exact_bounds, purpose_in_exact_mode, read_programs
from sharder.instrument.hardware import Accelerator
from sharder.instrument.memory import Memory, Shapes, compiled_bytes, estimate_exact_memory, estimate_memory, largest_microbatch
from sharder.instrument.roofline import StepTime, Work, count_work, predict, split_bounds
from sharder.instrument.share import trace_share
from sharder.models.build import Declared
from sharder.sharding.mesh import AXES
from sharder.sharding.plan import Plan
from sharder.sharding.show import StateLeaves


@dataclass(frozen=True)
class Step:
    """What a step is made of, before anything is compiled. The trainer makes it; nothing here knows how."""

    config: RunConfig
    declared: Declared
    plan: Plan
    state: StateLeaves
    example: Shapes
    """One example, (1, ...)."""
    microbatch_size: int
    num_slots: int
    num_microbatches: int = 0
    """Of a virtual worker in exact mode; 0 in fast mode."""

    @property
    def batch(self) -> Shapes:
        """The examples of one replica in one slot."""
        return {k: jax.ShapeDtypeStruct((self.microbatch_size, *x.shape[1:]), x.dtype) for k, x in self.example.items()}

    @property
    def tokens_per_slot(self) -> int:
        return self.microbatch_size * (self.config.data.seq_len if self.declared.tokens_per_example else 1)


@dataclass(frozen=True)
class Prediction:
    """From shapes alone."""

    step: Step
    memory: Memory
    bounds: Bounds
    work: Work
    time: StepTime | None
    """Of the layout's least traffic; None where a rate is unknown."""


@dataclass(frozen=True)
class Compiled:
    """Of the program that the compiler made."""

    total_bytes: int | None
    """None for exact mode, whose programs share memory in ways that none of them knows."""
    traffic: Traffic
    purposes: list[Purpose]
    warnings: list[str]
    time: StepTime | None
    """With the traffic of the program."""


def memory_of(step: Step) -> Memory:
    if step.num_microbatches:
        lean = step.config.parallel.exact_memory == "lean"
        return estimate_exact_memory(
            step.declared, step.plan, step.state, step.batch, step.num_slots, step.num_microbatches, lean
        )
    return estimate_memory(step.declared, step.plan, step.state, step.batch, step.num_slots)


def predict_step(step: Step, accelerator: Accelerator | None, devices_per_host: int) -> Prediction:
    model, memory, sizes = step.config.model, memory_of(step), (step.num_slots, step.tokens_per_slot)
    if step.num_microbatches:
        lean = step.config.parallel.exact_memory == "lean"
        bounds = exact_bounds(step.plan, model.compute_dtype, *sizes, lean, step.declared.frozen)
    else:
        bounds = lower_bounds(step.plan, model.compute_dtype, *sizes, step.declared.frozen)
    share = trace_share(step.declared, step.plan, step.batch, "update" if step.num_slots == 1 else "storage")
    frozen = step.plan.param_bytes_per_device("storage") - step.plan.param_bytes_per_device("storage", step.declared.frozen)
    update_bytes = 2 * (memory.state - frozen) + step.plan.param_bytes_per_device("update", step.declared.frozen)
    work = count_work(share, step.num_slots * max(step.num_microbatches, 1), update_bytes, accelerator, model.compute_dtype)
    time = None
    if accelerator is not None:
        near = step.plan.mesh.num_devices if accelerator.is_tpu else devices_per_host  # a TPU slice is one network
        time = predict(work, *split_bounds(bounds, step.plan.mesh, near), accelerator)
    return Prediction(step, memory, bounds, work, time)


def read_compiled(
    prediction: Prediction, compiled: jax.stages.Compiled, hosts: Sequence[int], accelerator: Accelerator | None
) -> Compiled:
    """`hosts`: number of the host of each device, in mesh order."""
    mesh = {axis: prediction.step.plan.mesh.size(axis) for axis in AXES}
    return _compare(
        prediction, read_traffic(compiled.as_text(), mesh, hosts), purpose, hosts, accelerator, compiled_bytes(compiled)
    )


def read_exact(prediction: Prediction, programs: Programs, hosts: Sequence[int], accelerator: Accelerator | None) -> Compiled:
    """The same of the programs of exact mode."""
    traffic = read_programs(programs, prediction.step.plan, prediction.step.num_slots, hosts)
    return _compare(prediction, traffic, purpose_in_exact_mode, hosts, accelerator, None)


def _compare(
    prediction: Prediction, traffic: Traffic, purpose: Callable[[Collective], str], hosts, accelerator, total_bytes
) -> Compiled:
    plan = prediction.step.plan
    purposes = compare(traffic, prediction.bounds, plan.mesh, list(hosts).count(hosts[0]), purpose)
    time = predict(prediction.work, traffic.inside_bytes, traffic.across_bytes, accelerator) if accelerator else None
    return Compiled(total_bytes, traffic, purposes, warnings(plan, purposes), time)


Build = Callable[[RunConfig, int, int], Step]
"""(config, number of devices, of which per host) -> step. Raises UserError where the configuration does not fit the devices."""


def variants(config: RunConfig, build: Build, num_devices: int, per_host: int) -> list[tuple[str, RunConfig, Step]]:
    """Other policies, tensor degrees, remat policies and microbatches of the same run, each with the options that choose it."""
    found = []
    for policy in ("fsdp", "zero", "dp"):
        for tensor in [t for t in (1, 2, 4, 8) if per_host % t == 0]:
            for remat in dict.fromkeys((config.model.remat, "block")):
                parallel = replace(config.parallel, policy=policy, tensor=tensor, data=None, fsdp=None)
                changed = replace(config, parallel=parallel, model=replace(config.model, remat=remat))
                try:
                    step = build(changed, num_devices, per_host)
                except UserError:
                    continue
                text = f"--parallel.policy {policy}" + (f" --parallel.tensor {tensor}" if tensor > 1 else "")
                found.append((text + (f" --model.remat {remat}" if remat != config.model.remat else ""), changed, step))
    return found


def most_examples_that_fit(step: Step, limit_bytes: int) -> int | None:
    """The largest power of two of examples that a replica could compute at once, whatever the batch; None: not even one."""
    sizes = [1 << i for i in range(17)]
    return largest_microbatch(lambda m: memory_of(replace(step, microbatch_size=m, num_slots=1)).total, sizes, limit_bytes)


def microbatch_that_fits(step: Step, limit_bytes: int) -> int | None:
    """The largest number of examples that a replica can compute at once, among the divisors of its share of the batch."""
    share = step.microbatch_size * step.num_slots
    choices = [m for m in range(1, share + 1) if share % m == 0]
    total = lambda m: memory_of(replace(step, microbatch_size=m, num_slots=share // m)).total  # noqa: E731
    return largest_microbatch(total, choices, limit_bytes)


def remedies(config: RunConfig, build: Build, step: Step, num_devices: int, per_host: int, limit_bytes: int) -> list[str]:
    """What would make a step fit that does not: options, each with the bytes that it would need."""
    found = []
    micro = None if step.num_microbatches else microbatch_that_fits(step, limit_bytes)
    if micro:
        found.append(f"--train.microbatch-size {micro}")
    for text, _, other in variants(config, build, num_devices, per_host):
        if memory_of(other).total <= limit_bytes:
            found.append(text)
        elif (micro := microbatch_that_fits(other, limit_bytes)) is not None:
            found.append(f"{text} --train.microbatch-size {micro}")
        if len(found) == 4:
            break
    return found


@dataclass(frozen=True)
class Found:
    options: str
    num_devices: int
    num_hosts: int
    prediction: Prediction


def machine_sizes(num_hosts: int, per_host: int) -> list[tuple[int, int]]:
    """Hosts and devices per host, ascending: parts of one host, then whole hosts by powers of two, then all."""
    inside = [(1, 1 << i) for i in range(per_host.bit_length()) if (1 << i) < per_host]
    hosts = sorted({1 << i for i in range(num_hosts.bit_length()) if (1 << i) <= num_hosts} | {num_hosts})
    return inside + [(h, per_host) for h in hosts]


def fewest_devices(config: RunConfig, build: Build, num_hosts: int, per_host: int, accelerator: Accelerator) -> Found | None:
    """The smallest part of a machine that some policy fits on, or None."""
    for hosts, local in machine_sizes(num_hosts, per_host):
        fitting = _fitting(config, build, hosts, local, accelerator)
        if fitting:
            return fitting[0]
    return None


def fastest(
    config: RunConfig, build: Build, num_hosts: int, per_host: int, accelerator: Accelerator, count: int = 3
) -> list[Found]:
    """Of what fits on the whole machine, the fastest by prediction."""
    return _fitting(config, build, num_hosts, per_host, accelerator)[:count]


def _fitting(config: RunConfig, build: Build, num_hosts: int, per_host: int, accelerator: Accelerator) -> list[Found]:
    found = []
    for text, _, step in variants(config, build, num_hosts * per_host, per_host):
        if memory_of(step).total > accelerator.memory_bytes and not step.num_microbatches:
            micro = microbatch_that_fits(step, accelerator.memory_bytes)
            if micro is None:
                continue
            share = step.microbatch_size * step.num_slots
            step, text = (
                replace(step, microbatch_size=micro, num_slots=share // micro),
                f"{text} --train.microbatch-size {micro}",
            )
        prediction = predict_step(step, accelerator, per_host)
        if prediction.memory.total <= accelerator.memory_bytes:
            found.append(Found(text, num_hosts * per_host, num_hosts, prediction))
    # Without a rate for the dtype the times are unknown: then by memory.
    return sorted(found, key=lambda f: f.prediction.time.exposed_s if f.prediction.time else f.prediction.memory.total)
