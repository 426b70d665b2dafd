"""The interface of a kind of attention for the stages of a block."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
from flax import struct
from jaxtyping import Array, Float, Int

from mtp_jax.model.attention.place import EntryPlace
from mtp_jax.model.attention.source import Paged, Source, Whole
from mtp_jax.model.attention_config import Reach
from mtp_jax.model.cache import Cache, Entries, LayerCache, Views
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.indexer import IndexQueries
from mtp_jax.model.mla import Form
from mtp_jax.model.products.plain import Products, Readers, Rows
from mtp_jax.model.products.stream import ProductResult
from mtp_jax.model.sharding import partition


@struct.dataclass
class Asked:
    """The tokens of a part of a pass, as attention takes them.

    Attributes:
        q: queries, without ``index``.
        index: ``IndexQueries``; None where the tokens choose no rows.
        entries: entries to cache; None if they have been written.
        chosen: rows [B, W, K] that another layer chose for these tokens; None: none did.
    """

    q: Any
    index: Any
    entries: Any
    chosen: Any = None


Context = Any
"""Results of attention [B, W, N, v], in the form that ``Kind.result`` takes."""
Attended = tuple[Context, Int[Array, "B W K"] | None, Cache | None]
"""(Context, the rows that tokens chose, the cache)."""


@dataclass(frozen=True)
class Kind(ABC):
    """A kind of attention, on one device's slots and heads; the stages care for parts and meshes.

    Queries are a dataclass of arrays [B, W, N, ...], split by heads on a mesh; ``index`` has the queries of
    index keys, None without sparse attention.

    Attributes:
        on: computes the products.
        form: MLA form of a pass without a cache; a view of a cache has its own.
    """

    on: Products
    form: Form = "naive"

    def cache(self, rows: LayerCache, cfg: ModelConfig, layer: int, slots: int, widest: int) -> Cache:
        """A layer's zeroed cache, from its ``empty_cache`` of all rows.

        widest: most tokens of a slot in a step. Raises ConfigError.
        """
        return rows

    def reach(self, cfg: ModelConfig) -> Reach:
        """The reach of attention of a chunk and of windows alike."""
        return "table"

    def readers(self, a: Any) -> Readers:
        """The weights that read a layer's normed rows, if their products may take them quantised."""
        return ()

    def project(
        self,
        a: Any,
        cfg: ModelConfig,
        x: Rows,
        angles: Float[Array, "B W ... 2 r"],
        cache: Cache | None,
        views: Views,
    ) -> tuple[Any, Entries | None, Cache | None]:
        """Queries of normed rows, entries to cache (None if already written), and the cache."""
        return self.queries(a, cfg, x, angles), self.entries(a, cfg, x, angles), cache

    @abstractmethod
    def queries(self, a: Any, cfg: ModelConfig, x: Rows, angles: Float[Array, "B W ... 2 r"]) -> Any:
        """The queries of rows."""

    @abstractmethod
    def entries(self, a: Any, cfg: ModelConfig, x: Rows, angles: Float[Array, "B W ... 2 r"]) -> Entries:
        """Entries that rows add to the cache."""

    @abstractmethod
    def by_head(self, a: Any, cfg: ModelConfig) -> Any:
        """Per-head parameters, a tree of arrays or narrow weights with one row per query head."""

    def spread(self, w: Any) -> Any:
        """Partition specs of ``by_head``'s tree on a mesh."""
        return partition("heads")

    def contexts(self, q: Any) -> Any:
        """Partition specs of the results of ``over`` for these queries."""
        return partition("slots", None, "heads", None)

    @abstractmethod
    def over(self, cfg: ModelConfig, asked: Asked, w: Any, place: EntryPlace) -> Attended:
        """Write a part's entries, choose rows, attend to them, on one device. w: see ``by_head``."""

    def result(self, a: Any, cfg: ModelConfig, context: Context, absorbed: bool) -> ProductResult:
        """The output projection (eq. 19). absorbed: the form of MLA."""
        o = a.o.reshape(cfg.hidden_size, -1)
        return self.on.result(self.on.joined(context, o, absorbed), o, split="in")

    def prefill_form(self, cfg: ModelConfig, window: int) -> Form:
        """The MLA form for chunks of ``window`` tokens."""
        return "naive"


class OverRows(Kind):
    """A kind of attention whose tokens all read rows of one source."""

    def over(self, cfg: ModelConfig, asked: Asked, w: Any, place: EntryPlace) -> Attended:
        """Write, choose where the layer has an indexer, attend."""
        source, cache = place.filled(asked.entries)
        with jax.named_scope("attend"):
            chosen = asked.chosen
            if asked.index is not None:
                chosen = self.choose(asked.index, source, cfg)
            return self.attend(asked.q, w, source.of(chosen), cfg.softmax_scale), chosen, cache

    @abstractmethod
    def attend(self, q: Any, w: Any, source: Source, scale: float) -> Context:
        """The equations, over the rows of a source. A token that sees nothing gets zeros."""

    def choose(self, q: IndexQueries, source: Whole | Paged, cfg: ModelConfig) -> Int[Array, "B W K"] | None:
        """The rows that each token attends to; None: all rows that it sees."""
        return None
