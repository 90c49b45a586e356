"""Parameters against the mesh: dimensions that do not divide, weights that would stay whole, and sizes and degrees that work."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from sharder.accounting import batch_findings
from sharder.config import RunConfig, UserError
from sharder.finding import Finding, Options, applied, either
from sharder.sharding.mesh import MeshShape
from sharder.sharding.plan import Indivisible, Plan, divisor, make_plan

SIZE_OPTIONS = {
    "embed": "embed_dim", "mlp": "mlp_dim", "vocab": "padded_vocab_size", "heads": "num_heads", "kv_heads": "num_kv_heads",
    "head_dim": "head_dim", "positions": "max_seq_len", "input": "input_dim", "hidden": "hidden_dim", "hidden_in": "hidden_dim",
    "output": "output_dim",
}  # fmt: skip
"""Field of the model's configuration that gives an axis its size."""

SMALL_CHANGE = 0.05
"""A size that works is preferred to other degrees of the mesh if it differs by no more than this fraction."""


@dataclass(frozen=True)
class Machine:
    """The devices that a mesh must use, all of them."""

    num_devices: int
    num_local: int
    """Of one process."""


@dataclass(frozen=True)
class Remedies:
    """Options under which all parameters of a plan divide."""

    config: RunConfig
    plan: Plan
    machine: Machine

    @cached_property
    def degrees(self) -> Options:
        """Degrees of the mesh nearest to those of the plan under which everything divides."""
        was = self.plan.mesh

        def distance(mesh: MeshShape) -> float:
            steps = abs(math.log2(mesh.tensor / was.tensor)) + abs(math.log2(mesh.fsdp / was.fsdp))
            return steps + (0.5 if batch_findings(self.config, mesh.num_replicas) else 0)

        mesh = min(filter(self._everything_divides, self._meshes()), key=distance)
        return {"--parallel.data": mesh.data, "--parallel.fsdp": mesh.fsdp, "--parallel.tensor": mesh.tensor}

    def _meshes(self) -> Iterator[MeshShape]:
        for tensor in divisors(self.machine.num_local):
            replicas = self.machine.num_devices // tensor
            yield from (MeshShape(replicas // fsdp, fsdp, tensor) for fsdp in divisors(replicas))

    def _everything_divides(self, mesh: MeshShape) -> bool:
        rules = self.plan.rules
        if mesh.tensor > 1 and not (rules.tensor or self.plan.whole_over_tensor):
            return False
        rules = replace(rules, tensor=(*rules.tensor, *self.plan.whole_over_tensor))
        plan = make_plan({p: leaf.decl for p, leaf in self.plan.leaves.items()}, rules, self.config.parallel, mesh)
        return not plan.indivisible() and not set(plan.undivided()) - set(self.config.parallel.replicate)

    def size(self, axis: str) -> Options | None:
        """A size near that of the axis which divides wherever a parameter has it, if the model can take it."""
        field = SIZE_OPTIONS.get(axis)
        was = getattr(self.config.model, field, None) if field else None
        if was is None:
            return None
        factors = [
            divisor(entry, self.plan.mesh)
            for leaf in self.plan.leaves.values()
            for layout in ("update", "storage")
            for name, entry in zip(leaf.decl.axes, leaf.spec(layout))
            if SIZE_OPTIONS.get(name) == field
        ]
        unit, most = math.lcm(*factors), int(was * SMALL_CHANGE)
        sizes = (n for n in range(max(1, was - most), was + most + 1) if n % unit == 0)
        size = next((n for n in sorted(sizes, key=lambda n: abs(n - was)) if self._takes(field, n)), None)
        return None if size is None else {f"--model.{field.replace('_', '-')}": size}

    def other_sizes(self, axis: str, was: int, factor: int) -> str | None:
        """`make it 28 or 32`: the next multiples of the factor, below and above, that the model can take."""
        field = SIZE_OPTIONS.get(axis)
        below, above = range(was // factor * factor, 0, -factor), range(-(-was // factor) * factor, 2 * was, factor)
        fitting = (next((n for n in sizes if self._takes(field, n)), None) for sizes in (below, above))
        sizes = [n for n in fitting if n is not None]
        return f"make it {either(sizes)}" if sizes else None

    def _takes(self, field: str | None, size: int) -> bool:
        """Whether the model's configuration accepts this size; an axis without an option has nobody to say no."""
        if field is None or getattr(self.config.model, field, None) is None:
            return True
        try:
            applied(self.config, {f"--model.{field.replace('_', '-')}": size})
        except UserError:
            return False
        return True

    def other_degrees(self, size: int, item: Indivisible) -> str | None:
        """The degrees of the mesh axis at fault, of those that the devices allow, that would divide a dimension of this size."""
        mesh, machine = self.plan.mesh, self.machine
        name, possible, others = "--parallel.tensor", divisors(machine.num_local), 1
        if item.by_fsdp:
            name, possible = "--parallel.fsdp", divisors(max(machine.num_devices // mesh.tensor, 1))
            others = item.factor // mesh.fsdp
        fitting = [d for d in possible if size % (d * others) == 0]
        return f"make {name} one of {fitting}" if fitting else None

    @property
    def accepted(self) -> Options:
        """What may stay whole by name: what was named and exists, and what else would be whole."""
        named = [p for p in self.config.parallel.replicate if p in self.plan.leaves]
        return {"--parallel.replicate": list(dict.fromkeys([*named, *self.plan.undivided()]))}


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def parameter_findings(config: RunConfig, plan: Plan, machine: Machine | None = None) -> list[Finding]:
    """Every parameter that cannot lie as its layouts say, and every name in --parallel.replicate that is none.

    `machine`: the devices there are, if not those of the plan's mesh.
    """
    remedies = Remedies(config, plan, machine or Machine(plan.mesh.num_devices, plan.mesh.num_devices))
    found = _indivisible(plan, remedies) + _whole(config, plan, remedies)
    if plan.mesh.tensor > 1 and not (plan.rules.tensor or plan.whole_over_tensor):
        message = (
            f"--parallel.tensor is {plan.mesh.tensor}, but this model has no axis that tensor parallelism divides: every group"
            " would compute the same thing. Make it 1."
        )
        found.append(Finding("tensor", message, remedies.degrees, "--parallel.tensor", factor=plan.mesh.tensor))
    return found


def _whole(config: RunConfig, plan: Plan, remedies: Remedies) -> list[Finding]:
    found, option = [], "--parallel.replicate"
    for path in plan.undivided():
        if path not in config.parallel.replicate:
            decl, spec = plan.leaves[path].decl, tuple(plan.leaves[path].update)
            message = (
                f"{path}: shape {decl.shape}, axes {decl.axes}: would be whole on every device although the policy is {plan.policy};"
                f" accept that with --parallel.replicate {path}"
            )
            found.append(
                Finding("replicated", message, remedies.accepted, "--parallel.policy", path, decl.shape, spec, plan.mesh.fsdp)
            )
    for path in config.parallel.replicate:
        if path not in plan.leaves:
            message = f"--parallel.replicate {path}: the model has no such parameter; it has {', '.join(plan.leaves)}"
            found.append(Finding("replicate_name", message, remedies.accepted, option, path))
    return found


def _indivisible(plan: Plan, remedies: Remedies) -> list[Finding]:
    """One finding for each parameter and dimension; those of one axis, size and factor share a message."""
    groups: dict[tuple, dict[str, Indivisible]] = {}
    for item in plan.indivisible():
        groups.setdefault((item.axis, item.dim_size, item.factor), {}).setdefault(item.path, item)
    found = []
    for (axis, size, factor), items in groups.items():
        first = next(iter(items.values()))
        message = (
            f"{axis} is {size}, which does not divide into {factor}: {len(items)} parameter(s) have it, the first is {first.path},"
            f" shape {first.shape}, layout {tuple(first.spec)}"
        )
        ways = [remedies.other_sizes(axis, size, factor), remedies.other_degrees(size, first)]
        ways += [f"accept whole copies with --parallel.replicate {' '.join(items)}"] if first.by_fsdp else []
        message += f": {', or '.join(filter(None, ways))}" if any(ways) else ""
        nearest = remedies.size(axis) or remedies.degrees
        set_at = "--parallel.fsdp" if first.by_fsdp and factor == plan.mesh.fsdp else "--parallel.tensor"
        rule = "heads" if axis in ("heads", "kv_heads") else "dimension"
        found += [Finding(rule, message, nearest, set_at, i.path, i.shape, tuple(i.spec), factor) for i in items.values()]
    return found
