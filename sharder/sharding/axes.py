"""Logical axes: the names of the dimensions of a model's parameters, and which of them may be divided."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class AxisRules:
    """What a model says about dividing its parameters, in its own words."""

    names: frozenset[str]
    """Every logical axis that the model uses; another name is an error, never silently replicated."""
    tensor: tuple[str, ...]
    """Axes divided for computation by tensor parallelism."""
    storage: tuple[str, ...] = ()
    """Axes that ZeRO and FSDP may divide, best first; a parameter is divided along the first that it has.
    Empty: the axes in `tensor`."""
    replicable: tuple[str, ...] = ()
    """Axes in `tensor` that stay whole, on purpose, where the tensor degree does not divide them: every device of a tensor
    group then holds and computes all of it."""

    optional: tuple[str, ...] = ()
    """Storage axes that small parameters alone depend on: where the fsdp degree does not divide them, these stay whole."""

    @property
    def storage_axes(self) -> tuple[str, ...]:
        return self.storage or self.tensor

    def without_tensor(self, axes: Iterable[str]) -> "AxisRules":
        """The same rules with these axes whole for computation; what may be divided for storage stays what it was."""
        return replace(self, tensor=tuple(a for a in self.tensor if a not in axes), storage=self.storage_axes)


@dataclass(frozen=True)
class ParamDecl:
    """A parameter before it exists."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    """Logical name of each dimension."""


def check_rules(rules: AxisRules) -> None:
    """Raises ValueError (a mistake in a model, not of the user) for rules about axes that the model does not have."""
    unknown = sorted({*rules.tensor, *rules.storage, *rules.replicable, *rules.optional} - rules.names)
    if unknown:
        raise ValueError(f"rules for unknown logical axes {unknown}; known: {sorted(rules.names)}")


def check_axes(path: str, decl: ParamDecl, rules: AxisRules) -> None:
    """Raises ValueError (a mistake in a model) for unknown, repeated or missing axis names, and for two that share a mesh axis."""
    unknown = [a for a in decl.axes if a not in rules.names]
    if len(decl.axes) != len(decl.shape) or unknown or len(set(decl.axes)) != len(decl.axes):
        raise ValueError(
            f"parameter {path}: shape {decl.shape}, logical axes {decl.axes}: need one known, distinct name per dimension"
            f" (unknown: {unknown}; known: {sorted(rules.names)})"
        )
    tensor = [f"{a} {size}" for a, size in zip(decl.axes, decl.shape) if a in rules.tensor]
    if len(tensor) > 1:
        raise ValueError(
            f"parameter {path}: shape {decl.shape}, logical axes {decl.axes}: tensor parallelism would divide {' and '.join(tensor)},"
            " but a mesh axis can divide one dimension of a parameter only"
        )
