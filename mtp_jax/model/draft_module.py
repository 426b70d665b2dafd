"""Draft modules: the layers that a recursive drafter runs, and a pass through one of them.

Row i of a layer merges a hidden state of token i with token i + 1, and predicts token i + 2. The hidden state
comes from the trunk for layer 0, then from the layer before. Kinds of modules differ in the functions of
``DraftModule`` alone.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from mtp_jax.errors import ConfigError
from mtp_jax.model.backend import Backend
from mtp_jax.model.cache import LayerCache, Views, WholeCache
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.indexer import Choice
from mtp_jax.model.layers import rms_norm, rope_angles
from mtp_jax.model.moe import Routing
from mtp_jax.model.narrow import Table
from mtp_jax.model.params import Layer, Params
from mtp_jax.model.products.plain import Residual, Rows
from mtp_jax.model.sight import Sight
from mtp_jax.model.trunk import Model, OneCache, Traced, block, embed
from mtp_jax.model.visible import Visible, Window, chain


@struct.dataclass
class Pass:
    """Rows of one pass through a layer, which merges each token with the hidden state of the token before it.

    Attributes:
        tokens: ids [B, W].
        hidden: hidden states [B, W, D], those of ``DraftModule.fuse`` for layer 0, else the layer's before.
        positions: positions of the tokens.
        views: where entries are written, and the rows that tokens see; none without pages.
        choice: rows for sparse attention, if an earlier pass chose them.
    """

    tokens: Int[Array, "B W"]
    hidden: Float[Array, "B W D"]
    positions: Int[Array, "B W"]
    views: Views = ()
    choice: Choice = ()


@runtime_checkable
class DraftModule(Protocol):
    """The layers of a drafter, whose hidden states have width D, beside a trunk of vocabulary V. Hashable."""

    @property
    def name(self) -> str:
        """The name of its scopes in programs."""
        ...

    @property
    def cfg(self) -> ModelConfig:
        """Sizes of the layers."""
        ...

    @property
    def numbers(self) -> range:
        """Numbers of the layers, as ``cfg`` counts them."""
        ...

    @property
    def features(self) -> tuple[int, ...]:
        """The trunk's hidden states that ``fuse`` reads; see ``Drafter.features``."""
        ...

    @property
    def width(self) -> int:
        """Values of the hidden states that layers merge."""
        ...

    @property
    def trunk(self) -> ModelConfig:
        """Sizes of the trunk, whose tokens are drafted."""
        ...

    def layer(self, params: Params, k: int) -> Layer:
        """The decoder block of layer ``k``."""
        ...

    def fuse(
        self, params: Params, on: Backend, features: Sequence[Float[Array, "B W T"]]
    ) -> Float[Array, "B W D"]:
        """The hidden states that layer 0 merges."""
        ...

    def merge(
        self, params: Params, on: Backend, k: int, given: Pass
    ) -> tuple[Float[Array, "B W D"], Rows | None]:
        """(Stream that layer ``k`` adds to, rows that its attention reads; None: the stream, normed)."""
        ...

    def fed_back(self, params: Params, on: Backend, k: int, x: Residual) -> Float[Array, "B W D"]:
        """The hidden states that the next pass merges, from the stream behind layer ``k``."""
        ...

    def logits(self, params: Params, k: int, z: Float[Array, "*b D"], on: Backend) -> Float[Array, "*b V"]:
        """Draft logits of layer ``k``, float32, from ``fed_back``; -inf for tokens that it never drafts."""
        ...


@runtime_checkable
class OfSome(Protocol):
    """A draft module that may draft some of the trunk's tokens alone."""

    def ids(self, params: Params) -> Int[Array, " v"] | None:
        """The tokens that it drafts; None: all."""
        ...

    def own_logits(
        self, params: Params, k: int, z: Float[Array, "*b D"], on: Backend
    ) -> Float[Array, "*b v"]:
        """``DraftModule.logits`` of these tokens."""
        ...


def beside(
    table: Table,
    token_norm: Float[Array, " D"],
    hidden_norm: Float[Array, " D"],
    eps: float,
    given: Pass,
    on: Backend,
) -> Float[Array, "B W E"]:
    """[norm(embedding), norm(hidden)] of every row, E = 2 D. table: of embeddings."""
    e = rms_norm(embed(table, given.tokens, on.mesh), token_norm, eps)
    return jnp.concatenate([e, rms_norm(given.hidden.astype(e.dtype), hidden_norm, eps)], axis=-1)


def run(
    module: DraftModule, params: Params, on: Backend, k: int, given: Pass, cache: OneCache
) -> tuple[Float[Array, "B W D"], OneCache, Routing | None, Choice]:
    """Layer ``k``. Returns (hidden states fed back, cache, routing of an MoE layer, choice)."""
    with jax.named_scope(f"{module.name}_{k}"):
        model, p = Model(module.cfg, on), module.layer(params, k)
        x, rows = module.merge(params, on, k, given)
        sight = Sight(rope_angles(module.cfg, given.positions), given.views, given.choice)
        x, cache, routing, choice = block(p, model, x, sight, cache, rows)
        return module.fed_back(params, on, k, x), cache, routing, choice


