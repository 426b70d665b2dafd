"""The trunk: embedding, decoder blocks, final norm, logits. A backend carries out each stage of a block.

Both halves of a block are jitted functions of their own: a program with many layers alike traces and lowers
each once, kernels included, and calls it for every layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from mtp_jax.model import hyper, micro_batches
from mtp_jax.model.backend import Backend, xla
from mtp_jax.model.cache import Cache, LayerCache, Views, WindowCache
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.indexer import Choice
from mtp_jax.model.layers import rope_angles
from mtp_jax.model.moe import Routing
from mtp_jax.model.narrow import Table, rows_of
from mtp_jax.model.params import Layer, Params
from mtp_jax.model.parts import join
from mtp_jax.model.products.plain import Residual, Rows
from mtp_jax.model.sharding import constrain
from mtp_jax.model.sight import Sight
from mtp_jax.model.stack import Stack, one_of

REFERENCE = xla()
"""The backend of calls that choose none."""

Taps = dict[int, Float[Array, "_B _W _D"]]
"""Residual streams by number: k is the stream after k layers, 0 the embedding; STREAMS: see there.

A tap of a model with hyper-connections is the mean of its streams.
"""

STREAMS = -2
"""The number of a tap that is all streams behind the last layer, side by side, with hyper-connections."""

Caches = tuple[LayerCache | WindowCache | Stack[LayerCache], ...]
"""Caches of groups of layers, a stack for a stack."""

OneCache = TypeVar("OneCache", bound=Cache | None)


@dataclass(frozen=True)
class Model:
    """Static facts of a model's passes: its sizes, and the backend that carries them out. Hashable."""

    cfg: ModelConfig
    on: Backend = REFERENCE


@struct.dataclass
class Traced:
    """A forward pass with the values that tests and training look at.

    Attributes:
        hidden: hidden states after the final norm [B, T, D].
        routing: routing of every MoE layer, in order.
        caches: caches of the groups of layers after the pass; none without a cache.
        choices: choice of each layer, of sparse attention.
        taps: residual streams [B, T, D] that were asked for, by number.
    """

    hidden: Float[Array, "B T D"]
    routing: tuple[Routing, ...]
    caches: Caches
    choices: tuple[Choice, ...] = ()
    taps: Taps = field(default_factory=dict)


def block(
    p: Layer, model: Model, x: Residual, sight: Sight, cache: OneCache, rows: Rows | None = None
) -> tuple[Residual, OneCache, Routing | None, Choice]:
    """A pre-norm decoder block. Returns (x, cache, routing of an MoE block, choice of sparse attention).

    rows: read by attention; None: x, normed.
    """
    x, cache, choice = attended(p, model, x, sight, cache, rows)
    x, routing = fed(p, model, x, sight.views, sight.tokens)
    return x, cache, routing, choice


@partial(jax.jit, static_argnames="model")
def attended(
    p: Layer, model: Model, x: Residual, sight: Sight, cache: Cache | None, rows: Rows | None = None
) -> tuple[Residual, Cache | None, Choice]:
    """The first half of a block. Returns (x, cache, choice of sparse attention)."""
    cfg, on = model.cfg, model.on
    with jax.named_scope("attention_project"):
        x, q, entries, cache = on.before_attention(p, cfg, x, sight, cache, rows)
    context, cache, choice = on.attend(p.attention, cfg, q, entries, cache, sight)
    with jax.named_scope("attention_out"):
        x = on.after_attention(p, cfg, x, context, sight.views)
    return x, cache, choice


@partial(jax.jit, static_argnames="model")
def fed(
    p: Layer, model: Model, x: Residual, views: Views, tokens: Int[Array, "B W"] | None = None
) -> tuple[Residual, Routing | None]:
    """The second half of a block. Returns (x, routing of an MoE block). tokens: see ``Sight``."""
    counts = join([v.packed(v.written >= 0) for v in views], model.on.mesh) if views else None
    return model.on.feed_forward(p, model.cfg, x, counts, tokens)


@jax.named_scope("embed")
def embed(table: Table, tokens: Int[Array, "B W"], mesh: Mesh | None) -> Float[Array, "B W D"]:
    """Rows of the embedding table."""
    return constrain(rows_of(table, tokens), mesh, "slots", None, None)


