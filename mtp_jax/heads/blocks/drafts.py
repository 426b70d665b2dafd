"""Heads that draft a block in one pass: DFlash, DFlash2 and DSpark, with Qwen3's layers.

Rows of a block are the newest token and masks, at the positions from the newest token's on. In every layer a
row sees keys and values made of the trunk's taps of all committed tokens, and all rows of its own block, also
later rows. An entry of the cache is therefore made of its token's taps alone: c = norm(fc(taps)), of which
each layer makes keys and values. Embedding and output table are the trunk's, unless the head has its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.decode.drafter.drawn import chains
from mtp_jax.decode.drafter.protocol import Committed, Drafts
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.state import DrafterState, Slots, StateShape
from mtp_jax.heads.blocks.declared import BlockConfig, BlockHead, BlockLayer, Convolution, Markov
from mtp_jax.model import hyper
from mtp_jax.model.backend import Backend
from mtp_jax.model.cache import LayerCache, PagedView, empty_cache
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.draft_rows import at_ids, draft_logits, ids_of, places_of
from mtp_jax.model.layers import rms_norm, rope_angles
from mtp_jax.model.narrow import expand, rows_of
from mtp_jax.model.params import Mlp, Params, type_of
from mtp_jax.model.sight import Sight
from mtp_jax.model.trunk import embed
from mtp_jax.model.visible import Window


@dataclass(frozen=True)
class Blocks:
    """The head of a trunk. Hashable."""

    trunk: ModelConfig

    @property
    def head(self) -> BlockConfig:
        """Sizes and options of the head."""
        assert isinstance(self.trunk.drafter, BlockConfig), "the trunk has no head that drafts blocks"
        return self.trunk.drafter

    def context(
        self, params: Params, on: Backend, taps: Sequence[Float[Array, "B W T"]]
    ) -> Float[Array, "B W D"]:
        """c of tokens, from their taps."""
        p, eps = _of(params), self.head.layers.rms_norm_eps
        with jax.named_scope("block_context"):
            return rms_norm(on.products.linear(jnp.concatenate(taps, axis=-1), p.fuse), p.context_norm, eps)

    def write(
        self,
        params: Params,
        on: Backend,
        context: Float[Array, "B W D"],
        positions: Int[Array, "B W"],
        page_table: Int[Array, "B n"],
        caches: tuple[LayerCache, ...],
    ) -> tuple[LayerCache, ...]:
        """Every layer's cache with the keys and values of tokens. positions: -1: the token is not written."""
        cfg, written = self.head.layers, []
        angles = rope_angles(cfg, positions)
        for each, cache in zip(_of(params).layers, caches, strict=True):
            a = each.layer.attention
            entries = on.kind(cfg).entries(a, cfg, context, angles)
            written.append(on.write(cache, cache.stored(entries, cfg.row), page_table, positions))
        return tuple(written)

    def seen(
        self, length: Int[Array, " B"], active: Bool[Array, " B"], first: Int[Array, " B"] | int = 0
    ) -> Window:
        """The cached tokens, of ``length``, that a block's rows see: all from ``first`` on.

        active: slots whose rows mean something.
        """
        rows = self.head.block
        itself = jnp.zeros((len(length), rows), jnp.int32)
        return Window(jnp.zeros_like(length) + first, length, jnp.where(active, rows, 0), itself)

    def run(
        self,
        params: Params,
        on: Backend,
        tokens: Int[Array, " B"],
        seen: Window,
        page_table: Int[Array, "B n"],
        caches: tuple[LayerCache, ...],
    ) -> Float[Array, "B R D"]:
        """Rows of the block that follows the cached tokens, before the final norm.

        tokens: the newest token of each slot.
        """
        p, cfg, rows = _of(params), self.head.layers, self.head.block
        ids = jnp.full((len(tokens), rows), self.head.mask, jnp.int32).at[:, 0].set(tokens)
        positions = seen.length[:, None] + jnp.arange(rows)
        view = PagedView(page_table, jnp.where(seen.count[:, None] > 0, positions, -1), seen, block=True)
        angles = rope_angles(cfg, positions)
        x = hyper.begin(embed(params.embed if p.embed is None else p.embed, ids, on.mesh), cfg)
        for i, (layer, cache) in enumerate(zip(p.layers, caches, strict=True)):
            with jax.named_scope(f"block_{i}"):
                x = self.layer(layer, on, x, angles, cache, view)
        return on.collapsed(x, p.hyper_head, cfg)

    def layer(
        self,
        p: BlockLayer,
        on: Backend,
        x: Float[Array, "B R ..."],
        angles: Float[Array, "B R ... 2 r"],
        cache: LayerCache,
        view: PagedView,
    ) -> Float[Array, "B R ..."]:
        """The residual stream of a block's rows behind a layer."""
        layer, cfg, mlp = p.layer, self.head.layers, p.layer.mlp
        a, eps = layer.attention, cfg.rms_norm_eps
        assert isinstance(mlp, Mlp), "a head's layers are dense"
        rows = rms_norm(x, layer.attention_norm, eps)
        inner, outer = _kernels(p.attention_conv, rows, on)
        q, own, _ = on.kind(cfg).project(a, cfg, _convolved(rows, inner), angles, None, ())
        context, _, _ = on.attend(a, cfg, q, own, cache, Sight(angles, (view,)))
        out = on.tap(on.after_attention(layer, cfg, jnp.zeros_like(x), context, (view,)))
        x = x + _convolved(out, outer)
        rows = rms_norm(x, layer.mlp_norm, eps)
        inner, outer = _kernels(p.mlp_conv, rows, on)
        out = on.tap(on.products.add(jnp.zeros_like(x), on.products.mlp(_convolved(rows, inner), mlp)))
        return x + _convolved(out, outer)

    def normed(self, params: Params, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        """Rows after the final norm."""
        return rms_norm(x, _of(params).norm, self.head.layers.rms_norm_eps)

    def logits(self, params: Params, on: Backend, z: Float[Array, "*b D"]) -> Float[Array, "*b v"]:
        """Logits of normed rows over the head's vocabulary, which know no other row's draft."""
        return draft_logits(params, _of(params).head, z, on)

    def after(
        self,
        params: Params,
        z: Float[Array, "B D"],
        logits: Float[Array, "B v"],
        previous: Int[Array, " B"],
    ) -> Float[Array, "B V"]:
        """The logits of one row's draft after the token before it, over the trunk's vocabulary.

        DSpark adds its Markov bias; DFlash2 scores its candidates, and every other token gets -inf.
        """
        p, vocab = _of(params), self.trunk.vocab_size
        own = None if p.target_offset is None else ids_of(p.target_offset)
        if p.markov is not None:
            logits = logits + _bias(p.markov, previous, z.dtype).astype(logits.dtype)
        if p.selector is None or self.head.selector is None:
            return logits if own is None else at_ids(logits, places_of(own, vocab))
        logits, ids = jax.lax.top_k(logits, self.head.selector[1])
        wanted = rows_of(p.selector.previous, previous) * (z @ expand(p.selector.hidden, z.dtype).T)
        offered = rows_of(p.selector.following, ids)
        logits = logits + jnp.einsum("bkr,br->bk", offered, wanted).astype(logits.dtype)
        ids, rows = ids if own is None else own[ids], jnp.arange(len(logits))[:, None]
        return jnp.full((len(logits), vocab), -jnp.inf).at[rows, ids].set(logits)


def _bias(p: Markov, previous: Int[Array, " B"], dtype: DTypeLike) -> Float[Array, "B v"]:
    return rows_of(p.previous, previous) @ expand(p.following, dtype).T


Kernels = tuple[Float[Array, "B R t D"] | None, Float[Array, "B R t D"] | None]


def _kernels(p: Convolution | None, rows: Float[Array, "B R D"], on: Backend) -> Kernels:
    """Kernels of the convolutions before and behind a sublayer, from the rows that go into the first."""
    if p is None:
        return None, None
    _, taps, width = p.base.shape
    own = on.products.linear(rows, p.projection).reshape(*rows.shape[:2], 2, taps, -1)
    whole = p.base + jnp.repeat(own, width // own.shape[-1], axis=-1)
    return whole[:, :, 0], whole[:, :, 1]


def _convolved(rows: Float[Array, "B R D"], kernel: Float[Array, "B R t D"] | None) -> Float[Array, "B R D"]:
    """y_i = sum_t kernel[i, t] x_{i - t}, within the block."""
    if kernel is None:
        return rows
    count = rows.shape[1]
    back = (jnp.pad(rows, ((0, 0), (t, 0), (0, 0)))[:, :count] for t in range(kernel.shape[2]))
    return sum((kernel[:, :, t] * x for t, x in enumerate(back)), jnp.zeros_like(rows)).astype(rows.dtype)


def _of(params: Params) -> BlockHead:
    assert isinstance(params.drafter, BlockHead), "the configuration has a head, the parameters have none"
    return params.drafter


@dataclass(frozen=True)
class BlockDrafter:
    """Drafts from one pass over a block; each is drawn after the one before it.

    The cache has the keys and values of committed tokens alone, so nothing is pending, no hidden state stands
    at the end of a page, and a rejected block leaves nothing behind.
    """

    module: Blocks
    deferral: int = 0

    @property
    def features(self) -> tuple[int, ...]:
        """The head's taps."""
        return self.module.head.taps

    def empty(self, shape: StateShape, pages: int) -> DrafterState:
        """No keys and values; a slot has nothing beside its pages."""
        cfg, kind = self.module.head.layers, type_of[shape.dtype]
        layers = range(cfg.num_hidden_layers)
        cache = (empty_cache(pages, shape.page_size, cfg, i, kind, fp8=shape.fp8) for i in layers)
        return DrafterState((), tuple(cache))

    def propose(
        self, params: Params, own: DrafterState, s: Slots, rules: DraftRules, on: Backend
    ) -> tuple[Drafts, DrafterState]:
        """Drafts of every slot: the first rows of a whole block, however few are wanted."""
        module, depth, first = self.module, rules.depth, 0 if self.module.head.anchored else 1
        seen = module.seen(s.length, s.active)
        x = module.run(params, on, s.newest, seen, s.page_table, own.pages)
        z = module.normed(params, x[:, first : first + depth])
        with jax.named_scope("draft_sample"):
            logits = module.logits(params, on, z)

        def after(k: Int[Array, ""] | int, before: Int[Array, " B"]) -> Float[Array, "B V"]:
            row, states = (jax.lax.dynamic_index_in_dim(a, k, axis=1, keepdims=False) for a in (logits, z))
            with jax.named_scope("draft_sample"):
                return module.after(params, states, row, before)

        return chains(s, rules, on, module.trunk.vocab_size, after), own

    def observe(self, params: Params, own: DrafterState, seen: Committed, on: Backend) -> DrafterState:
        """Write the keys and values of these tokens."""
        context = self.module.context(params, on, seen.features)
        written = self.module.write(params, on, context, seen.positions, seen.page_table, own.pages)
        return own.replace(pages=written)

    def flush(self, params: Params, own: DrafterState, s: Slots, on: Backend) -> DrafterState:
        """Nothing is ever deferred."""
        return own

    def resume(self, own: DrafterState, slot: Int[Array, ""], page: Int[Array, ""]) -> DrafterState:
        """The pages have all that there is."""
        return own


def drafter(trunk: ModelConfig) -> BlockDrafter:
    """Drafts with the head."""
    return BlockDrafter(Blocks(trunk))