def write_cache(
    module: DraftModule, params: Params, on: Backend, k: int, given: Pass, cache: LayerCache
) -> LayerCache:
    """The cache as ``run`` leaves it, of a pass with one view, without its attention and MLP.

    Later rows see nothing of a row but its entries, which depend on the row's own token and hidden state
    alone.
    """
    cfg, p, (view,) = module.cfg, module.layer(params, k), given.views
    with jax.named_scope(f"{module.name}_{k}"):
        x, rows = module.merge(params, on, k, given)
        if rows is None:
            rows = on.entered(x, p.attention_norm, p.attention_hyper, cfg)[1]
        entries = on.kind(cfg).entries(p.attention, cfg, rows, rope_angles(cfg, given.positions))
        return on.write(cache, cache.stored(entries, cfg.row), view.page_table, view.written)


def teacher_forced(
    module: DraftModule,
    params: Params,
    on: Backend,
    k: int,
    tokens: Int[Array, "B n"],
    hidden: Float[Array, "B n D"],
) -> Float[Array, "B n D"]:
    """Layer ``k`` over a whole sequence without a cache: row i merges ``tokens[i]`` with ``hidden[i]``.

    For layer 0 ``tokens`` are the sequence from its second token on.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return run(module, params, on, k, Pass(tokens, hidden, positions), None)[0]


def drafts_forced(
    module: DraftModule,
    params: Params,
    on: Backend,
    tokens: Int[Array, "B n"],
    hidden: Float[Array, "B T D"],
    depth: int,
    together: Bool[Array, "B T T"] | None = None,
) -> tuple[Traced, ...]:
    """The drafts of depth 1 to ``depth`` after every row of ``hidden``, had they been the text's own tokens.

    Row i of depth k merges ``tokens[:, i + k]``, so there are at least T + depth of them. A single layer is
    run as it drafts ("training-time test", arXiv 2503.01840): a row of depth k sees the rows of depth 1 up to
    its own and its own chain, not other rows of depth k. Each of several layers sees its own rows, as in the
    report; layer (k - 1) modulo their number serves depth k.

    hidden: fused. together: whether two rows are of one text; None: all are. Raises ConfigError for sparse
    attention.
    """
    if module.cfg.attention.sparse:
        raise ConfigError("this model has sparse attention, through which nothing is trained here")
    slots, length, _ = hidden.shape
    layers = len(module.numbers)
    causal, own = jnp.tri(length, dtype=bool)[None], jnp.eye(length, dtype=bool)[None]
    causal = causal if together is None else causal & together
    own = jnp.broadcast_to(own, causal.shape)
    first = cache = WholeCache(jnp.zeros((slots, 0, module.cfg.row.width), hidden.dtype), causal)
    outputs, z = [], hidden
    for k in range(depth):
        if layers > 1:
            cache = first
        elif k:
            cache = WholeCache(cache.rows, jnp.concatenate([causal] + [own] * k, axis=-1))
        positions = jnp.broadcast_to(jnp.arange(k, k + length), (slots, length))
        drafted = tokens[:, k + 1 : k + 1 + length]
        given = Pass(drafted, z, positions)
        z, cache, routing, _ = run(module, params, on, k % layers, given, cache)
        outputs.append(Traced(z, () if routing is None else (routing,), ()))
    return tuple(outputs)


def existing(k: int, positions: Int[Array, "B W"]) -> Int[Array, "B W"]:
    """Rows of layer ``k``: the first is row k + 1, as each layer merges the token before it. -1 elsewhere."""
    return jnp.where(positions > k, positions, -1)


def seen(k: int, positions: Int[Array, "B W"]) -> Visible:
    """Rows of layer ``k`` that known tokens see; ``positions`` run on, then -1 after the last."""
    start, count = positions[:, 0], (positions >= 0).sum(axis=1)
    return chain(start, count, k + 1)


def seen_by_draft(
    step: Int[Array, ""] | int, layers: int, length: Int[Array, " B"], active: Bool[Array, " B"]
) -> Visible:
    """Rows that the draft of ``step`` sees in its layer, of number ``step`` modulo ``layers``.

    Rows past the newest token's exist where the layer has drafted before, every ``layers`` positions, and of
    the drafts before its first own, as the layers ran on each other's rows.

    length: number of rows of each slot. step: must be an int where there are several layers.
    """
    if layers == 1:
        layer, drafted = 0, (jnp.int32(1) << step) - 1
    else:
        layer = step % layers
        drafted = sum(1 << (row - 1) for row in range(1, step + 1) if row <= layer or row % layers == layer)
    first, count = jnp.full_like(length, layer + 1), active.astype(jnp.int32)
    return Window(first, length + 1, count, jnp.full((*length.shape, 1), drafted, jnp.int32))
