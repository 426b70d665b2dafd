"""The kinds of attention that a layer may have, as stages see them; pages, parts and meshes know none of it.

``attention_of`` gives a layer's: the module ``latent`` or ``grouped``, which have the functions of ``Kind``.
"""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int

from mtp_jax.model.backend import grouped, latent
from mtp_jax.model.backend.products import Products
from mtp_jax.model.cache import Entries, LayerCache, PagedView
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Attention, Grouped


@runtime_checkable
class Kind(Protocol):
    """A kind of attention. ``on`` carries it out; x are normed rows, as ``on`` keeps them.

    Queries are a dataclass of arrays [B, W, N, ...], split by heads on a mesh; ``index`` has the queries of
    index keys, None without sparse attention. ``by_head`` is a tuple of arrays, or of narrow weights, with
    one row for each query head, split in the same way. ``chosen`` are the rows of sparse attention, None:
    all visible rows.
    """

    def queries(
        self, on: Products, a: Any, cfg: ModelConfig, x: Any, angles: Float[Array, "B W 2 r"], /
    ) -> Any:
        """The queries of rows."""
        ...

    def entries(
        self, on: Products, a: Any, cfg: ModelConfig, x: Any, angles: Float[Array, "B W 2 r"], /
    ) -> Entries:
        """Entries that rows add to the cache."""
        ...

    def by_head(self, on: Products, a: Any, cfg: ModelConfig, /) -> tuple[Any, ...]:
        """Per-head parameters: (k_up, v_up) of MLA, (kv_head,) of grouped-query attention."""
        ...

    def over_rows(
        self,
        on: Products,
        cfg: ModelConfig,
        q: Any,
        by_head: tuple[Any, ...],
        rows: Float[Array, "B L c"],
        mask: Bool[Array, "B W L"],
        /,
    ) -> Float[Array, "B W N v"]:
        """Attention over rows at hand."""
        ...

    def over_pages(
        self,
        on: Products,
        cfg: ModelConfig,
        q: Any,
        by_head: tuple[Any, ...],
        cache: LayerCache,
        view: PagedView,
        chosen: Int[Array, "B W K"] | None,
        /,
    ) -> Float[Array, "B W N v"]:
        """Attention over cached rows, on one device."""
        ...


def attention_of(a: Attention | Grouped) -> Kind:
    """The kind that a layer's parameters are of."""
    return grouped if isinstance(a, Grouped) else latent
