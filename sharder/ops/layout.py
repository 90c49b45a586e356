"""What a model may ask of its surroundings: its weights where they are computed with, its activations pinned.

A model calls these with logical axis names and knows nothing else. `SINGLE` serves one device; the sharded
version is `sharder.sharding.compute.ComputeLayout`.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

Tree = Any
Body = Callable[[Any, Any], tuple[Any, Any]]


class Layout(Protocol):
    def weights(self, name: str, params: Tree, dtype: str) -> Tree:
        """Parameters of the module at path `name`, in the layout of computation and cast to `dtype`.

        Inside a scan over layers `params` are one layer's slices. Gradients flow back in the parameters' own dtype.
        """
        ...

    def activation(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """`x` with its dimensions divided as these logical axes are; "batch" and "replica" are divided over the replicas."""
        ...

    @property
    def num_replicas(self) -> int:
        """Replicas that the batch is divided over."""
        ...

    def divides(self, axis: str) -> bool:
        """Whether several devices compute different parts of this logical axis."""
        ...

    def scanned(self, body: Body, remat: str) -> Body:
        """A body for `lax.scan` over layers that stores for its backward pass what `remat` names."""
        ...


class SingleDevice:
    """Everything in one place: casts, and nothing else."""

    def weights(self, name: str, params: Tree, dtype: str) -> Tree:
        return jax.tree.map(lambda p: p.astype(jnp.dtype(dtype)), params)

    def activation(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return x

    num_replicas = 1

    def divides(self, axis: str) -> bool:
        return False

    def scanned(self, body: Body, remat: str) -> Body:
        return jax.checkpoint(body) if remat == "block" else body


SINGLE = SingleDevice()
