"""Numbers of 8 or 16 bits whose blocks share an exponent, from and to float32.

A block of adjacent elements keeps the exponent of its largest element, in 8 bits; an element has a few bits of exponent below
it, and of mantissa. So the steps between codes grow with the value, as in a float, and no bit is spent on a range that a
block does not have. (Shared exponents of powers of two: Open Compute Project, Microscaling Formats, 2023; theirs are for 32
elements too.)

Everything is arithmetic on integers: nothing is divided, nothing is rounded twice, no result depends on the order or on the
compiler, and what is stored has the same bits wherever a block lies whole on a device.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

MANTISSA = 23
"""Bits of float32's."""


@dataclass(frozen=True)
class Code:
    """How an element is written: a sign or none, so many bits of exponent, so many of mantissa."""

    exponent_bits: int
    mantissa_bits: int
    signed: bool

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(f"uint{self.exponent_bits + self.mantissa_bits + self.signed}")

    @property
    def top(self) -> int:
        """Exponent field of the largest element of a block."""
        return (1 << self.exponent_bits) - 1

    @property
    def largest(self) -> int:
        """The largest code, without its sign."""
        return (1 << self.exponent_bits + self.mantissa_bits) - 1


def encode(x: jax.Array, dim: int, size: int, code: Code) -> tuple[jax.Array, jax.Array]:
    """Codes of float32 `x`, of its shape, and exponents uint8, one for `size` elements along `dim`.

    Rounded to nearest, ties to even, and not beyond the largest code. What is not 0 does not become 0 where there is no sign:
    a second moment that is too small for its block is kept too large, so that steps are too small and never too large. What is
    below the smallest normal float32 counts as 0.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    field = (bits >> MANTISSA & 0xFF).astype(jnp.int32)
    blocks = field.reshape(*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])
    exponents = blocks.max(dim + 1)
    whole = bits & 0x7FFFFF | 1 << MANTISSA
    own = field - _spread(exponents, dim, size) + code.top
    # Elements of an exponent below 1 have no hidden bit in their code. A shift by 25 leaves nothing of 24 bits.
    shift = jnp.minimum(MANTISSA - code.mantissa_bits + jnp.maximum(1 - own, 0), MANTISSA + 2).astype(jnp.uint32)
    half_or_less = (jnp.uint32(1) << shift - 1) - 1 + (whole >> shift & 1)
    rounded = whole + half_or_less >> shift
    codes = (jnp.maximum(own, 1) - 1).astype(jnp.uint32) * (1 << code.mantissa_bits) + rounded
    codes = jnp.minimum(codes, code.largest)
    if code.signed:
        codes |= bits >> 31 << code.exponent_bits + code.mantissa_bits
    else:
        codes = jnp.maximum(codes, 1)
    codes = jnp.where(field > 0, codes, 0)
    return codes.astype(code.dtype), exponents.astype(jnp.uint8)


def decode(codes: jax.Array, exponents: jax.Array, dim: int, size: int, code: Code) -> jax.Array:
    """float32 from what `encode` made."""
    bits = codes.astype(jnp.int32) & code.largest
    field = bits >> code.mantissa_bits
    whole = bits & (1 << code.mantissa_bits) - 1 | jnp.where(field > 0, 1 << code.mantissa_bits, 0)
    unit = jnp.maximum(field, 1) + _spread(exponents.astype(jnp.int32), dim, size) - code.top - code.mantissa_bits
    # A unit below the smallest normal float32 is none: those are flushed to 0 by CPUs, and by the compiler where it likes.
    power = jax.lax.bitcast_convert_type(jnp.maximum(unit, 0) << MANTISSA, jnp.float32)
    x = whole.astype(jnp.float32) * power
    return jnp.where(codes >> code.exponent_bits + code.mantissa_bits > 0, -x, x) if code.signed else x


def _spread(exponents: jax.Array, dim: int, size: int) -> jax.Array:
    """Of every element of a block."""
    return jnp.repeat(exponents, size, dim)
