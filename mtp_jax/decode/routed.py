"""Experts that the router chose for each token, in the pages of the cache, for requests that ask for them.

A cached page has them from the request that computed it: routing of the pass whose latents the tokens behind
it attend to. So a hit, a page from the host's memory or from another server, and a tree's path need nothing
more than the cache does. A row takes one byte or two per choice, where a latent takes a thousand per layer.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from mtp_jax.model.backend import Backend
from mtp_jax.model.cache import Views
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.moe import Routing
from mtp_jax.model.parts import split

RoutedPages = Shaped[Array, "P S c"]
"""Ids of experts, a row for each token in a page: k of every MoE layer of the trunk, layer by layer."""

READ = 64
"""Most pages that one run of the program reads."""


def empty_routed(pages: int, page_size: int, cfg: ModelConfig) -> RoutedPages:
    """Zeroed pages, in the smallest type that holds every id."""
    kind = jnp.uint8 if cfg.n_routed_experts <= 1 << 8 else jnp.uint16
    return jnp.zeros((pages, page_size, cfg.moe_layers * cfg.num_experts_per_tok), kind)


@jax.named_scope("keep_experts")
def kept(pages: RoutedPages, routing: Sequence[Routing], views: Views, on: Backend) -> RoutedPages:
    """The pages with the choices of one more pass, whose rows were written where ``views`` say."""
    ids = jnp.concatenate([r.ids for r in routing], axis=-1).astype(pages.dtype)
    for view, own in zip(views, split(ids, [v.shape for v in views], on.mesh), strict=True):
        pages = on.write(pages, view.unpacked(own), view.page_table, view.written)
    return pages


def read_routed(pages: RoutedPages, numbers: Int[Array, " n"]) -> Shaped[Array, "n S c"]:
    """The choices in the pages with these numbers, counted over all shards."""
    return pages[numbers]
