"""Cuts of a grouped matrix product into tiles, and the arrays that a tile keeps in shared memory."""

from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from kernels_pallas.grouped_matmul.ending import PLAIN, ProductEnding
from kernels_pallas.grouped_matmul.reference import FP4_GROUP
from kernels_pallas.mosaic import SWIZZLE, WGMMA_ROWS
from kernels_pallas.quantised import BLOCK
from kernels_pallas.splits import CLUSTER, PROCESSORS

COMPUTE = 2  # computing warpgroups
# Scales of FP4 weights that a copy brings for each row, the fewest that a copy may have, and their terms.
FP4_SCALES = 16
FP4_SCALES_TERMS = FP4_SCALES * FP4_GROUP


@dataclass(frozen=True)
class Tile:
    """How the work is cut. Attributes:
    rows: number of rows of x per tile. 128: each computing warpgroup has 64 of them and all columns. 64: both
        have all rows and half of the columns, for groups of few rows. 256: two thread blocks, a cluster, have
        128 each, and share the weights, of which each fetches half; not of a gated product, whose two sums
        leave no register for the other thread block.
    columns: number of output columns per tile; in a gated product columns of gate, and of up.
    stages: number of the stages of the ring of operands in shared memory.
    splits: number of parts of K that are summed apart, for outputs too small to fill the GPU. In a gated
        product the thread blocks of a cluster have one each.
    thread_blocks: size of the persistent grid; an H100 or H200 has 132 multiprocessors. The parts of a gated
        product have thread blocks of their own.
    """

    rows: int
    columns: int
    stages: int = 4
    splits: int = 1
    thread_blocks: int = PROCESSORS

    @property
    def pair(self) -> int:
        """Thread blocks that have rows of one tile."""
        return 2 if self.rows == 4 * WGMMA_ROWS else 1


