"""From the name that the compiler keeps of a source operation to what a person calls that part of a step.

A name is a path of named scopes, with what jax did to the code around them: `jit(step)/transpose(jvp(loss))/while/body/attention/dot_general`.
"""

import re

OUTER = {
    "vision": "vision",
    "augment": "vision",
    "action": "action expert",
    "suffix": "action expert",
    "action_out": "action expert",
}
"""Scopes that claim everything inside them, attention too."""
INNER = {
    "attention": "attention", "mlp": "feed-forward", "embed": "embedding", "head": "loss", "loss": "loss", "optimizer": "optimizer",
    "fingerprint": "fingerprint", "gradient_sums": "gradient sums",
}  # fmt: skip
"""Otherwise the innermost of these decides."""
CATEGORIES = (
    "attention", "feed-forward", "embedding", "vision", "action expert", "loss", "optimizer", "gradient sums", "fingerprint", "collectives",
    "copies", "data wait", "idle", "unattributed",
)  # fmt: skip
"""In the order in which they are shown; collectives are named with their mesh axes."""

_NAMES = re.compile(r"[A-Za-z_]\w*")
_PLUMBING = {
    "jit", "jvp", "transpose", "vmap", "while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "pjit", "shard_map",
    "custom_jvp_call", "custom_vjp_call", "remat", "scan", "branch", "convert_element_type", "squeeze", "broadcast_in_dim",
}  # fmt: skip


def scopes_of(op_name: str) -> tuple[str, ...]:
    """Named scopes of a source operation, outermost first; neither the function that was compiled nor the operation itself."""
    found: list[str] = []
    for part in op_name.split("/")[:-1]:
        if part.startswith("jit(") or "->" in part:
            continue  # a compiled function, or the formula of an einsum
        found += [n for n in _NAMES.findall(part) if n not in _PLUMBING and not n.startswith("branch_")]
    # What is computed again for the backward pass stands in its scope twice.
    return tuple(n for i, n in enumerate(found) if i == 0 or n != found[i - 1])


def category_of(scopes: tuple[str, ...]) -> str | None:
    """None where no scope says."""
    outer = next((OUTER[s] for s in scopes if s in OUTER), None)
    return outer or next((INNER[s] for s in reversed(scopes) if s in INNER), None)


def pass_of(op_name: str) -> str:
    """forward, backward, or recomputed: what is computed again for the backward pass."""
    if "rematted_computation" in op_name:
        return "recomputed"
    return "backward" if "transpose(" in op_name else "forward"


def kind_of(opcode: str) -> str:
    """What kind of work an instruction is, matrix products aside (`sharder.instrument.dots`)."""
    base = opcode.removesuffix("-start").removesuffix("-done")
    return next((kind for kind, opcodes in KINDS.items() if base in opcodes), "elementwise")


KINDS = {
    "collective": {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast", "ragged-all-to-all"},
    "reduction": {"reduce", "reduce-window", "sort", "select-and-scatter"},
    "copy": {
        "copy", "transpose", "concatenate", "slice", "dynamic-slice", "dynamic-update-slice", "gather", "scatter", "pad", "reverse", "reshape",
    },
    "free": {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "broadcast", "partition-id", "replica-id", "opt-barrier"},
    "control": {"while", "conditional", "call", "async", "custom-call", "fusion"},
}  # fmt: skip
KIND_ORDER = ("matrix product", "elementwise", "reduction", "copy", "collective", "other", "data wait", "idle")
