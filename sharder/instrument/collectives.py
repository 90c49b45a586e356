"""What a compiled step communicates: every collective with its mesh axis, bytes, repetitions and source scope.

Bytes are per device and step. `payload_bytes` is the whole array: what a gather gives, what a reduction or a scatter takes.
`received_bytes` is what a device receives at least, on a ring: (n - 1)/n of the payload for a gather, a scatter and an
all-to-all, twice that for an all-reduce (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sharder.instrument.hlo import Instruction, Program, elements, executions, parse, replica_groups, type_bytes, type_dtypes

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
ROUNDS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1}
_NOISE = re.compile(r"^(while|body|closed_call|checkpoint|rematted_computation|cond|branch_\d+_fun|jvp\(\)|custom_vjp_call)$")


@dataclass(frozen=True)
class Collective:
    """One collective instruction of the compiled program."""

    name: str
    kind: str
    axes: tuple[str, ...]
    """Mesh axes that it joins devices along; ("irregular",) where groups follow no axes."""
    group_size: int
    num_hosts: int
    """Hosts that a group touches."""
    dtypes: tuple[str, ...]
    num_arrays: int
    """Above 1: the compiler combined several."""
    bytes_each: int
    """Payload of one execution."""
    executions: int
    scope: str
    """Path of named scopes in the source; "transpose(...)" is the backward pass."""
    by_addition: bool = False
    """An all-reduce of arrays that are zero but for each device's own part: a gather (TPU, where shards are no whole tiles)."""

    @property
    def is_gather(self) -> bool:
        return self.kind == "all-gather" or self.by_addition

    @property
    def payload_bytes(self) -> int:
        return self.bytes_each * self.executions

    @property
    def received_bytes(self) -> float:
        if self.kind == "collective-permute":
            return self.payload_bytes
        return ROUNDS[self.kind] * self.payload_bytes * (self.group_size - 1) / self.group_size

    @property
    def across_bytes(self) -> float:
        """The part of received_bytes that crosses hosts at least: what a host lacks, shared among its members where they need
        the same."""
        if self.num_hosts == 1:
            return 0.0
        if self.kind == "collective-permute":
            return self.payload_bytes
        members = 1 if self.kind == "all-to-all" else self.group_size / self.num_hosts
        return ROUNDS[self.kind] * self.payload_bytes * (self.num_hosts - 1) / self.num_hosts / members


@dataclass(frozen=True)
class Traffic:
    """Everything that a step communicates."""

    collectives: tuple[Collective, ...]
    unknown_loops: tuple[str, ...]
    """Loops whose trip count the program does not tell; what is in them counts once."""

    def payload_bytes(self, kind: str, axes: tuple[str, ...] | None = None) -> int:
        return sum(c.payload_bytes for c in self.collectives if c.kind == kind and axes in (None, c.axes))

    @property
    def gathered_bytes(self) -> int:
        """Whole arrays that gathers give."""
        return sum(c.payload_bytes for c in self.collectives if c.is_gather)

    @property
    def reduced_bytes(self) -> int:
        """Whole arrays that reductions and scatters take."""
        return sum(c.payload_bytes for c in self.collectives if c.kind in ("reduce-scatter", "all-reduce") and not c.is_gather)

    @property
    def received_bytes(self) -> float:
        return sum(c.received_bytes for c in self.collectives)

    @property
    def across_bytes(self) -> float:
        return sum(c.across_bytes for c in self.collectives)

    @property
    def inside_bytes(self) -> float:
        return self.received_bytes - self.across_bytes


def read_traffic(text: str, mesh: Mapping[str, int], hosts: Sequence[int]) -> Traffic:
    """From the text of a compiled program.

    `mesh`: size of each mesh axis, slowest first. `hosts`: number of the host of each device, in mesh order.
    """
    program = parse(text)
    times, unknown = executions(program)
    shape = {axis: size for axis, size in mesh.items() if size > 1}
    found = [
        collective
        for name, instructions in program.computations.items()
        if times.get(name)
        for collective in _in_computation(program, name, instructions, times[name], shape, np.asarray(hosts))
    ]
    return Traffic(tuple(sorted(_without_repeats(found), key=lambda c: -c.received_bytes)), tuple(unknown))