@dataclass(frozen=True)
class ProductSizes:
    """Sizes of one call.

    Attributes:
        tile: cut of the work.
        dtype: dtype of x, and of w but for FP4.
        gated: whether there are two products, gate and up.
        rows, columns, terms: M, N and K.
        tiles: number of tiles of rows.
        ending: the way to the results, among them their number of rows.
        fp4: whether w is FP4 (``fp4.py``), which the warpgroups expand.
        each: columns of each weight, where there are several.
    """

    tile: Tile
    dtype: DTypeLike
    gated: bool
    rows: int
    columns: int
    terms: int
    tiles: int
    ending: ProductEnding = PLAIN
    fp4: bool = False
    each: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        tile = self.tile
        if self.dtype not in (jnp.float8_e4m3fn, jnp.bfloat16):
            raise ValueError(f"operands are {self.dtype}; expected float8_e4m3fn or bfloat16")
        columns = (64, 128, 256) if tile.rows == WGMMA_ROWS else (64, 128)
        if tile.rows not in (WGMMA_ROWS, 2 * WGMMA_ROWS, 4 * WGMMA_ROWS) or tile.columns not in columns:
            raise ValueError(
                f"{tile}; expected 64 x (64, 128 or 256), or 128 or 256 x (64 or 128) rows x columns"
            )
        if self.fp4:
            self._check_fp4()
        if self.gated and self.tile.pair > 1:
            raise ValueError(f"{tile} of a gated product; expected 64 or 128 rows")
        if self.gated and (tile.columns != BLOCK or tile.splits > CLUSTER):
            raise ValueError(f"{tile} of a gated product; expected {BLOCK} columns, at most {CLUSTER} splits")
        for what, size, part in (
            ("columns", gcd(self.columns, *self.each), tile.columns),
            ("terms", self.terms, self.stage_terms * tile.splits),
        ):
            if size % part:
                raise ValueError(f"{size} {what} are not a multiple of {part}; expected one for {tile}")
        if self.rows < tile.rows:
            raise ValueError(f"{self.rows} rows; expected {tile.rows} or more for {tile}")

    def _check_fp4(self) -> None:
        if self.dtype != jnp.bfloat16 or self.weight_rows not in (WGMMA_ROWS, 2 * WGMMA_ROWS):
            raise ValueError(
                f"{self.tile} of {self.dtype} and FP4; expected bfloat16, and 64 rows x 128 or 256 columns"
            )
        if self.terms % FP4_SCALES_TERMS:
            raise ValueError(f"{self.terms} terms with FP4; expected a multiple of {FP4_SCALES_TERMS}")

    @property
    def fp8(self) -> bool:
        """Whether operands have block scales."""
        return self.dtype == jnp.float8_e4m3fn

    @property
    def blocks(self) -> int:
        """Products per tile."""
        return 2 if self.gated else 1

    @property
    def stage_terms(self) -> int:
        """Terms of K in one stage: their bytes fill the widest swizzle, with FP4 weights twice."""
        return SWIZZLE // jnp.dtype(self.dtype).itemsize * (2 if self.fp4 else 1)

    @property
    def steps(self) -> int:
        """Stages that one tile goes through."""
        return self.terms // self.stage_terms // self.tile.splits

    @property
    def column_tiles(self) -> int:
        """Tiles side by side."""
        return self.columns // self.tile.columns

    @property
    def edges(self) -> tuple[int, ...]:
        """First column tile of each weight, where there are several, and the end."""
        return tuple(accumulate((n // self.tile.columns for n in self.each), initial=0))

    @property
    def cluster(self) -> int:
        """Thread blocks that sum a tile together."""
        return self.tile.splits if self.gated else 1

    @property
    def block_rows(self) -> int:
        """Rows of a tile that a thread block has."""
        return self.tile.rows // self.tile.pair

    @property
    def walkers(self) -> int:
        """Walks over the tiles beside each other.

        Parts in a cluster have one tile each: no place is written twice.
        """
        if self.cluster > 1:
            return self.tiles * self.column_tiles * self.cluster
        return self.tile.thread_blocks // self.tile.pair

    @property
    def band(self) -> int:
        """Row tiles whose columns are walked together, so that tiles under way read the fewest operands.

        Tiles of a band are r row tiles times walkers / r columns: their operands are fewest where x has the
        number of rows that w has.
        """
        if self.tile.rows == WGMMA_ROWS:
            return 1
        return round((self.walkers * self.tile.columns * self.blocks / self.tile.rows) ** 0.5)

    @property
    def width(self) -> int:
        """Columns of one warpgroup, per product."""
        return self.tile.columns // (COMPUTE if self.tile.rows == WGMMA_ROWS else 1)

    @property
    def weight_rows(self) -> int:
        """Rows of w whose products one warpgroup has in a tile; 0 where both have the same rows of w."""
        return self.blocks * self.width if self.tile.rows == WGMMA_ROWS else 0

    @property
    def staged_dtype(self) -> DTypeLike:
        """The dtype of the values that warpgroups write through shared memory."""
        if self.tile.splits > 1:
            return jnp.float32
        return jnp.float8_e4m3fn if self.gated and self.fp8 else jnp.bfloat16

    def parts_type(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the parts of K, if they are summed apart."""
        if self.tile.splits == 1:
            return ()
        blocks = (self.blocks,) if self.gated else ()
        shape = (self.tile.splits, *blocks, self.ending.slots or self.rows, self.columns)
        return (jax.ShapeDtypeStruct(shape, jnp.float32),)

    def out_type(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the kernel's results."""
        if self.each:
            own = (replace(self, columns=columns, each=()) for columns in self.each)
            return tuple(result for sizes in own for result in sizes.out_type())
        if not self.gated and self.tile.splits > 1:
            return self.parts_type()
        quantised = self.gated and self.fp8
        dtype = jnp.float8_e4m3fn if quantised else jnp.bfloat16
        values = jax.ShapeDtypeStruct((self.ending.slots or self.rows, self.columns), dtype)
        if not quantised:
            return (values,)
        return values, jax.ShapeDtypeStruct((self.columns // BLOCK, self.tiles * self.tile.rows), jnp.float32)

    def scratch(self) -> dict[str, pl.MemoryRef | plgpu.Barrier]:
        """Shared memory and barriers of a thread block."""
        tile, copies = self.tile, 2 if self.fp4 else 1
        weights = (tile.stages, self.blocks, tile.columns)
        scratch: dict[str, Any] = {
            "xs": _operand((tile.stages, self.block_rows, self.stage_terms), self.dtype),
            "staged": _operand((COMPUTE, WGMMA_ROWS, self.width), self.staged_dtype),
            "full": plgpu.Barrier(num_arrivals=1 + self.blocks * copies, num_barriers=tile.stages),
            "free": plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=tile.stages),
        }
        if self.fp4:
            scratch["codes"] = plgpu.SMEM((*weights, self.stage_terms // 2), jnp.uint8)
            scratch["exponents"] = plgpu.SMEM((*weights, FP4_SCALES), jnp.uint8)
            # Twice 64 terms: a half is multiplied while the other is written.
            scratch["expanded"] = _operand((COMPUTE, 2, self.weight_rows, SWIZZLE // 2), self.dtype)
        else:
            scratch["ws"] = _operand((*weights, self.stage_terms), self.dtype)
        if self.tile.pair > 1:
            scratch["both_free"] = plgpu.ClusterBarrier(collective_axes=("half",), num_barriers=tile.stages)
        if self.cluster > 1:
            scratch["summed"] = plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=COMPUTE)
        elif self.staged_dtype == jnp.float8_e4m3fn:
            scratch["scales"] = plgpu.SMEM((COMPUTE, WGMMA_ROWS), jnp.float32)
        if "scales" in scratch and tile.rows == WGMMA_ROWS:
            scratch["peaks"] = plgpu.SMEM((2, COMPUTE, WGMMA_ROWS), jnp.float32)
            scratch["met"] = plgpu.Barrier(num_arrivals=COMPUTE)
        return scratch


def _operand(shape: tuple[int, ...], dtype: DTypeLike) -> pl.MemoryRef:
    """Shared memory laid out for wgmma and TMA, swizzled as wide as a row allows."""
    size = jnp.dtype(dtype).itemsize
    width = min(SWIZZLE, shape[-1] * size)
    transforms = (plgpu.TilingTransform((8, width // size)), plgpu.SwizzleTransform(width))
    return plgpu.SMEM(shape, dtype, transforms=transforms)
