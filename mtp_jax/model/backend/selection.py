"""Sparse attention over paged caches, on one device: each token's choice, and the reading of its rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.model import indexer
from mtp_jax.model.cache import LayerCache, PagedView, read_index
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.indexer import IndexQueries


def of_whole(
    q: IndexQueries | None,
    keys: Float[Array, "B T i"] | None,
    visible: Bool[Array, "B T L"],
    cfg: ModelConfig,
) -> Int[Array, "B T K"] | None:
    """The rows of its own sequence that each token attends to; None: all that it sees."""
    if q is None or keys is None or cfg.indexer is None or keys.shape[1] <= cfg.indexer.topk:
        return None
    return indexer.choose(indexer.scores(q, keys), visible, cfg.indexer.topk)


def scores(q: IndexQueries, cache: LayerCache, view: PagedView) -> Float[Array, "B W L"]:
    """Scores of every cached row for every window token, float32; -inf where a token does not see it.

    Only blocks of index keys up to the last row that some token sees are scored.
    """
    columns, page = view.page_table.shape[1], cache.page_size
    entries, (width, heads) = columns * page, q.weights.shape[1:]
    each = min(indexer.block_size(entries, heads, page) // page, columns)
    table = jnp.pad(view.page_table, ((0, 0), (0, -columns % each)))

    def read(i: Int[Array, ""] | int) -> Float[Array, "B l i"]:
        return read_index(cache, jax.lax.dynamic_slice_in_dim(table, i * each, each, axis=1), q.q.dtype)

    last = jnp.minimum(jnp.max(view.visible.end()), entries)
    found = indexer.scores_in_blocks(q, read, each * page, entries, -(-last // (each * page)))
    return indexer.masked(found, view.visible.mask(width, entries))


def gathers(view: PagedView, cache: LayerCache, chosen: Int[Array, "B W K"]) -> bool:
    """Whether each token's own rows are fewer than all together: then they are read one by one."""
    return chosen.shape[1] * chosen.shape[2] <= view.page_table.shape[1] * cache.page_size
