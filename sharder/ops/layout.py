"""What a model may ask of its surroundings: its weights where they are computed with, its activations pinned.

A model calls these with logical axis names and knows nothing else. `SINGLE` serves one device; the sharded
version is `sharder.sharding.compute.ComputeLayout`.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

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


def remat_body(body: Body, remat: str, gathers: bool) -> Body:
    """A scan body that keeps for its backward pass what `remat` names: `none` everything, `dots` the results of matrix
    products, `block` nothing but its input, `offload` its input in the host's memory.

    `gathers`: the body gathers its weights. Then `none` means `dots`, or the gathered weights of every layer would be kept and
    the model be whole on every device.
    """
    if remat == "none" and not gathers:
        return body
    if remat in ("none", "dots"):
        return jax.checkpoint(body, policy=jax.checkpoint_policies.dots_saveable)
    if remat == "block":
        return jax.checkpoint(body)
    assert remat == "offload", remat
    return jax.checkpoint(
        _named_input(body),
        policy=jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[OFFLOADED],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    )


OFFLOADED = "block_input"


def _named_input(body: Body) -> Body:
    def named(carry, scanned):
        return body(jax.tree.map(lambda x: checkpoint_name(x, OFFLOADED), carry), scanned)

    return named


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
        return remat_body(body, remat, gathers=False)


SINGLE = SingleDevice()
