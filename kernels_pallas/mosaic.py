"""Operations that a Mosaic GPU kernel must write differently when Pallas interprets it.

The interpreter knows no register layouts and starts every accumulator at zero. All other parts of a kernel
(control flow, shared memory, copies, barriers) are the same compiled and interpreted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Replicated, Tiling
from jax.experimental.mosaic.gpu.utils import warpgroup_barrier
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

# Pallas names no public types for the references that a kernel reads and writes, nor for register layouts.
Ref = Any
Layout = Any
# Numbers and slices of a reference's dimensions.
Index = tuple[object, ...]
# A warpgroup's values per row of queries: peak of scores, sum of exponentials over its own keys, output.
RunningSoftmax = tuple[jax.Array, jax.Array, jax.Array]
# The peak of no scores; finite, so that differences of it are not NaN.
NO_PEAK = -1e30


@runtime_checkable
class Interpreter(Protocol):
    """Parameters of Pallas' interpreter: ``InterpretGPUParams``, a public class from jax 0.11 on."""

    @property
    def detect_races(self) -> bool:
        """Whether the interpreter detects races."""
        ...


WGMMA = plgpu.Layout.WGMMA
WGMMA_ROW = WGMMA.reduce(1)
WGMMA_COLUMN = WGMMA.reduce(0)

# Numbers that the lanes of a warp hold, one each.
LINE = 32


def lines(width: int) -> Layout:
    """Layout of lines: a warp holds every fourth line; each lane holds the numbers that are 32 apart.

    width: number of lanes, which must divide 32. Lines narrower than 32 are held several times, and are
    ``width`` apart.
    """
    lanes = (-2,) if width == LINE else (Replicated(LINE // width), -2)
    return plgpu.Layout.TILED(Tiling(((4, width), (1,))), warp_dims=(-3,), lane_dims=lanes, vector_dim=-1)


LINES_OF = lines(LINE)
LINE_OF = LINES_OF.reduce(0)

# Rows of a wgmma: one warpgroup multiplies 64 rows at a time.
WGMMA_ROWS = 64
# jax 0.10 interprets no product of a transposed operand, and loads want an index of their own.
_JAX_0_11 = hasattr(plgpu, "InterpretGPUParams")
_STORE: Callable[..., None] | None = getattr(plgpu, "store", None)  # from jax 0.12 on
# Widest shared-memory row that a tensor-core operand of 128-byte swizzle has.
SWIZZLE = 128
# Bytes of shared memory that one thread block of a Hopper GPU can have.
SHARED = 232448


def operand_tiles(dtype: DTypeLike) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Shared-memory transforms of an array that feeds a wgmma."""
    return plgpu.TilingTransform((8, SWIZZLE // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(SWIZZLE)


@dataclass(frozen=True)
class Warpgroup:
    """The work of one warpgroup in its registers."""

    interpreted: bool

    def laid_out(self, x: jax.Array, layout: Layout = WGMMA) -> jax.Array:
        """``x`` in the given register layout."""
        return x if self.interpreted else plgpu.layout_cast(x, layout)

    def full(self, shape: tuple[int, ...], value: float) -> jax.Array:
        """A float32 matrix, or a value per row of one, in registers."""
        return self.laid_out(jnp.full(shape, value, jnp.float32), WGMMA if len(shape) == 2 else WGMMA_ROW)

    def row(self, ref: Ref) -> jax.Array:
        """One value per row of an accumulator, read from ``ref``."""
        return self.laid_out(ref[...], WGMMA_ROW)

    def gathered_row(self, ref: Ref) -> jax.Array:
        """One value per row, read from device memory, where they need not lie side by side."""
        if self.interpreted:
            return ref[...]
        whole = () if _JAX_0_11 else (...,)
        return plgpu.load(ref, *whole, layout=WGMMA_ROW, optimized=False)

    def iota(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        """Row (axis 0) or column (axis 1) numbers, int32, of a matrix or for each of its rows."""
        if self.interpreted:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        layout = WGMMA if len(shape) == 2 else WGMMA_ROW
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    def iota_of(self, shape: tuple[int, ...], axis: int, layout: Layout) -> jax.Array:
        """Row or column numbers in any layout."""
        if self.interpreted:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    def publish(self) -> None:
        """Make the warpgroup's writes to device memory visible to thread blocks that wait for it: a fence.

        A cluster's barrier alone orders neither the writes of all warps nor another block's reads after them.
        """
        if self.interpreted:
            return

        @plgpu.inline_mgpu()
        def fence(*_: Any) -> None:
            llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "fence.acq_rel.gpu;", "", has_side_effects=True)
            warpgroup_barrier()

        fence()

    def product(self, shape: tuple[int, int], *pairs: Callable[[], tuple[Ref, Ref]]) -> jax.Array:
        """Sum of ``a @ b.T`` over pairs of shared-memory refs, float32 of ``shape``.

        A pair is given as a function, because refs have to be indexed inside the scope that uses them.
        """
        if self.interpreted and not _JAX_0_11:
            operands = [pair() for pair in pairs]
            return sum((_dot(a[...], b[...].T) for a, b in operands), jnp.zeros(shape, jnp.float32))

        def multiply(acc: Ref) -> jax.Array:
            for pair in pairs:
                a, b = pair()
                plgpu.wgmma(acc, a, b.T)
            plgpu.wgmma_wait(0)
            return acc[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))

    def accumulated(self, acc: jax.Array, pair: Callable[[], tuple[Ref, Ref]]) -> jax.Array:
        """``acc + a @ b`` of two shared-memory refs."""

        def multiply(ref: Ref) -> None:
            a, b = pair()
            plgpu.wgmma(ref, a, b)
            plgpu.wgmma_wait(0)

        def from_zero(ref: Ref) -> jax.Array:
            multiply(ref)
            return ref[...]

        if self.interpreted:
            rows, columns = acc.shape
            return acc + pl.run_scoped(from_zero, plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32))
        result: Any = pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(acc))
        return result


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """A product of low-precision operands accumulated in float32, as the tensor cores do."""
    return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def per_column(x: jax.Array, rows: int) -> jax.Array:
    """A value per column, repeated over the rows of an accumulator."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), [1])


def per_row(x: jax.Array, columns: int) -> jax.Array:
    """A value per row, repeated over the columns of an accumulator."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])


def ordered(x: jax.Array) -> jax.Array:
    """Integers in the order of floats; the bits of negative floats, which count down, are inverted."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ (lax.shift_right_arithmetic(bits, 31) & 0x7FFFFFFF)


def signed(x: jax.Array) -> jax.Array:
    """The same integers, known to be signed.

    The result of ``where`` with a constant counts as unsigned in jax 0.11's lowering by lanes: the largest of
    its numbers would then be a negative one.
    """
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.float32), jnp.int32)


def load(ref: Ref, index: Index, layout: Layout) -> jax.Array:
    """Load from global memory straight into registers."""
    read: Any = plgpu.load
    if jax.__version_info__ < (0, 11):
        return read(ref, index, layout=layout, optimized=False)
    return read(ref.at[index], layout=layout, optimized=False)


def store(ref: Ref, x: jax.Array) -> None:
    """Store registers straight into global memory.

    Lanes of a layout that suits a kernel's reads may write less than a sector of memory together, which jax
    0.12 accepts only from a store that says so. Earlier releases have no such store.
    """
    if _STORE is None:
        ref[...] = x
    else:
        _STORE(ref, x, optimized=False)
