"""What every instruction of a compiled program is for: its time is split over parts of the step by what is inside it.

A fusion is not charged to its own name, which is that of its last operation: its members are looked at. Where they multiply
matrices, their FLOPs divide it; where not, the bytes that they write (a reduction: reads). An instruction without a scope moves
what others compute (a loop's stacks of weights, of kept values and of gradients): it goes to whoever makes what it moves, else to
whoever uses it; where neither has a scope it is a copy.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from sharder.instrument.dots import product_flops, types_of
from sharder.instrument.hlo import Instruction, Program, elements, type_bytes
from sharder.instrument.scopes import category_of, kind_of, pass_of, scopes_of

SEARCH_DEPTH = 6
"""How many instructions without a scope are looked through."""


@dataclass(frozen=True)
class Part:
    """Whose time a piece of an instruction's is."""

    category: str
    kind: str
    scope: str
    """Path of named scopes in the source, or empty."""
    direction: str
    """forward, backward or recomputed."""


Split = dict[Part, float]
"""Shares, which sum to 1."""


class Attribution:
    """Of one program."""

    def __init__(self, program: Program, axes: Mapping[str, str]):
        """`axes`: mesh axes of collectives, by the instruction's name."""
        self.program, self.axes = program, axes
        self._found: dict[str, Split] = {}

    @cached_property
    def _home(self) -> dict[str, str]:
        """The computation of every instruction."""
        return {i.name: name for name, instructions in self.program.computations.items() for i in instructions}

    @cached_property
    def _by_name(self) -> dict[str, Instruction]:
        return {i.name: i for instructions in self.program.computations.values() for i in instructions}

    @cached_property
    def _users(self) -> dict[str, list[Instruction]]:
        users = defaultdict(list)
        for instruction in self._by_name.values():
            for operand in instruction.operands:
                users[operand].append(instruction)
        for outside, inside in self._carried:
            users[outside].append(inside)
        return users

    @cached_property
    def _carried(self) -> list[tuple[str, Instruction]]:
        """What goes into loops: (value outside, or at the end of the body; where the body takes it up)."""
        found = []
        for loop in [i for i in self._by_name.values() if i.opcode == "while"]:
            body = self.program.computations.get(loop.attribute(r"body=%?([\w.\-]+)"), [])
            taken = defaultdict(list)
            for i in body:
                if i.opcode == "get-tuple-element" and self._by_name[i.operands[0]].opcode == "parameter":
                    taken[int(i.attribute(r"index=(\d+)"))].append(i)
            for values in (self._by_name.get(loop.operands[0]), body[-1]):
                for number, value in enumerate(values.operands if values is not None and values.opcode == "tuple" else []):
                    found += [(value, i) for i in taken[number]]
        return found

    @cached_property
    def _sources(self) -> dict[str, list[str]]:
        """Values that a loop's body takes up, by the instruction that does."""
        found = defaultdict(list)
        for outside, inside in self._carried:
            found[inside.name].append(outside)
        return found

    def knows(self, name: str) -> bool:
        return name in self._by_name

    def is_container(self, name: str) -> bool:
        """Whether its time is that of the instructions that it runs."""
        return self._by_name[name].opcode in ("while", "conditional", "call")

    def is_only_control(self, name: str) -> bool:
        """Whether it is a loop or a call that no scope claims: the time between its operations is nobody's."""
        return self.is_container(name) and not _has_category(self._by_name[name].op_name)

    def split(self, name: str) -> Split:
        """Whose time the instruction of this name spends."""
        if name not in self._found:
            self._found[name] = self._split(self._by_name[name])
        return self._found[name]

    def _split(self, instruction: Instruction) -> Split:
        weights: dict[Part, float] = defaultdict(float)
        for member, weight, kind in self._weighted(instruction):
            weights[self._part(member, kind, instruction)] += weight
        total = sum(weights.values())
        return {part: weight / total for part, weight in weights.items()}

    def _weighted(self, instruction: Instruction) -> list[tuple[Instruction, float, str]]:
        """The instruction itself, or the members of a fusion that take time: (member, weight, kind)."""
        members = list(self._members(instruction))
        products = [(i, flops, "matrix product") for i, types in members if (flops := product_flops(i, types))]
        if products:
            return products
        moving = [
            (i, bytes_touched(i, types), kind_of(i.opcode))
            for i, types in members
            if kind_of(i.opcode) not in ("free", "control")
        ]
        if sum(weight for _, weight, _ in moving) > 0:
            return moving
        # Nothing but zeros or indices that are written out, or a kernel of which nothing is known.
        only_free = instruction.opcode == "fusion" and members and all(kind_of(i.opcode) == "free" for i, _ in members)
        return [(instruction, 1.0, "copy" if only_free or kind_of(instruction.opcode) == "free" else "other")]

    def _members(self, instruction: Instruction) -> Iterator[tuple[Instruction, dict[str, str]]]:
        """What a fusion computes, fusions inside it opened; of anything else the instruction."""
        callee = instruction.attribute(r"calls=%?([\w.\-]+)")
        if callee is None or instruction.opcode != "fusion":
            yield instruction, types_of(self.program.computations[self._home[instruction.name]])
            return
        inside = self.program.computations.get(callee, [])
        types = types_of(inside)
        for member in inside:
            if member.opcode == "fusion":
                yield from self._members(member)
            else:
                yield member, types

    def _part(self, member: Instruction, kind: str, whole: Instruction) -> Part:
        if kind == "collective":
            name = member.name if member.name in self.axes else whole.name
            return Part(
                f"collectives {self.axes.get(name, '?')}",
                kind,
                "/".join(scopes_of(member.op_name or "")),
                pass_of(member.op_name or ""),
            )
        op_name = self._source(member, whole, kind)
        if op_name is not None:
            scopes = scopes_of(op_name)
            return Part(category_of(scopes) or "unattributed", kind, "/".join(scopes), pass_of(op_name))
        own = member.op_name or whole.op_name or ""
        category = "copies" if kind == "copy" else "unattributed"
        return Part(category, kind, "/".join(scopes_of(own)), pass_of(own))

    def _source(self, member: Instruction, whole: Instruction, kind: str) -> str | None:
        """The name of the source operation that has a category: its own, that of its fusion, or of what it moves."""
        if _has_category(member.op_name):
            return member.op_name
        if kind != "copy":
            return whole.op_name if _has_category(whole.op_name) else None
        near = self._search(member, lambda i: self._operands(i)) or self._search(member, lambda i: self._users[i.name])
        if near is not None or member is whole:
            return near
        if _has_category(whole.op_name):
            return whole.op_name
        return self._search(whole, lambda i: self._operands(i)) or self._search(whole, lambda i: self._users[i.name])

    def _operands(self, instruction: Instruction) -> list[Instruction]:
        """What is stored first: the second operand of an update in place."""
        names = instruction.operands
        if instruction.opcode == "dynamic-update-slice":
            names = names[1:2]
        names = names + self._sources.get(instruction.name, [])
        return [self._by_name[n] for n in names if n in self._by_name]

    def _search(self, start: Instruction, neighbours) -> str | None:
        level, seen = [start], {start.name}
        for _ in range(SEARCH_DEPTH):
            level = [n for i in level for n in neighbours(i) if n.name not in seen]
            seen |= {i.name for i in level}
            for instruction in level:
                name = self._name_of(instruction)
                if name is not None:
                    return name
            level = [i for i in level if i.opcode not in ("while", "conditional", "call", "parameter", "constant")]
        return None

    def _name_of(self, instruction: Instruction) -> str | None:
        """Its own scope; of a fusion also that of what is inside."""
        if instruction.opcode in ("while", "conditional", "call"):
            return None
        if _has_category(instruction.op_name):
            return instruction.op_name
        if instruction.opcode == "fusion":
            named = [(bytes_touched(m, t), m.op_name) for m, t in self._members(instruction) if _has_category(m.op_name)]
            return max(named)[1] if named else None
        return None


def _has_category(op_name: str | None) -> bool:
    return op_name is not None and category_of(scopes_of(op_name)) is not None


def bytes_touched(instruction: Instruction, types: Mapping[str, str]) -> float:
    """What limits an instruction that multiplies nothing: bytes that it writes; of a reduction those that it reads, of an
    update in place those of the update."""
    operands = [types[o] for o in instruction.operands if o in types]
    if instruction.opcode in ("reduce", "reduce-window", "sort") and operands:
        return float(max(map(_bytes, operands)))
    if instruction.opcode in ("dynamic-update-slice", "scatter") and len(operands) > 1:
        return float(_bytes(operands[-1] if instruction.opcode == "scatter" else operands[1]))
    return float(_bytes(instruction.type))


def _bytes(type_: str) -> int:
    try:
        return sum(type_bytes(e) for e in elements(type_))
    except ValueError:  # a dtype of another version
        return 0
