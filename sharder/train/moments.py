"""Adam with moments in fewer bits: what is kept between steps is narrow, what a step computes is float32.

| moments  | first moment                               | second moment                                 | bytes of both  |
| float32  | float32                                    | float32                                       | 8              |
| bfloat16 | bfloat16                                   | blocks, 5 bits of exponent and 11 of mantissa | 4 + 1/block    |
| int8     | blocks, sign, 3 of exponent, 4 of mantissa | blocks, 4 of exponent and 4 of mantissa       | 2 + 2/block    |

A moment m becomes b m + (1 - b) x. Where it is rounded to nearest with relative steps of 2**-M, a change below half a step is no
change: with M = 7, which bfloat16 has, a second moment stops to fall as soon as 1 - b2 < 2**-8, and since larger squares still
lift it, it can only grow (b2 = 0.999 is such a case, and its square root, whose changes are half as large, is worse). A second moment
needs no sign and, within a block, few exponents; given to the mantissa these bits let it fall. `sharder.config.LARGEST_DECAY`
says up to which b1 and b2 that holds.

The update is made of the new moments before they are rounded, so that a large gradient counts in full at its own step.
Parameters without blocks (vectors, mostly) keep float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from sharder.config import OptimizerConfig
from sharder.models.build import Declared, flatten, unflatten
from sharder.ops.block_float import Code, decode, encode
from sharder.ops.widen import narrowed
from sharder.sharding.blocks import block_of

CODES: dict[str, dict[str, Code]] = {
    "bfloat16": {"nu": Code(5, 11, signed=False)},
    "int8": {"mu": Code(3, 4, signed=True), "nu": Code(4, 4, signed=False)},
}
"""Of the moments that are kept in blocks."""


class NarrowMoments(NamedTuple):
    """Moments as they are kept, each a tree like the parameters; exponents of those that are in blocks."""

    count: jax.Array
    mu: dict
    nu: dict
    mu_exponents: dict
    nu_exponents: dict


def scale_by_narrow_adam(config: OptimizerConfig, declared: Declared) -> optax.GradientTransformation:
    """As optax.scale_by_adam (arXiv:1412.6980, algorithm 1) with moments kept as `config.moments` says."""
    codes = CODES[config.moments]
    blocks = {path: block for path, decl in declared.params.items() if (block := block_of(decl, declared.rules)) is not None}

    def keep(name: str, path: str, x: jax.Array) -> dict[str, jax.Array]:
        """A moment as it is kept, by the name of the tree."""
        block = blocks.get(path)
        if block is None:
            return {name: x}
        if name not in codes:
            return {name: narrowed(x, jnp.bfloat16)}
        return dict(zip((name, f"{name}_exponents"), encode(x, *block, codes[name])))

    def wide(name: str, path: str, trees: dict[str, dict]) -> jax.Array:
        kept, block = trees[name][path], blocks.get(path)
        if block is None or name not in codes:
            return kept.astype(jnp.float32)
        return decode(kept, trees[f"{name}_exponents"][path], *block, codes[name])

    def state(count: jax.Array, moments: dict[str, dict[str, jax.Array]]) -> NarrowMoments:
        """From float32 moments by name and path."""
        trees: dict[str, dict] = {name: {} for name in NarrowMoments._fields[1:]}
        for name, leaves in moments.items():
            for path, x in leaves.items():
                for tree, leaf in keep(name, path, x).items():
                    trees[tree][path] = leaf
        return NarrowMoments(count, *(unflatten(tree) for tree in trees.values()))

    def init(params):
        shapes = {path: jax.ShapeDtypeStruct(p.shape, jnp.float32) for path, p in flatten(params).items()}
        kept = jax.eval_shape(state, jax.ShapeDtypeStruct((), jnp.int32), {"mu": shapes, "nu": shapes})
        # Code 0 is the number 0. (To encode zeros would be left to the compiler, as constants of the parameters' size.)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kept)

    def update(grads, old, _=None):
        trees = {name: flatten(tree) for name, tree in old._asdict().items() if name != "count"}
        count, grads = optax.safe_increment(old.count), flatten(grads)
        mu = {p: (1 - config.b1) * g + config.b1 * wide("mu", p, trees) for p, g in grads.items()}
        nu = {p: (1 - config.b2) * jnp.square(g) + config.b2 * wide("nu", p, trees) for p, g in grads.items()}
        unbiased_mu, unbiased_nu = 1 - config.b1**count, 1 - config.b2**count
        updates = {p: (mu[p] / unbiased_mu) / (jnp.sqrt(nu[p] / unbiased_nu) + config.eps) for p in grads}
        return unflatten(updates), state(count, {"mu": mu, "nu": nu})

    return optax.GradientTransformation(init, update)
