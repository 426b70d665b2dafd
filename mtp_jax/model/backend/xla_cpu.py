"""What XLA on a CPU does slowly as the papers write it, in forms that it does fast (docs/cpu.md)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.router.rule import Rule
from mtp_jax.model.backend import cpu_attention, cpu_experts, cpu_products, cpu_router
from mtp_jax.model.backend.xla import Xla
from mtp_jax.model.cache import LayerCache, PagedView, Tree, places
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.mla import Form, Queries
from mtp_jax.model.moe import Routing, Weight
from mtp_jax.model.narrow import ByHead, Narrow, expand, readable
from mtp_jax.model.params import Layer
from mtp_jax.model.stack import alike


def _read_in_place(layer: Layer) -> bool:
    attention, mlp = layer.attention, layer.mlp
    weights = [attention.o, mlp.gate_up, mlp.down]
    return getattr(attention, "indexer", None) is None and all(map(readable, weights))


@dataclass(frozen=True)
class XlaCpu(Xla):
    """See the package.

    Attributes:
        matrices: whether the processor has matrix instructions for bfloat16.
    """

    matrices: bool = False

    def product(
        self, x: Float[Array, "... i"], w: Float[Array, "*o i"] | Narrow, dtype: Any
    ) -> Float[Array, "..."]:
        """See ``cpu_products``. On a mesh narrow weights are expanded."""
        flat, shape = x.reshape(-1, x.shape[-1]), (*x.shape[:-1], *w.shape[:-1])
        if readable(w) and x.dtype == jnp.float32:
            y = cpu_products.of_narrow(flat, w, self.matrices)
        else:
            y = cpu_products.of_arrays(flat, expand(w, x.dtype).reshape(-1, w.shape[-1]))
        return y.astype(dtype).reshape(shape)

    @property
    def head_parts(self) -> int:
        """All logits at once: memory is not scarce, and every part is a further pass."""
        return 1

    def arranged(self, layers: Sequence[Layer]) -> list[list[Layer]]:
        """Neighbours alike, if loops read their weights where they lie: products of arrays would copy them.

        Layers with an indexer choose for others; matrix instructions take their weights apart.
        """
        together = self.mesh is None and not self.matrices and all(map(_read_in_place, layers))
        return alike(layers) if together else super().arranged(layers)

    @property
    def loops(self) -> bool:
        """A loop's kernels are compiled once."""
        return True

    def by_head(self, w: ByHead) -> ByHead:
        """The parameters as they lie in memory, if loops read them."""
        return w if self.mesh is None and readable(w) else super().by_head(w)

    def prefill_form(self, cfg: ModelConfig, window: int) -> Form:
        """The one with fewer operations."""
        return cpu_attention.prefill_form(cfg, window)

    def attend_rows(
        self,
        q: Queries,
        k_up: ByHead,
        v_up: ByHead,
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
        k_up: ByHead,
        v_up: ByHead,
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
        """A loop: a scatter checks its bounds by a select, for which XLA copies the whole cache.

        A row's place is found in the loop, by the kernel that writes it.
        """
        (count, size), width = jax.tree.leaves(pages)[0].shape[:2], written.shape[1]
        columns = page_table.shape[1]

        def write(i: Int[Array, ""] | int, pages: Tree) -> Tree:
            def own(a: Array) -> Array:
                return jax.lax.dynamic_slice_in_dim(a, i, 1, allow_negative_indices=False)

            slot = jax.lax.dynamic_slice_in_dim(page_table, i // width, 1, allow_negative_indices=False)
            page, offset, _ = places(count, size, slot, own(written.reshape(-1, 1)))

            def put(pages: Array, rows: Array) -> Array:
                row = own(rows.reshape(-1, 1, rows.shape[-1]))
                return jax.lax.dynamic_update_slice(
                    pages, row, (page[0], offset[0], 0), allow_negative_indices=False
                )

            return jax.tree.map(put, pages, rows)

        # A loop of a length XLA cannot know is not unrolled and fused into the cache's readers, with copies.
        inside = (written >= 0) & (written < columns * size)
        last = jnp.max(jnp.where(inside.reshape(-1), jnp.arange(1, written.size + 1), 0))
        return jax.lax.fori_loop(0, last, write, pages)

    def choose_experts(
        self,
        logits: Float[Array, "T E"],
        bias: Float[Array, " E"],
        rule: Rule,
        counted: Bool[Array, " T"] | None = None,
    ) -> Routing:
        """Comparisons, for few rows."""
        return Routing(*cpu_router.choose(logits, bias, rule, counted))

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
        if shards == 1 and cpu_experts.takes(gate_up, down, r.ids.size):
            return cpu_experts.by_pair(gate_up, down, x, Routing(r.ids - first, r.weights))
        return super().routed(gate_up, down, x, r, shards, first)
