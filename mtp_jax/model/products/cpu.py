"""``x @ w.T`` in forms that are fast on a CPU, for arrays and for weights narrower in memory than x."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mtp_jax.model.hf_quantization import FP8_BLOCK
from mtp_jax.model.narrow import Bf16, Fp8, InStack, Matrix, expand, index, nbytes, readable
from mtp_jax.model.params import Layer
from mtp_jax.model.products import cpu_lanes
from mtp_jax.model.products.cpu_lanes import CACHE_BYTES
from mtp_jax.model.products.plain import Products

# Above this number of rows plain ``x @ w.T`` is faster in float32; bfloat16 rows are padded to it.
_FEW_ROWS, _LEAST_ROWS = 64, 8
# Loops widen a weight again for each row. Up to this number of rows that costs no more than widening in
# memory. This is not measured at start-up: the order of sums, and so tokens, must be the same at every start.
LANED = 8
# Up to this number of rows the parts of all rows are multiplied together, so that weights are read once.
_TOGETHER = 32
# Most values of a widened block of a weight, which a core's cache holds as float32.
BLOCK = CACHE_BYTES // 4


@dataclass(frozen=True)
class CpuProducts(Products):
    """Products in forms that are fast on a CPU (docs/cpu.md).

    Attributes:
        matrices: whether the processor has matrix instructions for bfloat16.
    """

    matrices: bool = False

    @property
    def loops(self) -> bool:
        """Only on one device, where a loop's kernels are compiled once.

        XLA starts a CPU's collectives in one order, but a later collective does not wait for the end of a
        loop that has some: devices that begin the two in different orders wait for each other, until no
        thread is left.
        """
        return self.mesh is None or self.mesh.size == 1

    def product(self, x: Float[Array, "... i"], w: Matrix, dtype: Any) -> Float[Array, "..."]:
        """``x @ w.T``. On a mesh narrow weights are expanded."""
        flat, shape = x.reshape(-1, x.shape[-1]), (*x.shape[:-1], *w.shape[:-1])
        if readable(w) and x.dtype == jnp.float32:
            y = of_narrow(flat, w, self.matrices)
        else:
            y = of_arrays(flat, expand(w, x.dtype).reshape(-1, w.shape[-1]))
        return y.astype(dtype).reshape(shape)

    def head_parts(self, hidden: Float[Array, "*b D"]) -> int:
        """One part, all logits at once: memory is not scarce, and every part is a further pass."""
        return 1

    def reads_stacks(self, layer: Layer) -> bool:
        """Only of narrow weights: products of arrays, and matrix instructions, copy weights out of a stack.

        A layer with an indexer is not stacked, as it chooses for further layers.
        """
        attention, mlp = layer.attention, layer.mlp
        one = self.mesh is None and not self.matrices and getattr(attention, "indexer", None) is None
        return one and all(map(readable, (attention.o, mlp.gate_up, mlp.down)))


def of_arrays(x: Float[Array, "T i"], w: Float[Array, "o i"]) -> Float[Array, "T o"]:
    """``w @ x.T`` behind a barrier for few rows or in bfloat16.

    XLA would rewrite it into ``x @ w.T``, which is slower. bfloat16 is only fast if the product leaves
    float32, which the barrier keeps XLA from narrowing, and with more than one row.
    """
    rows, narrow = len(x), x.dtype == jnp.bfloat16
    if not narrow and rows > _FEW_ROWS:
        return _dot(x, w)
    if narrow and rows < _LEAST_ROWS:
        x = jnp.pad(x, ((0, _LEAST_ROWS - rows), (0, 0)))
    return jax.lax.optimization_barrier(_dot(w, x))[:, :rows].T


def of_narrow(x: Float[Array, "T i"], w: Bf16 | Fp8 | InStack, matrices: bool) -> Float[Array, "T O"]:
    """Rows in float32 with a weight as it lies in memory, seen as a matrix [O, i].

    matrices: whether the processor has matrix instructions for bfloat16. These multiply all but one row with
    a small weight: if a cache holds the weight, loops are faster than splitting the row into parts; from
    memory a weight arrives faster than loops multiply it.
    """
    if isinstance(w, Bf16) and matrices and (len(x) > 1 or nbytes(w) > CACHE_BYTES):
        return _in_parts(x, w)
    return cpu_lanes.product(x, w) if len(x) <= LANED else _in_blocks(x, w)


def _in_parts(x: Float[Array, "T i"], w: Bf16) -> Float[Array, "T O"]:
    """A product by matrix instructions for bfloat16: a float32 is the sum of three bfloat16, exactly.

    The products of each part with a bfloat16 weight are exact, too, and are summed in float32. One loop makes
    all parts, an activation before them included; cutting mantissas instead of rounding them keeps it cheap.
    """
    weight, rest, parts = w.values.reshape(-1, w.shape[-1]), x, []
    for _ in range(3):
        parts.append(_upper_half(rest))
        rest = rest - parts[-1]
    if len(x) > _TOGETHER:
        narrow = jax.lax.optimization_barrier([part.astype(jnp.bfloat16) for part in parts])
        high, middle, low = (jax.lax.optimization_barrier(_dot(part, weight)) for part in narrow)
        return high + (middle + low)
    count = 3 * len(x)
    padding = jnp.zeros((-count % _LEAST_ROWS, x.shape[1]), x.dtype)
    rows = jnp.concatenate([*parts, padding]).astype(jnp.bfloat16)
    product = of_arrays(jax.lax.optimization_barrier(rows), weight)
    high, middle, low = product[:count].reshape(3, len(x), -1)
    return high + (middle + low)


def _upper_half(x: Float[Array, "T i"]) -> Float[Array, "T i"]:
    """Each value cut to a bfloat16, as float32: two operations, where rounding takes many."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _in_blocks(x: Float[Array, "T i"], w: Bf16 | Fp8 | InStack) -> Float[Array, "T O"]:
    """Widens a block of outputs at a time, which the product then reads from a core's cache."""
    outputs, inputs = math.prod(w.shape[:-1]), w.shape[-1]
    block = math.gcd(outputs, max(FP8_BLOCK, 1 << (BLOCK // inputs).bit_length() >> 1))
    own = w.stack if isinstance(w, InStack) else w
    lead = own.shape[: len(own.shape) - len(w.shape)]
    blocks = own.reshape(*lead, -1, block, inputs)
    if isinstance(own, Fp8):
        if outputs // math.prod(own.scale.shape[len(lead) : -2]) % FP8_BLOCK:
            return of_arrays(x, w.expand(x.dtype).reshape(outputs, inputs))
        scale = own.scale.reshape(*lead, -1, block // FP8_BLOCK, own.scale.shape[-1])
        blocks = replace(blocks, scale=scale)
    blocks = replace(w, stack=blocks) if isinstance(w, InStack) else blocks

    def one(i: jax.Array, out: jax.Array) -> jax.Array:
        widened = jax.lax.optimization_barrier(expand(index(blocks, i), jnp.float32))
        return jax.lax.dynamic_update_slice_in_dim(out, of_arrays(x, widened), i * block, axis=1)

    empty = jnp.zeros((len(x), outputs), jnp.float32)
    return jax.lax.fori_loop(0, outputs // block, one, empty)


def _dot(a: Float[Array, "m i"], b: Float[Array, "n i"]) -> Float[Array, "m n"]:
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
