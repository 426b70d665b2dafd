"""Narrow weights: they stay in memory as the checkpoint stores them, narrower than they are multiplied.

A narrow weight stands in the tree of parameters in place of an array. It is a tree of arrays itself, with the
leading dimensions of the weight, so that experts are indexed, and split over a mesh, as those of an array.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8, Int16, PyTree, UInt8, UInt16

from mtp_jax.machine import converts_float16
from mtp_jax.model.hf_quantization import FP8_BLOCK, INT4_PER_WORD

E4M3_UNIT = 2.0**8
"""See ``e4m3_of_bits``: the exponents of float16 and e4m3 have the biases 15 and 7."""
_E2M1_UNIT = 14
"""See ``Fp4.expand``: the exponents of float16 and e2m1 have the biases 15 and 1."""
MOST_UE8M0 = 254 - _E2M1_UNIT
"""The largest exponent of an FP4 weight's scale, so that the scale times 2^14 is a float32."""


class Narrow(ABC):
    """A narrow weight."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""

    @abstractmethod
    def expand(self, dtype: DTypeLike) -> Float[Array, "*o i"]:
        """The weight as loading dequantises it: products in float32, rounded to ``dtype`` once."""

    @abstractmethod
    def reshape(self, *shape: int) -> "Narrow":
        """The same matrices, their rows or columns grouped differently."""

    def by_groups(self, each: int) -> Any:
        """The matrices of a stack [N, r, c] in groups, [N / each, each, r, c], with their scales."""
        return jax.tree.map(lambda a: a.reshape(*a.shape[:-3], -1, each, *a.shape[-2:]), self)


@struct.dataclass
class Bf16(Narrow):
    """bfloat16 weights of a model that computes in float32.

    Attributes:
        values: bfloat16, of the parameter's shape.
        bits: the same memory as uint16; None except on a CPU (``with_bits``).
    """

    values: Any
    bits: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.values.shape

    def expand(self, dtype: DTypeLike) -> Float[Array, "*o i"]:
        """The values."""
        wide = self.values.astype(jnp.float32) if self.bits is None else bf16_of_bits(self.bits)
        return wide.astype(dtype)

    def reshape(self, *shape: int) -> "Bf16":
        """The same values, grouped differently."""
        return jax.tree.map(lambda a: a.reshape(shape), self)


@struct.dataclass
class Fp8(Narrow):
    """Block-scaled FP8 (arXiv 2412.19437, section 3.3).

    Attributes:
        values: float8_e4m3fn, of the parameter's shape.
        scale: float32, one for each 128x128 block of the weight seen as the matrix of its checkpoint tensor,
            with the leading dimensions that stack such matrices.
        bits: the memory of ``values`` as int8; None except on a CPU (``with_bits``).
    """

    values: Any
    scale: Any
    bits: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.values.shape

    def expand(self, dtype: DTypeLike) -> Float[Array, "*o i"]:
        """Values times the scale of their block."""
        bits = self.bits
        wide = self.values.astype(jnp.float32) if bits is None else e4m3_of_bits(bits) * E4M3_UNIT
        matrix = wide.reshape(*self.scale.shape[:-2], -1, self.shape[-1])
        spread = jnp.repeat(jnp.repeat(self.scale, FP8_BLOCK, axis=-2), FP8_BLOCK, axis=-1)
        spread = spread[..., : matrix.shape[-2], : matrix.shape[-1]]
        return (matrix * spread).astype(dtype).reshape(self.shape)

    def reshape(self, *shape: int) -> "Fp8":
        """The same matrices, their rows or columns grouped differently."""
        bits = None if self.bits is None else self.bits.reshape(shape)
        return Fp8(self.values.reshape(shape), self.scale, bits)


class _Packed(Narrow):
    """Rows in which several values share a word or a byte."""

    def reshape(self, *shape: int) -> "_Packed":
        """The same rows, grouped differently; whole inputs stay last."""
        rows = shape[:-1]
        return jax.tree.map(lambda a: a.reshape((*rows, a.shape[-1])), self)


@struct.dataclass
class Int4(_Packed):
    """Signed 4-bit values with a scale for each group of inputs, as compressed-tensors packs them.

    Attributes:
        words: int32 [*o, i / 8]: value j of a word is its bits 4 j to 4 j + 3, plus 8.
        scale: bfloat16, float16 or float32 [*o, i / group].
    """

    words: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return *self.words.shape[:-1], self.words.shape[-1] * INT4_PER_WORD

    def expand(self, dtype: DTypeLike) -> Float[Array, "*o i"]:
        """Values times the scale of their group."""
        shifts = jnp.arange(INT4_PER_WORD, dtype=jnp.int32) * (32 // INT4_PER_WORD)
        values = ((self.words[..., None] >> shifts) & 15) - 8
        in_groups = values.reshape(*self.scale.shape, -1).astype(jnp.float32)
        spread = self.scale[..., None].astype(jnp.float32)
        return (in_groups * spread).astype(dtype).reshape(self.shape)


@struct.dataclass
class Fp4(_Packed):
    """e2m1 with a power of two for each 32 inputs, as DeepSeek-V4 stores its experts (OCP MX, MXFP4).

    Attributes:
        codes: uint8 [*o, i / 2]: two values, the low four bits first.
        exponents: uint8 [*o, i / 32]: x stands for a scale of 2^(x - 127).
    """

    codes: Any
    exponents: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return *self.codes.shape[:-1], self.codes.shape[-1] * 2

    def expand(self, dtype: DTypeLike) -> Float[Array, "*o i"]:
        """Values times the scale of their group.

        A float16 with the same sign, exponent and mantissa is smaller by 2^14, also if subnormal, and the
        scales are larger by it.
        """
        bits = (self.exponents.astype(jnp.uint32) + _E2M1_UNIT) << 23
        spread = jax.lax.bitcast_convert_type(bits, jnp.float32)[..., None]
        halves = _e2m1_of_codes(self.codes).reshape(*self.exponents.shape, -1)
        return (halves * spread).astype(dtype).reshape(self.shape)


@struct.dataclass
class Nvfp4(_Packed):
    """e2m1 with an e4m3 scale for each 16 inputs, and a float32 scale of the whole weight, in every row.

    Attributes:
        codes: uint8 [*o, i / 2]: two values, the low four bits first.
        times, over: float32 [*o, 1]: the factor and the divisor of the row's scales; one of them is 1, as a
            layout has.
        scale: uint8 [*o, i / 16], the bytes of e4m3: XLA on a CPU would widen a whole stack of e4m3.
    """

    codes: Any
    times: Any
    over: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return *self.codes.shape[:-1], self.codes.shape[-1] * 2

    def expand(self, dtype: DTypeLike) -> Float[Array, "*o i"]:
        """Values times the scale of their group, which is rounded to float32 first."""
        # XLA would multiply by the inverse of a divisor that it sees to be the same in a whole row.
        over = jax.lax.optimization_barrier(jnp.broadcast_to(self.over, self.scale.shape))
        scale = e4m3_of_bits(self.scale.astype(jnp.int8)) * E4M3_UNIT
        spread = scale * self.times / over
        halves = _e2m1_of_codes(self.codes).reshape(*self.scale.shape, -1) * 2.0**_E2M1_UNIT
        return (halves * spread[..., None]).astype(dtype).reshape(self.shape)


def _e2m1_of_codes(codes: UInt8[Array, "*o c"]) -> Float[Array, "*o c two"]:
    """The two values of each byte over 2^14, in float32 (see ``Fp4.expand``)."""
    codes = codes.astype(jnp.int16)
    low = _moved(codes, 0x7, 2**9) | _moved(codes, 0x8, 2**12)
    high = _moved(codes, 0x70, 2**5) | _moved(codes, 0x80, 2**8)
    return float16_of_bits(jnp.stack([low, high], axis=-1))


def _moved(codes: Int16[Array, "*b"], mask: int, by: int) -> Int16[Array, "*b"]:
    """Some bits, moved up by a product. (A shift would test its width each time.)"""
    return (codes & jnp.int16(mask)) * jnp.int16(by)


@struct.dataclass
class InStack(Narrow):
    """A weight of a stack, read in place: slices of inputs are taken first, and then the weight.

    Attributes:
        stack: the n weights, with bits, along a first axis. at: index of the weight.
    """

    stack: Bf16 | Fp8
    at: Int[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.stack.shape[1:]

    def expand(self, dtype: DTypeLike) -> Float[Array, "*o i"]:
        """The weight as its class expands it."""
        return expand(index(self.stack, self.at), dtype)

    def reshape(self, *shape: int) -> "InStack":
        """The same matrices, grouped differently, in every weight of the stack."""
        return replace(self, stack=self.stack.reshape(self.stack.shape[0], *shape))

    def by_groups(self, each: int) -> "InStack":
        """See ``Narrow``."""
        return replace(self, stack=self.stack.by_groups(each))


def with_bits(w: PyTree) -> PyTree:
    """A weight on a CPU with its ``bits``; other weights unchanged.

    XLA on a CPU widens a whole stack of bfloat16 or e4m3 before it takes a slice of it, but not a stack of
    integers. Both arrays lie in the same memory.
    """
    if not isinstance(w, Bf16 | Fp8):
        return w
    bits = np.asarray(w.values).view(np.uint16 if isinstance(w, Bf16) else np.int8)
    return replace(w, bits=bits if isinstance(w.values, np.ndarray) else jax.device_put(bits, may_alias=True))


def without_bits(w: PyTree) -> PyTree:
    """Undoes ``with_bits``."""
    return replace(w, bits=None) if isinstance(w, Bf16 | Fp8) and w.bits is not None else w


def index(w: Float[Array, "E *o i"] | Narrow, e: Int[Array, ""]) -> Float[Array, "*o i"] | Narrow:
    """A weight of a stack. Where there are bits, only they are looked up, and values are made of them.

    XLA on a CPU would widen the whole stack of values first (``with_bits``).
    """
    at: tuple[Any, ...] = (e,)
    if isinstance(w, InStack):
        w, at = w.stack, (w.at, e)

    def pick(a: jax.Array) -> jax.Array:
        rest = a.shape[len(at) :]
        found = jax.lax.dynamic_slice(a, (*at, *(0 for _ in rest)), (*(1 for _ in at), *rest))
        return found.reshape(rest)

    one = jax.tree.map(pick, w)
    if not isinstance(one, Bf16 | Fp8) or one.bits is None:
        return one
    return replace(one, values=jax.lax.bitcast_convert_type(one.bits, one.values.dtype))


def flat(w: Float[Array, "E *o i"] | Narrow) -> tuple[Float[Array, "F *o i"] | Narrow, Int[Array, ""] | int]:
    """Experts of a layer, or of all layers of a stack, and the index of the layer's first expert."""
    if not isinstance(w, InStack):
        return w, 0
    return w.stack.reshape(-1, *w.shape[1:]), w.at * w.shape[0]


