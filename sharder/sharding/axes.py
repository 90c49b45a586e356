"""Logical axes: the names of the dimensions of a model's parameters, and which of them may be divided."""

from dataclasses import dataclass


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

    @property
    def storage_axes(self) -> tuple[str, ...]:
        return self.storage or self.tensor


@dataclass(frozen=True)
class ParamDecl:
    """A parameter before it exists."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    """Logical name of each dimension."""


def check_axes(path: str, decl: ParamDecl, rules: AxisRules) -> None:
    """Raises ValueError (a mistake in a model, not of the user) for unknown, repeated or missing axis names."""
    unknown = [a for a in decl.axes if a not in rules.names]
    if len(decl.axes) != len(decl.shape) or unknown or len(set(decl.axes)) != len(decl.axes):
        raise ValueError(
            f"parameter {path}: shape {decl.shape}, logical axes {decl.axes}: need one known, distinct name per dimension"
            f" (unknown: {unknown}; known: {sorted(rules.names)})"
        )
