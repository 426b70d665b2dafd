"""One launch that merges the attention of parts of a slot's rows by their log-sum-exps.

A warpgroup has a query row, and each of its lanes four numbers of the row.
"""

from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels_pallas.mosaic import NO_PEAK, Interpreter, Layout, Ref, Warpgroup, load, store
from kernels_pallas.quantised import BLOCK
from kernels_pallas.rms_norm.mosaic_gpu import ROW

# Parts whose loads a warp waits for together: 8 bytes of a lane each.
_TOGETHER = 16

# The peak of the logarithms so far, the sum of the parts' weights, and the weighted outputs.
_Carry = tuple[jax.Array, jax.Array, jax.Array]


def merge(
    out: Float[Array, "s B M C"], lse: Float[Array, "s B k 64"], *, interpret: Interpreter | None = None
) -> Float[Array, "B M C"]:
    """Outputs of disjoint parts of rows, weighted by their sums of exponentials.

    Args:
        out: normalised outputs, bfloat16, C 512.
        lse: log2 of the sums of exponentials, float32; the M query rows are k blocks of M / k.
        interpret: parameters of Pallas' interpreter; None compiles.
    """
    splits, slots, height, rank = out.shape
    per_block, blocks = height // lse.shape[2], (rank // BLOCK, BLOCK)
    wg = Warpgroup(interpret is not None)

    def body(out_ref: Ref, lse_ref: Ref, merged_ref: Ref) -> None:
        slot, row = lax.axis_index("slot"), lax.axis_index("row")
        zero = wg.laid_out(jnp.zeros(blocks, jnp.float32), ROW)
        whole = merged(out_ref, lse_ref, (slot, row), per_block, zero, ROW)
        store(merged_ref.at[slot, row], whole.astype(out.dtype))

    run = plgpu.kernel(
        body,
        kernel_name="mla_merge",
        out_type=jax.ShapeDtypeStruct((slots, height, *blocks), out.dtype),
        grid=(slots, height),
        grid_names=("slot", "row"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return run(out.reshape(splits, slots, height, *blocks), lse).reshape(slots, height, rank)


def merged(
    out_ref: Ref,
    lse_ref: Ref,
    row: tuple[jax.Array, jax.Array],
    per_block: int,
    zero: jax.Array,
    layout: Layout,
) -> jax.Array:
    """A query row's parts, weighted by their sums of exponentials, float32.

    row: slot, and number of the row. per_block: rows of a block. zero: zeros of the result's layout.
    """
    splits, (slot, number) = out_ref.shape[0], row
    together = min(splits, _TOGETHER)
    block, at = lax.div(number, per_block), lax.rem(number, per_block)

    def group(i: jax.Array, carry: _Carry) -> _Carry:
        """Add parts whose loads are under way together."""
        parts = [jnp.minimum(i * together + k, splits - 1) for k in range(together)]
        sizes = [
            jnp.where(i * together + k < splits, lse_ref[part, slot, block, at], NO_PEAK)
            for k, part in enumerate(parts)
        ]
        values = [load(out_ref, (part, slot, number), layout).astype(jnp.float32) for part in parts]
        before, total, mixed = carry
        peak = reduce(jnp.maximum, sizes, before)
        decay = jnp.exp2(before - peak)
        total, mixed = total * decay, mixed * decay
        for size, value in zip(sizes, values, strict=True):
            weight = jnp.exp2(size - peak)
            total, mixed = total + weight, mixed + weight * value
        return peak, total, mixed

    nothing = jnp.float32(NO_PEAK), jnp.float32(0), zero
    _, total, mixed = lax.fori_loop(0, -(-splits // together), group, nothing)
    return mixed * (1 / total)