def nbytes(weights: PyTree) -> int:
    """Bytes that a tree of weights, or of their shapes, takes in memory; ``bits`` take none of their own."""
    return sum(map(_nbytes, jax.tree.leaves(weights, is_leaf=is_narrow)))


def _nbytes(w: PyTree) -> int:
    if isinstance(w, InStack):
        return _nbytes(w.stack) // w.stack.shape[0]
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(without_bits(w)))


def readable(w: object) -> TypeGuard["Bf16 | Fp8 | InStack"]:
    """Whether a weight is narrow and has bits that loops can read."""
    return isinstance(w, InStack) or (isinstance(w, Bf16 | Fp8) and w.bits is not None)


def bf16_of_bits(bits: UInt16[Array, "*b"]) -> Float[Array, "*b"]:
    """bfloat16 as float32: bfloat16 is the upper half of a float32."""
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def e4m3_of_bits(bits: Int8[Array, "*b"]) -> Float[Array, "*b"]:
    """e4m3 over ``E4M3_UNIT`` as float32; NaN apart, which a checkpoint may not have.

    A float16 with the same sign, exponent and mantissa is smaller by that factor, also if subnormal. A
    product with 128 moves the bits up by 7 and leaves the sign in bits 14 and 15; the mask clears bit
    14. (A shift would test its width each time.)
    """
    return float16_of_bits((bits.astype(jnp.int16) * 128) & jnp.int16(-0x4001))


