"""Whose time an instruction's is: members of fusions, loops' plumbing, neighbours."""

import jax
import jax.numpy as jnp
import pytest

from sharder.instrument.attribution import Attribution
from sharder.instrument.hlo import parse
from sharder.instrument.scopes import category_of, pass_of, scopes_of

PROGRAM = """HloModule jit_step, is_scheduled=true

%fused_products (p0: f32[8,4], p1: f32[4,16], p2: f32[4,48]) -> f32[8,48] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = f32[4,16]{1,0} parameter(1)
  %p2 = f32[4,48]{1,0} parameter(2)
  %d1 = f32[8,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/attention/dot_general"}
  ROOT %d2 = f32[8,48]{1,0} dot(%p0, %p2), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/mlp/dot_general"}
}

%fused_bytes (q0: f32[8,48], q1: f32[8,16]) -> f32[8,48] {
  %q0 = f32[8,48]{1,0} parameter(0)
  %q1 = f32[8,16]{1,0} parameter(1)
  %e1 = f32[8,16]{1,0} exponential(%q1), metadata={op_name="jit(step)/attention/exp"}
  ROOT %e2 = f32[8,48]{1,0} tanh(%q0), metadata={op_name="jit(step)/transpose(jvp(mlp))/tanh"}
}

ENTRY %main (a: f32[8,4], b: f32[4,16], c: f32[4,48]) -> f32[8,48] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[4,16]{1,0} parameter(1)
  %c = f32[4,48]{1,0} parameter(2)
  %moved = f32[4,16]{1,0} copy(%b)
  %lost = f32[8,4]{1,0} copy(%a)
  %products = f32[8,48]{1,0} fusion(%a, %moved, %c), kind=kOutput, calls=%fused_products, metadata={op_name="jit(step)/mlp/dot_general"}
  %sum = f32[8,48]{1,0} all-reduce(%products), replica_groups={{0,1}}, to_apply=%add, metadata={op_name="jit(step)/mlp/add"}
  ROOT %bytes = f32[8,48]{1,0} fusion(%sum, %b), kind=kLoop, calls=%fused_bytes, metadata={op_name="jit(step)/transpose(jvp(mlp))/tanh"}
}
"""


@pytest.fixture(scope="module")
def shares():
    attribution = Attribution(parse(PROGRAM), {"sum": "fsdp"})
    return lambda name: {(p.category, p.kind): share for p, share in attribution.split(name).items()}


def test_products_in_a_fusion_divide_it_by_their_flops(shares):
    assert shares("products") == pytest.approx(
        {("attention", "matrix product"): 0.25, ("feed-forward", "matrix product"): 0.75}
    )


def test_without_products_bytes_divide_a_fusion(shares):
    assert shares("bytes") == pytest.approx({("attention", "elementwise"): 0.25, ("feed-forward", "elementwise"): 0.75})


def test_a_collective_is_named_by_its_axes_and_not_by_its_scope(shares):
    assert shares("sum") == {("collectives fsdp", "collective"): 1.0}


def test_a_copy_without_a_scope_goes_to_whoever_uses_it(shares):
    """The only user of %moved is the fusion of both products, whose own name is that of the feed-forward."""
    assert shares("moved") == {("feed-forward", "copy"): 1.0}


def test_a_copy_that_nobody_uses_is_a_copy(shares):
    assert shares("lost") == {("copies", "copy"): 1.0}


def scanned(x, weights):
    def body(x, w):
        with jax.named_scope("attention"):
            x = jnp.sin(x @ w)
        return x, None

    return jax.lax.scan(body, x, weights)[0].sum()


def test_what_a_loop_stacks_and_takes_apart_goes_to_its_body():
    """The loops of a scan and of its gradient: slices of weights, kept values, gradients written one layer at a time."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (5, 64, 64))]
    program = parse(jax.jit(jax.grad(scanned, argnums=1)).lower(*shapes).compile().as_text())
    attribution = Attribution(program, {})
    loops = [i for instructions in program.computations.values() for i in instructions if i.opcode == "while"]
    bodies = [program.computations[loop.attribute(r"body=%?([\w.\-]+)")] for loop in loops]
    large = [
        i
        for body in bodies
        for i in body
        if i.opcode in ("fusion", "dot", "copy") and "[64,64]" in i.type or "[5,64,64]" in i.type
    ]
    of = {
        i.name: sum(share for part, share in attribution.split(i.name).items() if part.category == "attention") for i in large
    }
    assert len(of) >= 4 and min(of.values()) > 0.99, of  # the rest is arithmetic of indices


@pytest.mark.parametrize(
    "op_name, scopes, category, direction",
    [
        (
            "jit(step)/jvp()/while/body/closed_call/attention/BKMS,BKSH->BKMH/dot_general",
            ("attention",),
            "attention",
            "forward",
        ),
        ("jit(step)/transpose(jvp(loss))/while/body/dot_general", ("loss",), "loss", "backward"),
        ("jit(step)/while/body/checkpoint/rematted_computation/mlp/mlp/tanh", ("mlp",), "feed-forward", "recomputed"),
        ("jit(step)/vision/while/body/attention/dot_general", ("vision", "attention"), "vision", "forward"),
        ("jit(step)/while/body/attention/action/dot_general", ("attention", "action"), "action expert", "forward"),
        ("jit(step)/while/body/attention/backbone/dot_general", ("attention", "backbone"), "attention", "forward"),
        ("jit(step)/mlp/planted/while/body/dot_general", ("mlp", "planted"), "feed-forward", "forward"),
        ("jit(step)/while/body/dynamic_slice", (), None, "forward"),
    ],
)
def test_a_name_of_the_compiler_tells_part_and_direction(op_name, scopes, category, direction):
    assert (scopes_of(op_name), category_of(scopes_of(op_name)), pass_of(op_name)) == (scopes, category, direction)
