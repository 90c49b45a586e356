"""How much memory a traced computation needs at its worst moment, by a model of what a compiler stores.

Rules (all simplifications of what XLA does, checked against compiled programs in tests/instrument/test_memory.py):

- matrix products, reductions, loops, scatters and sorts store their results; what is elementwise is fused into its consumers
  and stored only where one of those stores: as an operand of a product, say. Reshapes and transposes are views.
- a fused value is computed right before the first consumer that stores, so its inputs live until then;
- a stored elementwise result takes the buffer of an operand of the same size that dies there;
- inside a loop the products that no other one needs (gradients of weights) run last, and their operands live until then;
  gradients are scattered where they arise;
- a loop carries its values in place, and a scatter adds in place, where nobody needs the old ones;
- a loop holds its stacked results from the start, and its body needs its own worst moment beside them.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

STORES = {
    "dot_general", "conv_general_dilated", "scan", "while", "cond", "sort", "cumsum", "cumlogsumexp", "top_k", "argmax", "argmin",
    "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce", "scatter-add", "scatter", "dynamic_update_slice",
    "concatenate", "random_bits", "gather_weights", "cast_weights", "scatter_gradients",
}  # fmt: skip
PRODUCTS = {"dot_general", "conv_general_dilated", "scan", "while", "cond"}
REDUCES = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce", "argmax", "argmin"}
VIEWS = {
    "reshape",
    "squeeze",
    "expand_dims",
    "transpose",
    "copy",
    "sharding_constraint",
    "optimization_barrier",
    "alias_weights",
    "stop_gradient",
}
INLINED = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat2",
    "checkpoint",
    "remat",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "custom_lin",
}
MARKERS = ("gather_weights", "cast_weights", "alias_weights", "scatter_gradients")
"""Names of jitted functions that stand for what a layout does to a weight."""


@dataclass
class Equation:
    name: str
    inputs: list
    outputs: list
    params: dict


class Buffer(NamedTuple):
    size_bytes: int
    origin: str
    """Operation that stores it."""
    shape: tuple[int, ...]
    in_loop: bool


@dataclass
class Moment:
    """What is stored at the worst moment."""

    total_bytes: int
    buffers: list[Buffer] = field(default_factory=list)


def size_of(v) -> int:
    aval = v.aval
    if not hasattr(aval, "shape"):
        return 0
    try:
        itemsize = np.dtype(aval.dtype).itemsize
    except TypeError:
        itemsize = 4  # random keys
    return math.prod(aval.shape) * itemsize


def inner_jaxpr(params: dict) -> Jaxpr | None:
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = params.get(key)
        if inner is not None:
            return inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
    return None


def flat(jaxpr: Jaxpr, replaced: dict | None = None) -> tuple[list[Equation], list]:
    """The equations with calls written out, and the outputs. Variables of every call are new objects."""
    replaced = {} if replaced is None else replaced
    resolve = lambda v: v if isinstance(v, Literal) else replaced.get(v, v)  # noqa: E731
    equations = []
    for eqn in jaxpr.eqns:
        name, inputs = eqn.primitive.name, [resolve(v) for v in eqn.invars]
        marker = eqn.params.get("name") if name in ("jit", "pjit") else None
        inner = inner_jaxpr(eqn.params)
        if marker in MARKERS or name not in INLINED or inner is None:
            outputs = [_new(v) for v in eqn.outvars]
            replaced.update(zip(eqn.outvars, outputs))
            equations.append(Equation(marker if marker in MARKERS else name, inputs, outputs, eqn.params))
            continue
        inside = dict(zip(inner.invars, inputs[-len(inner.invars) :] if inner.invars else []))
        inside.update({v: v for v in inner.constvars})
        body, results = flat(inner, inside)
        equations += body
        replaced.update(zip(eqn.outvars, results))
    return equations, [resolve(v) for v in jaxpr.outvars]


class _Value:
    """A variable of a flattened call: the same call may be written out twice."""

    def __init__(self, aval):
        self.aval = aval


def _new(v: Var) -> _Value:
    return _Value(v.aval)


def worst_moment(jaxpr: Jaxpr, is_loop: bool = False) -> Moment:
    """The most bytes stored at once beside the inputs."""
    equations, outputs = flat(jaxpr)
    late = dict.fromkeys(_run_last(equations), len(equations)) if is_loop else {}
    return _walk(equations, outputs, set(jaxpr.invars) | set(jaxpr.constvars), late)


def _run_last(equations: list[Equation]) -> set[int]:
    """Products that no other product needs."""
    products, needed = set(), set()
    makers: dict = {}
    for i, e in enumerate(equations):
        from_products = frozenset().union(*(makers.get(v, frozenset()) for v in _variables(e)))
        if e.name in PRODUCTS:
            products.add(i)
            needed |= from_products
            from_products = frozenset({i})
        makers.update(dict.fromkeys(e.outputs, from_products))
    return products - needed


def _walk(equations: list[Equation], outputs: list, inputs: set, late: dict[int, int]) -> Moment:
    producer = {v: i for i, e in enumerate(equations) for v in e.outputs}
    source, stored_by = _views(equations), {}
    kept = {source.get(v, v) for v in outputs if not isinstance(v, Literal)}
    for i, e in enumerate(equations):
        if e.name not in VIEWS:
            for v in e.outputs:
                if e.name in STORES or v in kept:
                    stored_by[v] = i
            if e.name in STORES and e.name not in REDUCES and not _scatters(e):
                for v in _variables(e):
                    origin = source.get(v, v)
                    if origin in producer and not _free(equations[producer[origin]]) and origin not in stored_by:
                        stored_by[origin] = i  # an operand: fused up to here, stored right before
    roots = _roots(equations, source, stored_by, inputs)
    last: dict = {}
    for i, e in enumerate(equations):
        if e.name in STORES or any(v in stored_by for v in e.outputs):
            at = late[i] if i in late else max([stored_by.get(v, i) for v in e.outputs if v in stored_by] or [i])
            for v in e.inputs:
                for r in _roots_of(v, source, stored_by, roots):
                    # A gradient is scattered where it arises, before it is added to others.
                    last[r] = max(last.get(r, -1), stored_by[r] if _scatters(e) else at)
        if e.name in STORES:
            for v in _variables(e):
                origin = source.get(v, v)
                if origin in stored_by and not _scatters(e):
                    last[origin] = max(last.get(origin, -1), late.get(i, i))
    for v in outputs:
        if not isinstance(v, Literal):
            for r in _roots_of(v, source, stored_by, roots):
                last[r] = len(equations)
    # A value normalised by a reduction is computed by a kernel that reduces and writes: it takes no operand's buffer.
    normalised = {v for v in stored_by if any(_is_reduction(r, equations, producer) for r in roots.get(v, ()))}
    return _sweep(equations, source, stored_by, last, normalised)


def _variables(e: Equation) -> list:
    """Its inputs but for constants."""
    return [v for v in e.inputs if not isinstance(v, Literal)]


def _views(equations: list[Equation]) -> dict:
    source: dict = {}
    for e in equations:
        if e.name in VIEWS:
            for v, o in zip(e.inputs, e.outputs):
                if not isinstance(v, Literal):
                    source[o] = source.get(v, v)
    return source


def _scatters(e: Equation) -> bool:
    return e.name == "scatter_gradients" and size_of(e.outputs[0]) < size_of(e.inputs[0])


def _is_reduction(v, equations, producer) -> bool:
    return v in producer and equations[producer[v]].name in REDUCES


def _free(e: Equation) -> bool:
    """Indices are made where they are needed, whatever their shape."""
    return e.name == "iota"


def _roots(equations, source, stored_by, inputs) -> dict:
    """For every fused variable, the stored ones that it is computed from."""
    roots: dict = {v: frozenset() for v in inputs}
    for e in equations:
        found = frozenset().union(*(_roots_of(v, source, stored_by, roots) for v in e.inputs)) if e.inputs else frozenset()
        for v in e.outputs:
            roots[v] = found
    return roots


def _roots_of(v, source, stored_by, roots) -> frozenset:
    if isinstance(v, Literal):
        return frozenset()
    origin = source.get(v, v)
    return frozenset({origin}) if origin in stored_by else roots.get(origin, frozenset())


def _sweep(equations, source, stored_by, last, normalised) -> Moment:
    born: dict[int, list] = {}
    for v, i in stored_by.items():
        born.setdefault(i, []).append(v)
    origin = {v: e.name for e in equations for v in e.outputs}
    live, worst = {}, Moment(0)
    for i, e in enumerate(equations):
        dying = {v: size_of(v) for v in live if last.get(v, -1) <= i}
        operands = [v for v in born.get(i, []) if v not in e.outputs]
        results = [v for v in born.get(i, []) if v in e.outputs]
        for v in operands:
            live[v] = origin[v]
        direct = {source.get(v, v) for v in _variables(e)}
        reused = 0
        for old, new in _in_place(e):
            if isinstance(old, Literal):
                continue
            old = source.get(old, old)
            if dying.get(old) == size_of(new):
                reused += dying.pop(old)
            elif old in operands and last.get(old, -1) <= i and size_of(old) == size_of(new):
                reused += size_of(new)
        for v in operands if e.name in STORES else [*operands, *results]:
            if v in normalised:
                continue
            match = next((d for d, s in dying.items() if s == size_of(v) and (v in e.outputs or d not in direct)), None)
            if match is not None:
                dying.pop(match)
                reused += size_of(v)
        inside = _inside(e)
        for v in results:
            live[v] = origin[v]
        now = sum(map(size_of, live)) - reused + inside.total_bytes
        if now > worst.total_bytes:
            buffers = [Buffer(size_of(v), n, getattr(v.aval, "shape", ()), False) for v, n in live.items()]
            worst = Moment(now, sorted(buffers + [b._replace(in_loop=True) for b in inside.buffers], reverse=True))
        for v in [v for v in live if last.get(v, -1) <= i]:
            del live[v]
    return worst


def _in_place(e: Equation) -> list[tuple]:
    """Operands whose buffers an operation may write its results to: what a loop carries, what a scatter adds to."""
    if e.name == "scan":
        first, num = _carried(e.params)
        return list(zip(e.inputs[first : first + num], e.outputs[:num]))
    return [(e.inputs[0], e.outputs[0])] if e.name in ("scatter-add", "scatter", "dynamic_update_slice") else []


def _carried(params: dict) -> tuple[int, int]:
    """Where a scan's carry begins among its operands, and of how many arrays it is."""
    if "ft_in" in params:  # jax 0.12 keeps structures in place of counts
        constants, carry, _ = params["ft_in"].unpack()
        return len(list(constants)), len(list(carry))
    return params["num_consts"], params["num_carry"]


def _inside(e: Equation) -> Moment:
    """The worst moment of a loop's or a branch's body."""
    if e.name == "scan":
        return worst_moment(e.params["jaxpr"].jaxpr, is_loop=True)
    if e.name == "while":
        return worst_moment(e.params["body_jaxpr"].jaxpr)
    if e.name == "cond":
        return max((worst_moment(b.jaxpr) for b in e.params["branches"]), key=lambda m: m.total_bytes)
    return Moment(0)
