"""Two kernels, a warpgroup per thread block: parts of the gates' product, and all that follows the product.

``project``: a thread block has 128 numbers of one stream, whose weights it keeps in registers. ``enter``: a
thread block has a token, and each of its threads computes that token's gates, as numbers in registers.
"""

from collections.abc import Sequence
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels_pallas.hyper.rule import STREAMS, GateParams, GateRule, Gates, InputForms, Projected
from kernels_pallas.mosaic import LINES_OF, Index, Interpreter, Ref, load, per_column, store
from kernels_pallas.quantised import BLOCK
from kernels_pallas.rms_norm import mosaic_gpu as norms
from kernels_pallas.rms_norm.mosaic_gpu import ROW

# 128 numbers, which each warp holds.
_ROW_OF = ROW.reduce(0)
# Tokens of a thread block of ``project``, whose loads are under way together.
TOGETHER = 4


def project(
    streams: Float[Array, "T S k 128"],
    results: Sequence[Float[Array, "_ _ k 128"]],
    gates: Gates | None,
    weight: Float[Array, "o S k 128"],
    *,
    interpret: Interpreter | None = None,
) -> tuple[Array, ...]:
    """``reference.project``.

    Args:
        streams: bfloat16.
        results: bfloat16 or float32; rows past T are not read. None without ``gates``.
        gates: float32; None: streams stay as they are.
        weight: float32; o is a multiple of 4.
        interpret: parameters of Pallas' interpreter; None compiles.
    """
    tokens, count, blocks, _ = streams.shape
    outputs = weight.shape[0]
    each = min(tokens, TOGETHER)

    def mixed(
        token: jax.Array, place: Index, streams_ref: Ref, own: Gates, result_refs: list[Ref]
    ) -> jax.Array:
        """The new numbers of a stream's block."""
        stream, block = place
        terms = [
            own.mix[token, j, stream] * load(streams_ref, (token, j, block), _ROW_OF).astype(jnp.float32)
            for j in range(count)
        ]
        parts = [
            load(ref, (part, token, block), _ROW_OF).astype(jnp.float32)
            for ref, x in zip(result_refs, results, strict=True)
            for part in range(x.shape[0])
        ]
        result = reduce(jnp.add, parts).astype(jnp.bfloat16)  # as between two launches
        terms.append(own.out[token, stream] * result.astype(jnp.float32))
        return reduce(jnp.add, terms).astype(jnp.bfloat16)

    def body(streams_ref: Ref, weight_ref: Ref, own: Gates | None, result_refs: list[Ref], *out: Ref) -> None:
        place = stream, block = lax.axis_index("stream"), lax.axis_index("block")
        first, part = lax.axis_index("tile") * each, stream * blocks + block
        weights = load(weight_ref, (pl.ds(0, outputs), *place), ROW)

        def one(token: jax.Array) -> None:
            if own is None:
                x = load(streams_ref, (token, *place), _ROW_OF)
            else:
                x = mixed(token, place, streams_ref, own, result_refs)
                store(out[0].at[token, stream, block], x)
            wide = x.astype(jnp.float32)
            products = jnp.sum(weights * per_column(wide, outputs), axis=1)
            store(out[-2].at[token, pl.ds(0, outputs), part], products)
            out[-1][token, part] = jnp.sum(wide * wide)

        for i in range(each):
            if tokens % each:
                pl.when(first + i < tokens)(partial(one, first + i))
            else:
                one(first + i)

    parts = count * blocks
    return tuple(
        plgpu.kernel(
            body,
            kernel_name="hyper_project",
            out_type=[
                *([] if gates is None else [jax.ShapeDtypeStruct(streams.shape, streams.dtype)]),
                jax.ShapeDtypeStruct((tokens, outputs, parts), jnp.float32),
                jax.ShapeDtypeStruct((tokens, parts), jnp.float32),
            ],
            grid=(-(-tokens // each), count, blocks),
            grid_names=("tile", "stream", "block"),
            compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
            interpret=interpret,
        )(streams, weight, gates, list(results))
    )


def enter(
    streams: Float[Array, "T S k 128"],
    projected: Projected,
    p: GateParams,
    *,
    rule: GateRule,
    wanted: InputForms,
    interpret: Interpreter | None = None,
) -> tuple[Array, ...]:
    """``reference.enter``, the normed results with the rows of ``rms_norm.mosaic_gpu.rms_norm``.

    Args:
        streams: bfloat16; k is a multiple of 4.
        projected: one part of each product, or a multiple of 32.
        p: norm is [k, 128].
        rule: numbers of the gates.
        wanted: forms of the input.
        interpret: parameters of Pallas' interpreter; None compiles.
    """
    tokens, _, blocks, _ = streams.shape
    outputs, count = projected.parts.shape[1:]

    def summed(given: Projected, token: jax.Array, found_s: Ref) -> tuple[list[jax.Array], jax.Array]:
        """The products, and the sum of squares, as numbers that every thread has."""
        if count == 1:
            return [given.parts[token, i, 0] for i in range(outputs)], given.squares[token, 0]
        sums = jnp.sum(load(given.parts, (token,), LINES_OF), axis=1)
        square = jnp.sum(load(given.squares, (token,), LINES_OF.reduce(0)))
        found_s[...] = sums
        return [found_s[i] for i in range(outputs)], square

    def body(streams_ref: Ref, given: Projected, own: GateParams, *refs: Ref) -> None:
        *out, found_s = refs
        token = lax.axis_index("token")
        x = [load(streams_ref, (token, s), ROW) for s in range(STREAMS)]
        found, square = summed(given, token, found_s)
        root = lax.rsqrt(square * (1 / (STREAMS * blocks * BLOCK)) + rule.norm_eps)
        gates = rule.gates([f * root for f in found], own.scale, own.base)
        gated = reduce(jnp.add, [g * s.astype(jnp.float32) for g, s in zip(gates.into, x, strict=True)])
        rounded = gated.astype(jnp.bfloat16)
        if wanted.total:
            store(out.pop(0).at[token], rounded)
        if own.norm is not None:
            one = rounded.astype(jnp.float32)
            mean = jnp.sum(jnp.sum(one * one, axis=1)) * (1 / (blocks * BLOCK))
            y = one * lax.rsqrt(mean + rule.norm_eps) * load(own.norm, (), ROW).astype(jnp.float32)
            if wanted.plain:
                store(out.pop(0).at[token], y.astype(jnp.bfloat16))
            if wanted.quantised:
                norms.write(y, out.pop(0).at[token], out.pop(0).at[:, token])
        for s, gate in enumerate(gates.out):
            out[0][token, s] = gate
        for j, s in np.ndindex(len(gates.mix), STREAMS):
            out[1][token, j, s] = gates.mix[j][s]

    row = jax.ShapeDtypeStruct((tokens, blocks, BLOCK), jnp.bfloat16)
    sizes = [(tokens, STREAMS), (tokens, STREAMS, STREAMS)] if outputs > STREAMS else []
    return tuple(
        plgpu.kernel(
            body,
            kernel_name="hyper_enter",
            out_type=[
                *[row] * (wanted.total + wanted.plain),
                *(norms.quantised_type(tokens, blocks) if wanted.quantised else []),
                *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sizes),
            ],
            scratch_types=[plgpu.SMEM((outputs,), jnp.float32)],
            grid=(tokens,),
            grid_names=("token",),
            compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=512),
            interpret=interpret,
        )(streams, projected, p)
    )
