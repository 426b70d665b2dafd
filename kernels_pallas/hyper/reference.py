"""The operations in plain jnp."""

from collections.abc import Sequence
from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.hyper.rule import STREAMS, GateParams, GateRule, Gates, InputForms, Projected
from kernels_pallas.quantised import quantise


def project(
    streams: Float[Array, "T S k 128"],
    results: Sequence[Float[Array, "_ _ k 128"]],
    gates: Gates | None,
    weight: Float[Array, "o S k 128"],
) -> tuple[Array, ...]:
    """The streams after a sublayer, and their products with the weight, not yet summed.

    results: arrays whose s rows are parts to be summed; the sum of all is the sublayer's result. gates: None:
    no sublayer came before.

    Returns:
        The new streams where there are gates; sums of 128 products [T, o, n], n = S * k; sums of squares
        [T, n].
    """
    tokens, f32 = len(streams), jnp.float32
    x = streams.astype(f32)
    if gates is not None:
        parts = [part[:tokens] for result in results for part in result.astype(f32)]
        result = reduce(jnp.add, parts).astype(streams.dtype).astype(f32)
        x = jnp.einsum("tjs,tjkc->tskc", gates.mix, x, precision="highest")
        x = (x + gates.out[..., None, None] * result[:, None]).astype(streams.dtype).astype(f32)
    products = jnp.einsum("tskc,oskc->tosk", x, weight, precision="highest")
    found = products.reshape(tokens, len(weight), -1), (x * x).sum(axis=-1).reshape(tokens, -1)
    return found if gates is None else (x.astype(streams.dtype), *found)


def enter(
    streams: Float[Array, "T S k 128"],
    projected: Projected,
    p: GateParams,
    *,
    rule: GateRule,
    wanted: InputForms,
) -> tuple[Array, ...]:
    """The gates of a sublayer, and its input: the gated sum of the streams.

    p: norm is [k, 128]. Where streams end, o is S: only gates of the input are made.

    Returns:
        In this order, if requested: the input [T, k, 128]; normed; its e4m3 values [T, k, 128] and float32
        scales [k, T]. Then, unless streams end, the result's gates [T, S] and the matrix [T, S, S].
    """
    size = streams[0].size
    root = jax.lax.rsqrt(projected.squares.sum(axis=-1) / size + rule.norm_eps)
    found = (projected.parts.sum(axis=-1) * root[:, None]).T
    gates = rule.gates(list(found), p.scale, p.base)
    into = jnp.stack(gates.into, axis=-1)
    one = (into[..., None, None] * streams.astype(jnp.float32)).sum(axis=1).astype(streams.dtype)
    out: list[Array] = [one] if wanted.total else []
    if p.norm is not None:
        wide = one.astype(jnp.float32)
        mean = (wide * wide).mean(axis=(1, 2), keepdims=True)
        normed = wide * jax.lax.rsqrt(mean + rule.norm_eps) * p.norm.astype(jnp.float32)
        out += [normed.astype(streams.dtype)] if wanted.plain else []
        if wanted.quantised:
            low = quantise(normed.reshape(len(one), -1))
            out += [low.values.reshape(-1, *p.norm.shape), low.scale]
    if len(found) == STREAMS:
        return tuple(out)
    mix = jnp.stack([jnp.stack(row, axis=-1) for row in gates.mix], axis=-2)
    return (*out, jnp.stack(gates.out, axis=-1), mix)
