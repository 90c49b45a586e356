"""Matrix products that a compiled program really does, counted from its text: the check of what was counted analytically.

XLA's own `cost_analysis` is no such check: it counts the body of a loop once, however often it runs.
"""

import math
import re
from collections.abc import Mapping

from sharder.instrument.hlo import Instruction, Program, executions, parse

_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
MATMUL_CALLS = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|cublas)', re.I)
CONVOLUTION_CALLS = re.compile(r'custom_call_target="[^"]*conv', re.I)
ATTENTION_CALLS = re.compile(r'custom_call_target="__cudnn\$fmha', re.I)


def shape_of(type_: str) -> list[int]:
    """Dimensions of an array, or of the first array of a tuple."""
    found = _SHAPE.search(type_)
    return [int(d) for d in found.group(1).split(",") if d] if found else []


def is_product(instruction: Instruction) -> bool:
    """A matrix product or a convolution, an instruction or a library's kernel."""
    if instruction.opcode == "custom-call":
        return any(p.search(instruction.rest) for p in (MATMUL_CALLS, CONVOLUTION_CALLS, ATTENTION_CALLS))
    return instruction.opcode in ("dot", "convolution")


def product_flops(instruction: Instruction, types: Mapping[str, str]) -> float:
    """Of one execution; `types`: by name of the instructions of the same computation. 0.0 for what is no matrix product."""
    if not is_product(instruction):
        return 0.0
    operands = [shape_of(types[o]) for o in instruction.operands if o in types]
    result = math.prod(shape_of(instruction.type))
    if ATTENTION_CALLS.search(instruction.rest):
        return _attention_flops(instruction, operands)
    if instruction.opcode == "convolution" or CONVOLUTION_CALLS.search(instruction.rest):
        return 2.0 * result * _receptive_field(instruction, operands)
    contracted = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]([^\]}]*)', instruction.rest)
    dims = [int(d) for d in re.findall(r"\d+", contracted.group(1))] if contracted else [len(operands[0]) - 1]
    return 2.0 * result * math.prod(operands[0][d] for d in dims)


def _receptive_field(instruction: Instruction, operands: list[list[int]]) -> int:
    """Products that are added up to one output: the kernel without its output features."""
    kernel = operands[1]
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.rest)
    return math.prod(kernel) // kernel[labels.group(1).index("o")] if labels else math.prod(kernel[:-1])


def _attention_flops(instruction: Instruction, operands: list[list[int]]) -> float:
    """cuDNN's fused attention: two products forward, and five backward, of which one is computed again."""
    q, k = operands[0], operands[1]  # (B, T, N, H)
    passes = 5 if "backward" in instruction.rest.lower() else 2
    return 2.0 * passes * q[0] * q[1] * k[1] * q[2] * q[3]


def types_of(instructions: list[Instruction]) -> dict[str, str]:
    return {i.name: i.type for i in instructions}


def program_flops(program: Program) -> float:
    """Matrix products of one run of a program on one device, loops counted as often as they run."""
    times, _ = executions(program)
    total = 0.0
    for name, instructions in program.computations.items():
        if times.get(name):
            types = types_of(instructions)
            total += times[name] * sum(product_flops(i, types) for i in instructions)
    return total


def text_flops(text: str) -> float:
    """`program_flops` of the text of a compiled program."""
    return program_flops(parse(text))
