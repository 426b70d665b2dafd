"""What XLA on a CPU does slowly as the papers write it, in forms that it does fast (docs/architecture.md)."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.model.backend import cpu_attention, cpu_experts
from mtp_jax.model.backend.xla import Xla
from mtp_jax.model.cache import LayerCache, PagedView, Tree, places
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.mla import Form, Queries
from mtp_jax.model.moe import Routing, Weight
from mtp_jax.model.narrow import Narrow

# Above this many rows ``x @ w.T`` is the faster way in float32; bfloat16 takes so many at least.
_FEW_ROWS, _LEAST_ROWS = 64, 8


@dataclass(frozen=True)
class XlaCpu(Xla):
    """See the package."""

    def product(self, x: Float[Array, "... i"], w: Float[Array, "*o i"], dtype: Any) -> Float[Array, "..."]:
        """For few rows or in bfloat16 written ``w @ x.T`` behind a barrier.

        XLA would rewrite it into ``x @ w.T``, which is slower. bfloat16 is only fast if the product leaves
        float32, which the barrier keeps XLA from narrowing, and with more than one row.
        """
        rows, narrow = math.prod(x.shape[:-1]), x.dtype == jnp.bfloat16
        if not narrow and rows > _FEW_ROWS:
            return super().product(x, w, dtype)
        flat_x, flat_w = x.reshape(rows, x.shape[-1]), w.reshape(-1, w.shape[-1])
        if narrow and rows < _LEAST_ROWS:
            flat_x = jnp.pad(flat_x, ((0, _LEAST_ROWS - rows), (0, 0)))
        dims = (((1,), (1,)), ((), ()))
        y = jax.lax.dot_general(flat_w, flat_x, dims, preferred_element_type=jnp.float32)
        y = jax.lax.optimization_barrier(y)[:, :rows].T.astype(dtype)
        return y.reshape(*x.shape[:-1], *w.shape[:-1])

    @property
    def head_parts(self) -> int:
        """All logits at once: memory is not scarce, and every part is a further pass."""
        return 1

    def prefill_form(self, cfg: ModelConfig, window: int) -> Form:
        """The one with fewer operations."""
        return cpu_attention.prefill_form(cfg, window)

    def attend_rows(
        self,
        q: Queries,
        k_up: Float[Array, "N h C"],
        v_up: Float[Array, "N v C"],
        rows: Float[Array, "B L c"],
        mask: Bool[Array, "B W L"],
        scale: float,
        form: Form,
    ) -> Float[Array, "B W N v"]:
        """Products behind barriers."""
        return cpu_attention.attend_in_blocks(q, k_up, v_up, lambda _: (rows, mask), 1, scale, form)

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
        """Block by block, up to the last row that any token sees."""
        return cpu_attention.attend_seen(q, k_up, v_up, cache, view, scale, only)

    def write_rows(
        self, pages: Tree, rows: Any, page_table: Int[Array, "B n"], written: Int[Array, "B W"]
    ) -> Tree:
        """By a loop: a scatter checks its bounds by a select, for which XLA copies the whole cache."""
        count, size = jax.tree.leaves(pages)[0].shape[:2]
        page, offset, inside = places(count, size, page_table, written)

        def write(i: Int[Array, ""], pages: Tree) -> Tree:
            def put(pages: Array, rows: Array) -> Array:
                row = rows.reshape(-1, 1, 1, rows.shape[-1])[i]
                return jax.lax.dynamic_update_slice(pages, row, (page[i], offset[i], 0))

            return jax.tree.map(put, pages, rows)

        # A loop of a length XLA cannot know is not unrolled and fused into the cache's readers, with copies.
        last = jnp.max(jnp.where(inside, jnp.arange(1, len(page) + 1), 0))
        return jax.lax.fori_loop(0, last, write, pages)

    def routed(
        self,
        gate_up: Weight,
        down: Weight,
        x: Any,
        r: Routing,
        shards: int = 1,
        first: Int[Array, ""] | int = 0,
    ) -> Float[Array, "T D"]:
        """``cpu_experts.by_pair`` for few rows."""
        if (
            shards == 1
            and not isinstance(gate_up, Narrow)
            and not isinstance(down, Narrow)
            and r.ids.size <= cpu_experts.most_pairs(gate_up, down)
        ):
            return cpu_experts.by_pair(gate_up, down, x, r)
        return super().routed(gate_up, down, x, r, shards, first)
