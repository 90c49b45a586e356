"""Compiled programs as text: computations, instructions, how often each runs, and which devices a collective joins.

The grammar is that of XLA's HLO text (openxla.org/xla, "HLO text"); only what an account of collectives needs is read.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

DTYPE_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4,
    "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16, "f8e4m3fn": 1, "f8e5m2": 1,
}  # fmt: skip

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLEES = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Instruction:
    name: str
    type: str
    """Of the result, as text: `f32[8,4]{1,0}`, or a tuple of such."""
    opcode: str
    rest: str
    """Operands and attributes."""

    def attribute(self, pattern: str) -> str | None:
        found = re.search(pattern, self.rest)
        return found.group(1) if found else None

    @property
    def op_name(self) -> str | None:
        """Path of the source operation (named scopes), where the compiler kept one."""
        return self.attribute(r'op_name="([^"]*)"')

    @property
    def operands(self) -> list[str]:
        depth, end = 0, 0
        for end, c in enumerate(self.rest):
            depth += (c == "(") - (c == ")")
            if depth == 0:
                break
        return re.findall(r"%([\w.\-]+)", self.rest[: end + 1])


@dataclass(frozen=True)
class Program:
    entry: str
    computations: dict[str, list[Instruction]]


def _split_type(text: str) -> tuple[str, str]:
    """The type at the start of a text, and what follows it."""
    if not text.startswith("("):
        head, _, tail = text.partition(" ")
        return head, tail
    depth = 0
    for at, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return text[: at + 1], text[at + 1 :]
    raise ValueError(f"unbalanced type: {text[:80]}")


def parse(text: str) -> Program:
    """Raises ValueError for a text without an entry computation."""
    computations, current, entry = {}, None, None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header and not line.startswith(" "):
            current = computations[header.group(2)] = []
            entry = header.group(2) if header.group(1) else entry
        elif current is not None and (instruction := _INSTRUCTION.match(line)):
            type_, rest = _split_type(line[instruction.end() :])
            opcode = _OPCODE.match(rest)
            if opcode:
                current.append(Instruction(instruction.group(2), type_, opcode.group(1), rest[opcode.end() - 1 :]))
    if entry is None:
        raise ValueError("this is no compiled program: it has no ENTRY computation")
    return Program(entry, computations)


def elements(type_: str) -> list[str]:
    """Top-level elements of a tuple type; an array is its own only element."""
    if not type_.startswith("("):
        return [type_]
    inner, parts, depth, start = re.sub(r"/\*.*?\*/", "", type_[1:-1]), [], 0, 0
    for at, c in enumerate(inner):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(inner[start:at].strip())
            start = at + 1
    return [*parts, inner[start:].strip()]


def type_bytes(type_: str) -> int:
    """Bytes of all arrays of a type; tokens and opaque values have none. Raises ValueError for an unknown dtype."""
    total = 0
    for dtype, dims in _ARRAY.findall(re.sub(r"\{[^}]*\}", "", type_)):
        if dtype not in ("token", "opaque"):
            if dtype not in DTYPE_BYTES:
                raise ValueError(f"unknown dtype {dtype} in {type_[:80]}")
            total += DTYPE_BYTES[dtype] * math.prod(int(d) for d in dims.split(",") if d)
    return total


def type_dtypes(type_: str) -> tuple[str, ...]:
    return tuple(sorted({dtype for dtype, _ in _ARRAY.findall(type_)}))


def trip_count(program: Program, loop: Instruction) -> int | None:
    """How often the body of a `while` runs: the compiler's word, or else the only integer constant that its condition has."""
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if known:
        return int(known)
    pending, constants = [loop.attribute(r"condition=%?([\w.\-]+)")], []
    while pending:
        for instruction in program.computations.get(pending.pop(), []):
            pending += _CALLEES.findall(instruction.rest)
            if instruction.opcode == "constant" and instruction.type.startswith(("s32[]", "s64[]", "u32[]")):
                constants.append(int(instruction.rest.strip("()").split(")")[0]))
    return constants[0] if len(set(constants)) == 1 else None


def executions(program: Program) -> tuple[dict[str, int], list[str]]:
    """How often each computation runs in one call of the program, and the loops whose trip count is unknown (counted once)."""
    calls: dict[str, list[tuple[str, int]]] = defaultdict(list)
    unknown = []
    for name, instructions in program.computations.items():
        for instruction in instructions:
            if instruction.opcode in ("async-done", "async-update"):
                continue  # they name the computation that async-start runs
            trips = 1
            if instruction.opcode == "while":
                found = trip_count(program, instruction)
                unknown += [] if found else [instruction.name]
                trips = found or 1
            callees = _CALLEES.findall(instruction.rest)
            for branches in _BRANCHES.findall(instruction.rest):
                callees += [b.strip().lstrip("%") for b in branches.split(",")]
            calls[name] += [(callee, trips) for callee in callees]
    times: dict[str, int] = defaultdict(int)

    def visit(name: str, count: int) -> None:
        times[name] += count
        for callee, trips in calls[name]:
            visit(callee, count * trips)

    visit(program.entry, 1)
    return dict(times), unknown


def replica_groups(rest: str, num_devices: int) -> np.ndarray | None:
    """Devices that a collective joins, (groups, members); None where the attributes name none."""
    mesh = re.search(
        r"replica_groups=(?:@?[\w.\-]*)mesh\[([^\]]*)\](?:,? ?device_ids=\(?\[([^\]]*)\](T\([^)]*\))?\)?)? ?\{([^}]*)\}", rest
    )
    if mesh:
        return _mesh_groups(*mesh.groups())
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if iota:
        shape, dims, order = ([int(x) for x in (g or "").split(",") if x] for g in iota.groups())
        ids = np.arange(math.prod(dims)).reshape(dims)
        return (ids.transpose(order) if order else ids).reshape(shape)
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", rest)
    if listed:
        groups = [[int(x) for x in g.split(",") if x] for g in re.findall(r"\{([\d,]*)\}", listed.group(1))]
        return np.array(groups) if groups and groups[0] else np.arange(num_devices)[None]
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", rest)
    return np.array([[int(x) for x in p.split(",")] for p in re.findall(r"\{(\d+,\d+)\}", pairs.group(1))]) if pairs else None


def _mesh_groups(axes: str, ids: str | None, transposed: str | None, chosen: str) -> np.ndarray:
    """Groups of the form mesh['a'=2,'b'=4] {'b'}, where 'b':(2)2 is the part of size 2 of b behind 2 pieces. Devices stand in
    their order, or as device_ids=([2,2,2]T(0,2,1)): counted over these dimensions, which are then transposed."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    shape, is_member = [], []
    picks: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen):
        picks[name].append((int(before or 1), int(size or sizes[name])))
    for name, whole in sizes.items():
        at = 1
        for before, size in sorted(picks.get(name, [])):
            shape += [before // at, size]
            is_member += [False, True]
            at = before * size
        shape.append(whole // at)
        is_member.append(False)
    devices = np.arange(math.prod(sizes.values()))
    if ids is not None:
        devices = devices.reshape([int(n) for n in ids.split(",")])
        devices = devices.transpose([int(n) for n in re.findall(r"\d+", transposed)]) if transposed else devices
    grid = devices.reshape(shape)
    outside = [i for i, m in enumerate(is_member) if not m]
    inside = [i for i, m in enumerate(is_member) if m]
    return grid.transpose(outside + inside).reshape(-1, math.prod(shape[i] for i in inside))
