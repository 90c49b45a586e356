"""Along which dimension of a parameter blocks of adjacent elements lie, so that no sharding of a run cuts one.

Blocks belong to the state of a run, which is restored on any mesh under any policy: they must be the same everywhere, and what
is computed of a block must need no other device. So they run along a dimension that neither ZeRO nor FSDP ever divides: best along
one that nothing divides, else along one that tensor parallelism does, whose degree is small and fixed for a run in exact mode.
"""

import math
from typing import NamedTuple

from sharder.sharding.axes import AxisRules, ParamDecl
from sharder.sharding.plan import Plan, divisor
from sharder.sharding.policy import storage_dim

BLOCK, LEAST = 32, 8
"""Elements of a block: that many, or the power of two below it that divides the dimension, but not fewer than 8, or shared
exponents would take more than they save."""


class Block(NamedTuple):
    dim: int
    size: int


def block_of(decl: ParamDecl, rules: AxisRules) -> Block | None:
    """The blocks of a parameter; `rules` are the model's own. None: it has no such dimension, as vectors have none."""
    stored = storage_dim(decl.axes, rules)
    free = [d for d, axis in enumerate(decl.axes) if axis != "layers" and d != stored]
    for dims in ([d for d in free if decl.axes[d] not in rules.tensor], free):
        best = max((Block(d, math.gcd(decl.shape[d], BLOCK)) for d in dims), key=lambda b: (b.size, b.dim), default=Block(0, 0))
        if best.size >= LEAST:
            return best
    return None


def cut_blocks(plan: Plan, rules: AxisRules) -> dict[str, tuple[Block, int]]:
    """Blocks that this plan would cut, by path, each with the number of elements of its dimension that a device holds."""
    found = {}
    for path, leaf in plan.leaves.items():
        block = block_of(leaf.decl, rules)
        if block is not None:
            held = leaf.decl.shape[block.dim] // divisor(leaf.update[block.dim], plan.mesh)
            if held % block.size:
                found[path] = (block, held)
    return found