def float16_of_bits(bits: Int16[Array, "*b"]) -> Float[Array, "*b"]:
    """float16 as float32, exactly; NaN and infinities apart."""
    if converts_float16():
        return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
    size = bits.astype(jnp.int32) & 0x7FFF
    # The exponent's bias is 127 instead of 15; a subnormal number is a multiple of 2^-24.
    normal = jax.lax.bitcast_convert_type((size << 13) + (112 << 23), jnp.float32)
    wide = jnp.where(size < 1 << 10, size.astype(jnp.float32) * 2.0**-24, normal)
    return jnp.where(bits < 0, -wide, wide)


def is_narrow(x: object) -> bool:
    """Whether a node is a narrow weight: a leaf for walks over trees of weights."""
    return isinstance(x, Narrow)


def expand(w: Float[Array, "*o i"] | Narrow, dtype: DTypeLike) -> Float[Array, "*o i"]:
    """A weight as an array; a narrow weight is expanded."""
    return w.expand(dtype) if isinstance(w, Narrow) else w


Matrix = Float[Array, "*o i"] | Narrow
"""The weight of a product."""
Table = Float[Array, "V D"] | Bf16
"""An embedding, or the head."""

ByHead = Float[Array, "N _o C"] | Narrow
"""A matrix of each head."""


def rows_of(table: Table, ids: Int[Array, "*b"]) -> Float[Array, "*b D"]:
    """Rows of a table, in float32 if it is narrow. Ids outside the table get its nearest row."""
    rows = jax.tree.map(lambda a: jnp.take(a, ids, axis=0, mode="clip"), table)
    return expand(rows, jnp.float32)
