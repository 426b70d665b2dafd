"""FP4 weights in the kernel: e2m1 values, two to a byte, with a power of two for each 32 of a row (OCP MX).

They become bfloat16 on the way from shared memory to shared memory, exactly: bfloat16 holds e2m1 times any
scale of up to 2^125. A lane expands words of eight values, and writes each to 16 bytes of an operand.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import Replicated, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from kernels_pallas.grouped_matmul.reference import FP4_GROUP, expand_fp4
from kernels_pallas.grouped_matmul.tile import FP4_SCALES, ProductSizes
from kernels_pallas.mosaic import WGMMA_ROWS, Layout, Ref, load

TERMS = 64
"""Values of a row that are expanded at a time: as bfloat16 they fill the widest swizzle."""
GROUPS = TERMS // FP4_GROUP
"""Scales of these values."""
# Bits of e2m1 in the place of bfloat16's lowest exponent bits and highest bit of mantissa are 2^-126 of it,
# also of a subnormal number: the biases are 1 and 127.
_UNIT = 2.0**126


def _layout(width: int, each: int, lanes: tuple[Any, ...] = (-3, -2)) -> Layout:
    """Layout of 64 rows. A warp has 16 of them, four at a time, and a lane ``each`` neighbours of a row."""
    tiling = Tiling(((WGMMA_ROWS, width), (16, width), (4, width), (each,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=lanes, vector_dim=-1)


CODES, _WORDS, VALUES = _layout(TERMS // 2, 4), _layout(TERMS // 8, 1), _layout(TERMS, 8)
SCALES = _layout(GROUPS, 1, (-3, -2, Replicated(4)))


@dataclass(frozen=True)
class Fp4Product:
    """A warpgroup's product of bfloat16 rows and FP4 weights.

    Attributes:
        scratch: shared memory and barriers, see ``ProductSizes.scratch``.
        interpreted: whether Pallas interprets the kernel.
    """

    sizes: ProductSizes
    scratch: dict[str, Ref]
    interpreted: bool

    def sums(
        self, wg: jax.Array, column: jax.Array | int, filled: jax.Array, first: jax.Array
    ) -> tuple[jax.Array, ...]:
        """The sums over a tile's stages; while 64 terms are multiplied, the next 64 are expanded.

        column: the warpgroup's first row of w in the tile. filled: number of stages that were filled before
        the tile. first: number of the first of its stages in a row of w.
        """
        sizes, s = self.sizes, self.scratch
        stages, width = sizes.tile.stages, sizes.width

        def over_k(acc: Ref) -> jax.Array:
            def step(k: jax.Array, _: None) -> None:
                slot = lax.rem(filled + k, stages)
                plgpu.barrier_wait(s["full"].at[slot])
                for half in range(2):
                    self.expand(wg, column, slot, first + k, half)
                    # When a warp passes the next line, all have multiplied the terms before, whose half
                    # of the room is then free.
                    plgpu.wgmma_wait(0)
                    plgpu.commit_smem()
                    if half == 0:
                        before = s["free"].at[lax.rem(filled + k + (stages - 1), stages)]
                        pl.when(k > 0)(lambda before=before: plgpu.barrier_arrive(before))
                    x = s["xs"].at[slot, :, pl.ds(half * TERMS, TERMS)]
                    plgpu.wgmma(acc, x, s["expanded"].at[wg, half].T)

            lax.fori_loop(0, sizes.steps, step, None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(s["free"].at[lax.rem(filled + (sizes.steps - 1), stages)])
            return acc[...]

        acc = plgpu.WGMMAAccumulatorRef((WGMMA_ROWS, sizes.weight_rows), jnp.float32)
        sums = pl.run_scoped(over_k, acc)
        return tuple(sums[:, b * width : (b + 1) * width] for b in range(sizes.blocks))

    def expand(
        self, wg: jax.Array, column: jax.Array | int, slot: jax.Array, stage: jax.Array, half: int
    ) -> None:
        """Expand half of a stage's terms of the warpgroup's rows of w: gate's before up's.

        stage: its number in a row of w.
        """
        sizes, s = self.sizes, self.scratch
        rows, codes = pl.ds(column, sizes.width), pl.ds(half * (TERMS // 2), TERMS // 2)
        group = lax.rem(stage * (sizes.stage_terms // FP4_GROUP), FP4_SCALES) + half * GROUPS
        read, scales = (
            s["codes"].at[slot, :, rows, codes],
            s["exponents"].at[slot, :, rows, pl.ds(group, GROUPS)],
        )
        expand(read, scales, s["expanded"].at[wg, half], self.interpreted)


def expand(codes: Ref, exponents: Ref, to: Ref, interpreted: bool) -> None:
    """Expand 64 values of each row in shared memory; the work of a warpgroup.

    codes: uint8 [b, n, 32], n a multiple of 64. exponents: uint8 [b, n, 2]. to: bfloat16 [b * n, 64]. All
    rows at once, as each store stops the warpgroup twice.
    """
    if interpreted:
        to[...] = expand_fp4(codes[...], exponents[...]).astype(jnp.bfloat16).reshape(to.shape)
        return
    code, exponent = load(codes, (...,), CODES), load(exponents, (...,), SCALES)
    scale = jnp.maximum(exponent.astype(jnp.uint16) << 7, jnp.uint16(0x40))  # 2^-127 is subnormal
    values = plgpu.ShapeDtypeStruct(to.shape, jnp.bfloat16, layout=VALUES)
    products = plgpu.inline_mgpu(arg_types=(CODES, SCALES), return_type=values)(_by_lane)
    to[...] = products(code, lax.bitcast_convert_type(scale, jnp.bfloat16))


def bits(word: Any) -> tuple[Any, ...]:
    """The four pairs of neighbours among an int32's eight e2m1 values, as bfloat16 that are 2^-126 of them.

    Each of four steps takes a value of both halves of the word; then halves are put together.
    """
    moved = (word << 12, word << 8, word << 4, word)
    a, b, c, d = ((m & -0x7FFF8000) | ((m >> 6) & 0x01C001C0) for m in moved)
    low = [(x & 0xFFFF) | (y << 16) for x, y in ((a, b), (c, d))]
    high = [((x >> 16) & 0xFFFF) | (y & -0x10000) for x, y in ((a, b), (c, d))]
    return *low, *high


def _by_lane(_: Any, codes: Any, scales: Any) -> Any:
    """Each lane's values times their scales, in its registers: rows of all b one after the other."""
    bf16, i32 = ir.BF16Type.get(), ir.IntegerType.get_signless(32)
    one, eight = ir.VectorType.get((1,), i32), ir.VectorType.get((8,), bf16)
    unit = ir.DenseElementsAttr.get_splat(eight, ir.FloatAttr.get(bf16, _UNIT))
    words = _mapped(lambda code: mgpu.utils.bitcast(code, one), _rows(codes))
    pairs = bits(mgpu.FragmentedArray(_registers=words, _layout=_WORDS.to_mgpu(), _is_signed=True))

    def product(scale: Any, *pairs: Any) -> Any:
        small = mgpu.utils.bitcast(mgpu.utils.vector_concat(pairs), eight)
        value = arith.mulf(small, arith.constant(eight, unit))
        return arith.mulf(value, vector.broadcast(eight, vector.extract(scale, [], [0])))

    registers = _mapped(product, _rows(scales), *(pair.registers for pair in pairs))
    return mgpu.FragmentedArray(_registers=registers, _layout=VALUES.to_mgpu(), _is_signed=None)


def _rows(x: Any) -> np.ndarray:
    """Registers of an array [b, n, c], in the places that they have in [b * n, c]."""
    return x.registers.reshape(-1, *x.registers.shape[2:])


def _mapped(function: Callable[..., Any], *registers: np.ndarray) -> np.ndarray:
    """A function of the registers of arrays, place by place."""
    out = np.empty_like(registers[0])
    for place in np.ndindex(out.shape):
        out[place] = function(*(of_array[place] for of_array in registers))
    return out
