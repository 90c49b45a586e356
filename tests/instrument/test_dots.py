"""Matrix products as the text of compiled programs has them: jax's own, and those of a GPU's libraries."""

import jax
import jax.numpy as jnp
import pytest

from sharder.instrument.dots import text_flops


def compiled(f, *shapes) -> str:
    return jax.jit(f).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile().as_text()


def test_a_product_takes_two_operations_for_each_pair():
    assert text_flops(compiled(lambda a, b: a @ b, (64, 32), (32, 128))) == 2 * 64 * 32 * 128


def test_a_loop_counts_as_often_as_it_runs():
    def f(a):
        return jax.lax.scan(lambda x, _: (x @ a, None), a, length=7)[0]

    assert text_flops(compiled(f, (32, 32))) == 7 * 2 * 32**3


def test_batched_products_count_each():
    assert text_flops(compiled(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (5, 16, 32), (5, 64, 32))) == 5 * 2 * 16 * 32 * 64


PROGRAM = """HloModule jit_step

ENTRY %main (a: bf16[128,64], b: bf16[64,256]) -> bf16[128,256] {{
  %a = bf16[128,64]{{1,0}} parameter(0)
  %b = bf16[64,256]{{1,0}} parameter(1)
  {call}
}}
"""
GEMM = (
    '%c = (bf16[128,256]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
    '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
)


def test_a_librarys_matrix_product_counts():
    assert text_flops(PROGRAM.format(call=GEMM)) == 2 * 128 * 64 * 256


@pytest.mark.parametrize("target, passes", [("__cudnn$fmhaSoftmax", 2), ("__cudnn$fmhaSoftmaxBackward", 5)])
def test_fused_attention_counts_its_products(target, passes):
    text = """HloModule jit_step

ENTRY %main (q: bf16[2,128,8,64], k: bf16[2,256,8,64]) -> bf16[2,128,8,64] {
  %q = bf16[2,128,8,64]{3,2,1,0} parameter(0)
  %k = bf16[2,256,8,64]{3,2,1,0} parameter(1)
  %o = (bf16[2,128,8,64]{3,2,1,0}, u8[16]{0}) custom-call(%q, %k, %k), custom_call_target="TARGET"
}
"""
    assert text_flops(text.replace("TARGET", target)) == 2 * passes * 2 * 128 * 256 * 8 * 64
