"""The interface of a kind of attention for the stages of a block."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float, Int

from mtp_jax.model.attention.source import Paged, Source, Whole
from mtp_jax.model.cache import Cache, Entries, Views
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.indexer import IndexQueries
from mtp_jax.model.mla import Form
from mtp_jax.model.products.plain import Products, Readers, Rows


@dataclass(frozen=True)
class Kind(ABC):
    """The equations of a kind of attention; the stages care for pages, parts and meshes.

    Queries are a dataclass of arrays [B, W, N, ...], split by heads on a mesh; ``index`` has the queries of
    index keys, None without sparse attention.

    Attributes:
        on: computes the products.
        form: MLA form of a pass without a cache; a view of a cache has its own.
    """

    on: Products
    form: Form = "naive"

    def readers(self, a: Any) -> Readers:
        """The weights that read a layer's normed rows, if their products may take them quantised."""
        return ()

    def project(
        self,
        a: Any,
        cfg: ModelConfig,
        x: Rows,
        angles: Float[Array, "B W 2 r"],
        cache: Cache | None,
        views: Views,
    ) -> tuple[Any, Entries | None, Cache | None]:
        """Queries of normed rows, entries to cache (None if already written), and the cache."""
        return self.queries(a, cfg, x, angles), self.entries(a, cfg, x, angles), cache

    @abstractmethod
    def queries(self, a: Any, cfg: ModelConfig, x: Rows, angles: Float[Array, "B W 2 r"]) -> Any:
        """The queries of rows."""

    @abstractmethod
    def entries(self, a: Any, cfg: ModelConfig, x: Rows, angles: Float[Array, "B W 2 r"]) -> Entries:
        """Entries that rows add to the cache."""

    @abstractmethod
    def by_head(self, a: Any, cfg: ModelConfig) -> Any:
        """Per-head parameters, a tree of arrays or narrow weights with one row per query head."""

    @abstractmethod
    def attend(self, q: Any, w: Any, source: Source, scale: float) -> Float[Array, "B W N v"]:
        """Attention over the rows of a source. w: see ``by_head``. A token that sees nothing gets zeros."""

    def choose(self, q: IndexQueries, source: Whole | Paged, topk: int) -> Int[Array, "B W K"] | None:
        """The rows that each token attends to; None: all rows that it sees."""
        return None

    def prefill_form(self, cfg: ModelConfig, window: int) -> Form:
        """The MLA form for chunks of ``window`` tokens."""
        return "naive"
