"""The function that a model calls."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.mosaic import Interpreter
from kernels_pallas.needs import ArrayOrShape, Implementation
from kernels_pallas.top_k import mosaic_gpu, reference
from kernels_pallas.top_k.mosaic_gpu import CHUNK, LINE, MOST


def top_k(
    scores: Float[Array, "T L"],
    count: int,
    *,
    implementation: Implementation,
    interpret: Interpreter | None = None,
) -> Int[Array, "T k"]:
    """Each token's ``count`` entries with the best scores, in ascending order; the first among equal scores.

    The choice equals that of ``jax.lax.top_k``, for which 0.0 is more than -0.0. An entry of -inf is never
    chosen: -1 comes first where fewer entries are left.

    Args:
        scores: float32, none of them NaN; L at most MOST for "mosaic_gpu".
        count: number of rows to choose, which must be L at most.
        implementation: "mosaic_gpu" needs a Hopper GPU; "xla" sorts.
        interpret: parameters of Pallas' interpreter; None compiles.

    Raises:
        ValueError: inputs that the kernel cannot take.
    """
    if implementation == "xla":
        return reference.top_k(scores, count)
    check(scores)
    padded = jnp.pad(scores, ((0, 0), (0, -scores.shape[1] % CHUNK)), constant_values=-jnp.inf)
    words, before, nothing = mosaic_gpu.choose(padded, count=count, interpret=interpret)
    return entries(words, before, nothing, count)


def entries(
    words: Int[Array, "T w"], before: Int[Array, "T w"], nothing: Int[Array, "T n"], count: int
) -> Int[Array, "T k"]:
    """The indices of set bits, ascending, in the last of each row's ``count`` places.

    words: int32, 32 bits each, at most ``count`` set in a row. before: number of bits set in earlier words.
    nothing: content of the other places.

    A scatter, in place and in one launch. No two entries have the same place: entries that are not chosen
    have places behind the row's end.
    """
    tokens, size = words.shape
    found = before[:, -1:] + jax.lax.population_count(words[:, -1:])
    lane = jnp.arange(LINE, dtype=jnp.int32)
    entry = jnp.arange(size, dtype=jnp.int32)[:, None] * LINE + lane
    word, lower = words[..., None], (1 << lane) - 1
    place = before[..., None] + jax.lax.population_count(word & lower) + (count - found)[..., None]
    chosen = word >> lane & 1 == 1
    place = jnp.where(chosen, place, nothing.shape[1] + entry)
    token = jnp.arange(tokens, dtype=jnp.int32)[:, None, None]
    entry = jnp.broadcast_to(entry, place.shape)
    return nothing.at[token, place].set(entry, mode="drop", unique_indices=True)[:, :count]


def check(scores: ArrayOrShape) -> None:
    """Refuse inputs that the Mosaic GPU kernel cannot take, with a ValueError that says so."""
    if str(scores.dtype) != "float32":
        raise ValueError(f"top_k on mosaic_gpu: scores in {scores.dtype}, must be float32; use 'xla'")
    if scores.shape[1] > MOST:
        raise ValueError(f"top_k on mosaic_gpu: {scores.shape[1]} scores, at most {MOST}; use 'xla'")