def _in_computation(
    program: Program, name: str, instructions: list[Instruction], times: int, shape: Mapping[str, int], hosts: np.ndarray
) -> list[Collective]:
    found = []
    by_name = {i.name: i for i in instructions}
    done = {operand: i for i in instructions if i.opcode.endswith("-done") for operand in i.operands[:1]}
    for instruction in instructions:
        kind = instruction.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        groups = replica_groups(instruction.rest, len(hosts))
        groups = np.arange(len(hosts))[None] if groups is None else groups
        if groups.shape[1] == 1:
            continue
        result = _result(instruction)
        size = type_bytes(result) * (groups.shape[1] if kind == "reduce-scatter" else 1)
        if kind == "all-reduce" and "all-reduce-scatter" in name:
            kind = "reduce-scatter"  # TPU: an all-reduce fused with the slice of its result; the input is whole
        operands = [by_name[o] for o in instruction.operands if o in by_name]
        found.append(
            Collective(
                name=instruction.name,
                kind=kind,
                axes=axes_of(groups, shape, kind == "collective-permute"),
                group_size=groups.shape[1],
                num_hosts=max(len(set(hosts[g])) for g in groups),
                dtypes=type_dtypes(result),
                num_arrays=len([e for e in elements(result) if e]),
                bytes_each=size,
                executions=times,
                scope=_scope(instruction, done.get(instruction.name), operands),
                by_addition=kind == "all-reduce" and all(o.opcode == "dynamic-update-slice" for o in operands),
            )
        )
    return found


def _result(instruction: Instruction) -> str:
    """The type of what comes out: an asynchronous start holds (inputs, outputs, ...), but an all-reduce only its outputs."""
    if instruction.opcode.endswith("-start") and not instruction.opcode.startswith("all-reduce"):
        return elements(instruction.type)[1]
    return instruction.type


def _scope(instruction: Instruction, done: Instruction | None, operands: list[Instruction]) -> str:
    names = [i.op_name for i in (instruction, done, *operands) if i is not None]
    name = next((n for n in names if n), None)
    if name is None:
        return "(combined; no scope)" if len(elements(instruction.type)) > 1 else "(no scope)"
    parts = [p for p in name.split("/") if not _NOISE.match(p)]
    return "/".join(parts[1:] if parts[:1] and parts[0].startswith("jit(") else parts) or name


def _without_repeats(found: list[Collective]) -> list[Collective]:
    """One entry for the same instruction copied into several fusions (TPU writes a gather once per chunk of its overlap)."""
    kept: dict[tuple, Collective] = {}
    for c in found:
        kept.setdefault((re.sub(r"\.(clone|remat\d*)(\.\d+)?$", "", c.name), c.kind, c.bytes_each, c.executions), c)
    return list(kept.values())


def axes_of(groups: np.ndarray, shape: Mapping[str, int], is_permute: bool = False) -> tuple[str, ...]:
    """The mesh axes that these groups run along, of those with more than one device."""
    names, sizes = list(shape), list(shape.values())
    if is_permute:
        a, b = (np.array(np.unravel_index(groups[:, i], sizes or [1])) for i in (0, 1))
        differ = (a != b).any(axis=1)
        return tuple(n for n, d in zip(names, differ) if d) or ("irregular",)
    grid = np.arange(int(np.prod(sizes))).reshape(sizes)
    members = {frozenset(g.tolist()) for g in groups}
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(range(len(names)), count):
            rest = [i for i in range(len(names)) if i not in chosen]
            lines = grid.transpose([*rest, *chosen]).reshape(-1, int(np.prod([sizes[i] for i in chosen])))
            if members == {frozenset(line.tolist()) for line in lines}:
                return tuple(names[i] for i in chosen)
    return ("irregular",)
