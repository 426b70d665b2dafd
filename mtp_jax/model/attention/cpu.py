"""MLA in the form that XLA computes fast on a CPU: products behind barriers, cached rows block by block.

Without barriers, XLA first transposes the cached rows or swaps the operands (docs/cpu.md).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.model.attention.cpu_heads import inward, outward
from mtp_jax.model.attention.latent import Latent
from mtp_jax.model.attention.source import Blocks, Chosen, Paged, Source, Whole
from mtp_jax.model.attention_config import Reach
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.layers import beside
from mtp_jax.model.mla import Form, Queries, Ups
from mtp_jax.model.narrow import expand, readable
from mtp_jax.model.params import Attention
from mtp_jax.model.visible import MAX_AHEAD

# The least peak of scores: a token that sees nothing (an idle slot) must get zeros, not NaN.
LEAST = jnp.finfo(jnp.float32).min
# Cached rows that absorbed attention of windows takes at a time: smaller blocks cost more in calls than in
# products. A chunk's blocks are as long as the chunk, as often no more rows are cached.
_BLOCK = 256


@dataclass(frozen=True)
class CpuLatent(Latent):
    """MLA over the fewest blocks of cached rows that hold every row visible to a token."""

    def by_head(self, a: Attention, cfg: ModelConfig) -> Ups:
        """The up-projections as they lie in memory, if loops read them."""
        narrow = self.on.mesh is None and readable(a.k_up) and readable(a.v_up)
        return Ups(a.k_up, a.v_up) if narrow else super().by_head(a, cfg)

    def reach(self, cfg: ModelConfig) -> Reach:
        """Sparse attention has masks of the whole table in a chunk."""
        return "table" if cfg.attention.sparse else "rows"

    def prefill_form(self, cfg: ModelConfig, window: int) -> Form:
        """The form that takes fewer operations for ``window`` tokens over long histories.

        naive: every cached row is expanded once, (h + v) * C for each head; absorbed: each token pays
        2 C - h - v more per row.
        """
        expanded, rank = cfg.qk_nope_head_dim + cfg.v_head_dim, cfg.kv_lora_rank
        return "absorbed" if window * (2 * rank - expanded) <= expanded * rank else "naive"

    def attend(self, q: Queries, w: Ups, source: Source, scale: float) -> Float[Array, "B W N v"]:
        """``Latent.attend`` over one block of rows after the other.

        The softmax is summed on the way (arXiv 1805.02867, algorithm 3). A block that a token does not see
        changes no bit of its sums, so a result does not depend on the number of blocks that other tokens
        need.
        """
        if isinstance(source, Chosen):
            return super().attend(q, w, source, scale)
        (read, _, blocks), form = blocks_of(source, q.nope.dtype), source.form
        rank, (slots, width, heads, _) = w.k.shape[-1], q.nope.shape
        by_head, wide = (slots, heads, width), []
        if form == "absorbed":
            # All heads read the same rows: one product for all.
            latent = _apart(inward(_together(q.nope), w.k), slots)
            queries = beside(latent, q.rope).transpose(0, 2, 1, 3)
            lead, mixes = (slots, heads * width), queries.shape[-1]
        else:
            queries = beside(q.nope, q.rope).transpose(0, 2, 1, 3)
            lead, mixes = by_head, w.v.shape[1]
            wide = [expand(up, q.nope.dtype) for up in w]
        flat = _fixed(queries.reshape(*lead, -1))

        def columns() -> Int[Array, "*b m"]:
            return jax.lax.broadcasted_iota(jnp.int32, (*lead, mixes + 2), len(lead))

        def block(i: Int[Array, ""] | int, so_far: Float[Array, "*b m"]) -> Float[Array, "*b m"]:
            peak = so_far[..., -1:]
            rows, mask = read(i)
            sees = jnp.broadcast_to(mask[:, None], (*by_head, mask.shape[-1])).reshape(*lead, -1)
            absorbed = form == "absorbed"
            if absorbed:
                # Few queries are a column each: cached rows are read as they lie.
                scores = _dots(rows, flat, (2, 2)).swapaxes(1, 2)
            else:
                scores = _dots(flat, _keys(rows, wide[0]), (3, 2))
            scores = jnp.where(sees, scores * scale, -jnp.inf)
            # The result does not depend on the peak, so its derivative is not computed.
            top = jax.lax.stop_gradient(jnp.maximum(peak, scores.max(axis=-1, keepdims=True)))
            weights, shrunk = jnp.exp(scores - top), jnp.exp(peak - top)
            narrow = _fixed(weights.astype(rows.dtype))
            if absorbed:
                # Multiply whole rows: slicing the rope part off the result is cheaper than off the cache.
                more = _dots(narrow, rows, (2, 1))
            else:
                more = _dots(narrow, _expand(rows[..., :rank], wide[1]), (3, 3))
            at, more = columns(), jnp.pad(more, [(0, 0)] * len(lead) + [(0, 2)])
            more = jnp.where(at == mixes, weights.sum(axis=-1, keepdims=True), more)
            return jnp.where(at > mixes, top, so_far * shrunk + more)

        # The columns are: the mix of cached rows, the sum of their weights, the peak of scores.
        start = jnp.where(columns() > mixes, LEAST, 0).astype(jnp.float32)
        alone = isinstance(blocks, int) and blocks == 1
        end = block(0, start) if alone else jax.lax.fori_loop(0, blocks, block, start)
        context = (end[..., :mixes] / jnp.maximum(end[..., mixes:-1], 1e-30)).astype(queries.dtype)
        if form == "naive":
            return context.swapaxes(1, 2)
        latent = context[..., :rank].reshape(*by_head, rank)
        return _apart(outward(_together(latent.swapaxes(1, 2)), w.v), slots)


def _fixed(x: jax.Array) -> jax.Array:
    """Keep XLA from swapping or transposing operands of a product, which makes it up to four times slower."""
    return jax.lax.optimization_barrier(x)


def _keys(rows: Float[Array, "B L c"], k_up: Float[Array, "N h C"]) -> Float[Array, "B N k L"]:
    """Keys of every head, the shared rope part included, a column for each cached row."""
    latent, key_rope = jnp.split(rows, [k_up.shape[-1]], axis=-1)
    keys = _expand(latent, k_up)
    shared = jnp.broadcast_to(key_rope.swapaxes(1, 2)[:, None], (*keys.shape[:2], *key_rope.shape[:0:-1]))
    return jnp.concatenate([keys, shared], axis=2)


def _expand(latent: Float[Array, "B L C"], up: Float[Array, "N o C"]) -> Float[Array, "B N o L"]:
    """Keys or values of every head, a column for each cached row."""
    (slots, length, rank), heads = latent.shape, len(up)
    dims = (((1,), (1,)), ((), ()))
    columns = jax.lax.dot_general(up.reshape(-1, rank), latent.reshape(-1, rank), dims)
    return _fixed(columns).reshape(heads, -1, slots, length).transpose(2, 0, 1, 3)


def _dots(
    a: Float[Array, "*b x y"], b: Float[Array, "*b z t"], contracted: tuple[int, int]
) -> Float[Array, "*b s u"]:
    """Products of every slot, or slot and head, in float32."""
    batch = tuple(range(a.ndim - 2))
    dims = ((contracted[:1], contracted[1:]), (batch, batch))
    return _fixed(jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32))


def _together(x: Float[Array, "B W N a"]) -> Float[Array, "N T a"]:
    """The rows of each head."""
    return x.transpose(2, 0, 1, 3).reshape(x.shape[2], -1, x.shape[3])


def _apart(x: Float[Array, "N T a"], slots: int) -> Float[Array, "B W N a"]:
    """Undoes ``_together``."""
    return x.reshape(len(x), slots, -1, x.shape[2]).transpose(1, 2, 0, 3)


def blocks_of(source: Whole | Paged, dtype: Any) -> Blocks:
    """The blocks of a source that a CPU takes at a time."""
    if isinstance(source, Whole):
        return Blocks(lambda _: source.read(dtype), source.length, 1)
    # Naive attention expands a block for each group of tokens as long as the block.
    few = source.form == "absorbed" and source.width <= MAX_AHEAD + 1
    return source.blocks(_BLOCK if few else source.width, dtype)
