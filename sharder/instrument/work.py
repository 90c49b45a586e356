"""FLOPs and bytes of every part of a step, from its compiled programs: where each stands under the roofline.

Bytes are those that cross the edges of what the compiler fused: operands read and results written once for each execution. Of an
operand that a fusion only takes a slice of, the slice counts; of an update in place, the update.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sharder.instrument.attribution import bytes_touched
from sharder.instrument.dots import product_flops, types_of
from sharder.instrument.hlo import Instruction, Program, executions
from sharder.instrument.profile import Programs
from sharder.instrument.scopes import kind_of

SLICES = ("dynamic-slice", "gather", "slice")


@dataclass(frozen=True)
class Standing:
    """Of one part of a step, over all devices."""

    flops: float
    moved_bytes: float
    share: float
    """Of the step's time."""

    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.moved_bytes if self.moved_bytes else 0.0

    def attainable(self, peak_flops: float, bytes_per_s: float) -> float:
        """FLOP/s of one device under its two ceilings (Williams et al., CACM 52(4), 2009)."""
        return min(peak_flops, self.intensity() * bytes_per_s)

    def achieved(self, step_time_s: float, num_devices: int) -> float | None:
        """FLOP/s of one device; None where no time was attributed."""
        return self.flops / (self.share * step_time_s * num_devices) if self.share > 0 else None


def work_of(programs: Programs, shares: Mapping[str, float]) -> dict[str, Standing]:
    """By category, for all that do arithmetic or move bytes."""
    flops, moved = defaultdict(float), defaultdict(float)
    for program, parsed, attribution, _ in programs.each():
        for instruction, types, times in executed(parsed):
            size = program.runs * times * moved_bytes(instruction, types, parsed)
            work = program.runs * times * flops_inside(instruction, types, parsed)
            if size or work:
                for part, share in attribution.split(instruction.name).items():
                    moved[part.category] += share * size
                    # What is split by bytes has no products; what is split by FLOPs has this share of them.
                    flops[part.category] += share * work
    return {name: Standing(flops[name], moved[name], shares[name]) for name in shares if moved.get(name) or flops.get(name)}


def executed(program: Program) -> Iterator[tuple[Instruction, dict[str, str], int]]:
    """Instructions that are run one by one, the types around them, and how often a run of the program does so."""
    times, _ = executions(program)
    pending, seen = [program.entry], set()
    while pending:
        name = pending.pop()
        if name in seen or name not in program.computations:
            continue
        seen.add(name)
        instructions = program.computations[name]
        types = types_of(instructions)
        for i in instructions:
            if i.opcode == "while":
                pending.append(i.attribute(r"body=%?([\w.\-]+)"))
            elif i.opcode == "call":
                pending.append(i.attribute(r"to_apply=%?([\w.\-]+)"))
            elif i.opcode == "conditional":
                branches = i.attribute(r"branch_computations=\{([^}]*)\}")
                pending += [b.strip().lstrip("%") for b in (branches or "").split(",")]
            elif kind_of(i.opcode) != "free" or i.opcode in ("broadcast", "iota"):
                yield i, types, times[name]


def flops_inside(instruction: Instruction, types: Mapping[str, str], program: Program) -> float:
    """Matrix products of an instruction, or of what is fused into it."""
    callee = instruction.attribute(r"calls=%?([\w.\-]+)") if instruction.opcode == "fusion" else None
    if callee is None:
        return product_flops(instruction, types)
    inside = program.computations.get(callee, [])
    inner = types_of(inside)
    return sum(flops_inside(i, inner, program) for i in inside)


def moved_bytes(instruction: Instruction, types: Mapping[str, str], program: Program) -> float:
    """What one execution reads and writes."""
    operands = [o for o in instruction.operands if o in types]
    whole = lambda name: bytes_touched(Instruction(name, types[name], "parameter", ""), {})  # noqa: E731
    if instruction.opcode in SLICES:
        return 2.0 * bytes_touched(instruction, types)
    if instruction.opcode == "dynamic-update-slice":
        return 2.0 * bytes_touched(instruction, types)
    callee = instruction.attribute(r"calls=%?([\w.\-]+)") if instruction.opcode == "fusion" else None
    inside = program.computations.get(callee, []) if callee else []
    if not inside:
        return bytes_touched(Instruction("", instruction.type, "", ""), {}) + sum(map(whole, operands))
    inner = types_of(inside)
    parameters = {int(i.rest.strip("()").split(")")[0]): i.name for i in inside if i.opcode == "parameter"}
    updates = [i for i in inside if i.opcode == "dynamic-update-slice"]
    written = sum(bytes_touched(i, inner) for i in updates) or bytes_touched(Instruction("", instruction.type, "", ""), {})
    read = 0.0
    for number, name in enumerate(operands):
        users = [i for i in inside if parameters.get(number) in i.operands]
        first_of = {u.opcode for u in users if u.operands[0] == parameters[number]}
        if first_of and first_of <= set(SLICES):
            read += sum(bytes_touched(u, inner) for u in users)
        elif first_of != {"dynamic-update-slice"}:
            read += whole(name)
    return read + written
