"""Attention by kernels on a Hopper GPU, sparse or not, and which kernels run at all (docs/kernels.md)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.index_scores import api as index_scores
from kernels_pallas.mla_decode import api as mla_decode
from kernels_pallas.mla_prefill import api as mla_prefill
from kernels_pallas.top_k import api as top_k
from mtp_jax.errors import ConfigError
from mtp_jax.model.backend.xla import Xla
from mtp_jax.model.cache import LayerCache, PagedView, read_rows
from mtp_jax.model.indexer import IndexQueries
from mtp_jax.model.mla import Queries
from mtp_jax.model.visible import Window

PARTS = frozenset(("linear", "experts", "attention"))


@dataclass(frozen=True)
class MosaicAttention(Xla):
    """Attention over pages, and the choice of rows before it; see `MosaicGpu` for the attributes."""

    kernels: frozenset[str] = PARTS
    strict: bool = False

    def _runs(self, part: str, check: Callable[..., None], *args: Any) -> bool:
        """Whether the kernel that ``check`` speaks for runs. Raises ConfigError if it must and cannot."""
        if part not in self.kernels:
            return False
        try:
            check(*args)
        except ValueError as e:
            if self.strict:
                raise ConfigError(f"{e}: --kernels auto or xla, in Python kernels='auto' or 'xla'") from e
            return False
        return True

    def _do_without(self, what: str) -> None:
        """Raises ConfigError where kernels must attend: there is none for this."""
        if self.strict and "attention" in self.kernels:
            raise ConfigError(f"{what} has no kernel: --kernels auto, in Python kernels='auto'")

    def index_scores(self, q: IndexQueries, cache: LayerCache, view: PagedView) -> Float[Array, "B W L"]:
        """Scores by a kernel that reads the pages where they are."""
        keys = cache.index
        if keys is None or "attention" not in self.kernels or not can(index_scores.check, q.q, keys):
            return super().index_scores(q, cache, view)
        where = view.page_table, view.visible
        return index_scores.index_scores(q.q, q.weights, keys, *where, implementation="mosaic_gpu")

    def best(self, found: Float[Array, "B W L"], count: int) -> Int[Array, "B W K"]:
        """The choice by a kernel that sorts nothing."""
        flat = found.reshape(-1, found.shape[-1])
        if "attention" not in self.kernels or not can(top_k.check, flat):
            return super().best(found, count)
        chosen = top_k.top_k(flat, count, implementation="mosaic_gpu")
        return chosen.reshape(*found.shape[:2], count)

    def attend_own(
        self,
        q: Queries,
        k_up: Float[Array, "N h C"],
        v_up: Float[Array, "N v C"],
        rows: Float[Array, "T K c"],
        there: Bool[Array, "T K"],
        scale: float,
    ) -> Float[Array, "T one N v"]:
        """Attention by the kernel that decodes, from pages that the gathered rows fill token by token."""
        tokens, count, _ = rows.shape
        size = math.gcd(count, mla_decode.PAGE)
        pages = rows.reshape(-1, size, rows.shape[-1])
        inward = jnp.einsum("bwnh,nhc->bwnc", q.nope, k_up)
        if not self._runs("attention", mla_decode.check, inward, q.rope, pages):
            return super().attend_own(q, k_up, v_up, rows, there, scale)
        table = jnp.arange(len(pages), dtype=jnp.int32).reshape(tokens, -1)
        has = there.sum(axis=1, dtype=jnp.int32)
        own = Window(count - has, jnp.full_like(has, count), jnp.minimum(has, 1))
        by_kernel: dict[str, Any] = {"scale": scale, "implementation": "mosaic_gpu"}
        mixed = mla_decode.mla_decode(inward, q.rope, pages, table, own, in_place=True, **by_kernel)
        return jnp.einsum("bwnc,nvc->bwnv", mixed, v_up)

    def attend_pages(
        self,
        q: Queries,
        k_up: Float[Array, "N h C"],
        v_up: Float[Array, "N v C"],
        cache: LayerCache,
        view: PagedView,
        scale: float,
        only: Bool[Array, "B W L"] | None = None,
    ) -> Float[Array, "B W N v"]:
        """Absorbed by a kernel that reads the pages where they are; naive by one that expands rows."""
        if only is not None:
            self._do_without("a choice among rows that tokens share, as in sparse prefill,")
            return super().attend_pages(q, k_up, v_up, cache, view, scale, only)
        by_kernel: dict[str, Any] = {"scale": scale, "implementation": "mosaic_gpu"}
        if view.form == "absorbed":
            inward = jnp.einsum("bwnh,nhc->bwnc", q.nope, k_up)
            if self._runs("attention", mla_decode.check, inward, q.rope, cache.rows):
                where = cache.rows, view.page_table, view.visible
                mixed = mla_decode.mla_decode(inward, q.rope, *where, in_place=True, **by_kernel)
                return jnp.einsum("bwnc,nvc->bwnv", mixed, v_up)
            return super().attend_pages(q, k_up, v_up, cache, view, scale)
        whole = jnp.concatenate([q.nope, q.rope], axis=-1)
        if not self._runs("attention", mla_prefill.check, whole, q.nope, q.rope, v_up.swapaxes(1, 2)):
            return super().attend_pages(q, k_up, v_up, cache, view, scale)
        seen = view.visible.seen(view.page_table.shape[1] * cache.page_size)
        rows = read_rows(cache, view.page_table, seen, v_up.dtype, k_up.shape[-1])
        return mla_prefill.mla_prefill(whole, rows, k_up, v_up, view.visible, **by_kernel)


def can(check: Callable[..., None], *args: Any) -> bool:
    """Whether the kernel that ``check`` speaks for can do the work."""
    try:
        check(*args)
    except ValueError:
        return False
    return True