class _Passage:
    """A pass on its way through the layers, and the values that layers leave beside the stream.

    Its slots are one batch, or micro-batches, each a stream and the places of its tokens.
    """

    def __init__(self, model: Model, batches: list[tuple[Residual, Sight]], taps: Sequence[int]) -> None:
        """Before the first layer. taps: numbers of the residual streams to hand on."""
        self._model, self._batches, self._wanted, self._layers = model, batches, taps, 0
        self._routing: list[Routing] = []
        self._caches: list[LayerCache | WindowCache | Stack[LayerCache]] = []
        self._choices: list[Choice] = []
        self._taps: Taps = {}
        self._tap(0)

    def layer(self, p: Layer, cache: LayerCache | WindowCache | None) -> None:
        """One layer. Its first half takes the batches one after the other, then its second half does."""
        cfg, on, number = self._model.cfg, self._model.on, self._layers
        between, left, routed = [], [], []
        with jax.named_scope(f"layer_{number}"):
            for x, sight in self._batches:
                # Layers behind a layer with an indexer, without one of their own, attend to its choice as
                # well.
                own = replace(sight, choice=() if cfg.indexes(number) else sight.choice, tokens=None)
                x = micro_batches.after(x, between[-1][0] if between else None)
                x, cache, choice = attended(p, self._model, x, own, cache)
                between.append((x, replace(sight, choice=choice)))
            for x, sight in between:
                x = micro_batches.after(x, routed[-1] and routed[-1].ids if routed else None)
                hashed = sight.tokens if number < cfg.num_hash_layers else None
                x, routing = fed(p, self._model, x, sight.views, hashed)
                left.append((x, sight))
                routed.append(routing)
        self._batches, self._layers = left, number + 1
        self._choices.append(micro_batches.joined([sight.choice for _, sight in left], on))
        self._tap(self._layers)
        self._caches += [] if cache is None else [cache]
        self._routing += [] if routed[0] is None else [micro_batches.joined_routing(routed, on)]

    def stack(self, layers: Stack[Layer], cache: Stack[LayerCache]) -> None:
        """Layers alike in a loop, of one batch. The caches of all are one, of which each has its pages."""
        ((x, sight),), model, first, count = self._batches, self._model, self._layers, len(layers)

        def one(carry: tuple[Residual, LayerCache, Taps], i: Int[Array, ""]) -> tuple[Any, Routing | None]:
            p = one_of(layers, i)
            own = tuple(replace(v, page_table=v.page_table + i * cache.size) for v in sight.views)
            x, mine, _ = attended(p, model, carry[0], Sight(sight.angles, own), carry[1])
            x, routing = fed(p, model, x, own)
            taken = {k: jnp.where(i + 1 == k - first, model.on.tap(x), tap) for k, tap in carry[2].items()}
            return (x, mine, taken), routing

        with jax.named_scope(f"layers_{first}_to_{first + count - 1}"):
            taps = {k: model.on.tap(x) for k in self._wanted if first < k <= first + count}
            (x, flat, taps), routing = jax.lax.scan(one, (x, cache.flat, taps), jnp.arange(count))
            self._caches.append(cache.with_flat(flat))
        self._batches, self._layers = [(x, sight)], first + count
        self._taps |= taps
        numbers = () if routing is None else range(count)
        self._routing += [jax.tree.map(itemgetter(i), routing) for i in numbers]

    def finished(self, params: Params) -> Traced:
        """The pass behind the last layer."""
        cfg, on = self._model.cfg, self._model.on
        self._tap(STREAMS)
        ones = [on.collapsed(x, params.hyper_head, cfg) for x, _ in self._batches]
        hidden = micro_batches.joined([on.finish(x, params.norm, cfg.rms_norm_eps) for x in ones], on)
        routing, caches, choices = tuple(self._routing), tuple(self._caches), tuple(self._choices)
        return Traced(hidden, routing, caches, choices, self._taps)

    def _tap(self, number: int) -> None:
        """Keep the residual stream with this number, if it is wanted."""
        if number in self._wanted:
            on, xs = self._model.on, [x for x, _ in self._batches]
            found = [side_by_side(on.streams(x)) if number == STREAMS else on.tap(x) for x in xs]
            self._taps[number] = micro_batches.joined(found, on)


def side_by_side(x: Float[Array, "B W S D"]) -> Float[Array, "B W SD"]:
    """Several streams as one row."""
    return x.reshape(*x.shape[:2], -1)


def run(
    params: Params,
    model: Model,
    tokens: Int[Array, "B W"],
    positions: Int[Array, "B W"],
    caches: Caches | None,
    views: Views,
    taps: Sequence[int] = (),
) -> Traced:
    """The trunk over rows of tokens, reading and extending the cache.

    caches: one for each group of ``params.layers``, a stack for a stack. views: one for each part (see
    ``parts``) that the rows consist of. Without a cache there are none, and every token sees the tokens
    before it. taps: numbers of the residual streams to hand on.
    """
    cfg, on = model.cfg, model.on
    x = hyper.begin(embed(params.embed, tokens, on.mesh), cfg)
    sight = Sight(rope_angles(cfg, positions), views, tokens=tokens if cfg.num_hash_layers else None)
    passage = _Passage(model, micro_batches.cut((x, sight), len(views), on), taps)
    for layers, cache in zip(params.layers, caches or [None] * len(params.layers), strict=True):
        through: Any = passage.stack if isinstance(layers, Stack) else passage.layer
        through(layers, cache)
    return passage.finished(params)


def moved(
    caches: Caches,
    on: Backend,
    page_table: Int[Array, "B n"],
    source: Int[Array, "B W"],
    target: Int[Array, "B W"],
) -> Caches:
    """Every layer's cache with rows of each slot copied, see ``Backend.move``."""

    def one(cache: Any) -> Any:
        if not isinstance(cache, Stack):
            return on.move(cache, page_table, source, target)

        def layer(i: Int[Array, ""], flat: LayerCache) -> LayerCache:
            return on.move(flat, page_table + i * cache.size, source, target)

        return cache.with_flat(jax.lax.fori_loop(0, len(cache), layer, cache.flat))

    return tuple(map(one, caches))


def forward(
    params: Params, cfg: ModelConfig, tokens: Int[Array, "B T"], on: Backend = REFERENCE
) -> Float[Array, "B T D"]:
    """Hidden states after the final norm, causal, without a cache."""
    return forward_traced(params, cfg, tokens, on).hidden


def forward_traced(
    params: Params,
    cfg: ModelConfig,
    tokens: Int[Array, "B T"],
    on: Backend = REFERENCE,
    taps: Sequence[int] = (),
) -> Traced:
    """``forward`` with the routing of every MoE layer, and with ``taps``."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return run(params, Model(cfg, on), tokens, positions, None, (), taps)


def logits(params: Params, hidden: Float[Array, "*b D"], on: Backend = REFERENCE) -> Float[Array, "*b V"]:
    """Next-token logits, float32."""
    return on.products.head(hidden, params.table)
