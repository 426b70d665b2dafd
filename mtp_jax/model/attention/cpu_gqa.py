"""Grouped-query attention over the fewest blocks of cached rows: a CPU pays for every row that it reads."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.model.attention.cpu import LEAST, blocks_of
from mtp_jax.model.attention.gqa import Gqa, KvHeads, Queries
from mtp_jax.model.attention.source import Paged, Source
from mtp_jax.model.attention_config import Reach
from mtp_jax.model.config import ModelConfig


class _Sums(NamedTuple):
    """Sums over the blocks so far, and the peak of scores to which they are relative, float32."""

    mix: Float[Array, "B G Q W h"]
    total: Float[Array, "B G Q W one"]
    peak: Float[Array, "B G Q W one"]


class CpuGqa(Gqa):
    """Grouped-query attention that ends at the last cached row which some token sees."""

    def reach(self, cfg: ModelConfig) -> Reach:
        """Blocks end at the last row that a token sees."""
        return "rows"

    def attend(self, q: Queries, w: KvHeads, source: Source, scale: float) -> Float[Array, "B W N v"]:
        """``Gqa.attend`` over one block of rows after the other, if there are several.

        The softmax is summed on the way (arXiv 1805.02867, algorithm 3). A block that a token does not see
        changes no bit of its sums, so a result does not depend on the number of blocks that other tokens
        need.
        """
        if not isinstance(source, Paged):
            return super().attend(q, w, source, scale)
        read, _, blocks = blocks_of(source, q.whole.dtype)
        if isinstance(blocks, int):
            return super().attend(q, w, source, scale)
        asked = self.by_group(q.whole, w)

        def block(i: Int[Array, ""], so_far: _Sums) -> _Sums:
            rows, mask = read(i)
            keys, values = self.of_groups(rows, w, asked.shape[2])
            scores = jnp.einsum("bwgqh,blgh->bgqwl", asked, keys, preferred_element_type=jnp.float32)
            scores = jnp.where(mask[:, None, None], scores * scale, -jnp.inf)
            peak = jnp.maximum(so_far.peak, scores.max(axis=-1, keepdims=True))
            weights, shrunk = jnp.exp(scores - peak), jnp.exp(so_far.peak - peak)
            more = jnp.einsum(
                "bgqwl,blgh->bgqwh", weights.astype(rows.dtype), values, preferred_element_type=jnp.float32
            )
            total = so_far.total * shrunk + weights.sum(axis=-1, keepdims=True)
            return _Sums(so_far.mix * shrunk + more, total, peak)

        slots, width, groups, heads, dim = asked.shape
        none = jnp.zeros((slots, groups, heads, width, 1), jnp.float32)
        start = _Sums(jnp.broadcast_to(none, (*none.shape[:-1], dim)), none, none + LEAST)
        end = jax.lax.fori_loop(0, blocks, block, start)
        context = end.mix / jnp.maximum(end.total, 1e-30)  # a token that sees nothing gets zeros
        return context.astype(q.whole.dtype).transpose(0, 3, 1, 2, 4).reshape(q.whole.shape)
