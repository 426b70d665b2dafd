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
from mtp_jax.model.products.plain import Rows, Stream
from mtp_jax.model.sharding import constrain
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


@struct.dataclass
class Sight:
    """The places of a pass's tokens.

    Attributes:
        angles: of rope, at the tokens' positions.
        views: where entries are written, and the cached rows that tokens see; none without pages.
        choice: rows for sparse attention, if another layer has chosen them.
        tokens: ids, where a layer chooses experts by them.
    """

    angles: Float[Array, "B W ... 2 r"]
    views: Views = ()
    choice: Choice = ()
    tokens: Int[Array, "B W"] | None = None


def block(
    p: Layer, model: Model, x: Stream, sight: Sight, cache: OneCache, rows: Rows | None = None
) -> tuple[Stream, OneCache, Routing | None, Choice]:
    """A pre-norm decoder block. Returns (x, cache, routing of an MoE block, choice of sparse attention).

    rows: read by attention; None: x, normed.
    """
    x, cache, choice = attended(p, model, x, sight, cache, rows)
    x, routing = fed(p, model, x, sight.views, sight.tokens)
    return x, cache, routing, choice


@partial(jax.jit, static_argnames="model")
def attended(
    p: Layer, model: Model, x: Stream, sight: Sight, cache: Cache | None, rows: Rows | None = None
) -> tuple[Stream, Cache | None, Choice]:
    """The first half of a block. Returns (x, cache, choice of sparse attention)."""
    cfg, on, angles, views = model.cfg, model.on, sight.angles, sight.views
    with jax.named_scope("attention_project"):
        x, q, entries, cache = on.before_attention(p, cfg, x, angles, cache, views, rows)
    context, cache, choice = on.attend(p.attention, cfg, q, entries, cache, views, sight.choice)
    with jax.named_scope("attention_out"):
        x = on.after_attention(p, cfg, x, context, views)
    return x, cache, choice


@partial(jax.jit, static_argnames="model")
def fed(
    p: Layer, model: Model, x: Stream, views: Views, tokens: Int[Array, "B W"] | None = None
) -> tuple[Stream, Routing | None]:
    """The second half of a block. Returns (x, routing of an MoE block). tokens: see ``Sight``."""
    counts = join([v.packed(v.written >= 0) for v in views], model.on.mesh) if views else None
    return model.on.feed_forward(p, model.cfg, x, counts, tokens)


@jax.named_scope("embed")
def embed(table: Table, tokens: Int[Array, "B W"], mesh: Mesh | None) -> Float[Array, "B W D"]:
    """Rows of the embedding table."""
    return constrain(rows_of(table, tokens), mesh, "slots", None, None)


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
    x, angles = hyper.begin(embed(params.embed, tokens, on.mesh), cfg), rope_angles(cfg, positions)
    batches = micro_batches.count(len(tokens), len(views), on)
    hashed = tokens if cfg.num_hash_layers else None
    xs, rest = (micro_batches.cut(a, batches, on) for a in (x, (angles, views, hashed)))
    kept, routings, first = [], [], 0
    taken = _taken(taps, 0, xs, on)
    choices: list[list[Choice]] = [[() for _ in xs]]
    for group, layers in enumerate(params.layers):
        mine: Any = caches[group] if caches else None
        before, routed, chosen = None, [], []
        if isinstance(layers, Stack):
            with jax.named_scope(f"layers_{first}_to_{first + len(layers) - 1}"):
                inside = {k - first: on.tap(xs[0]) for k in taps if first < k <= first + len(layers)}
                xs[0], mine, found, inside = _looped(layers, model, xs[0], angles, mine, views, inside)
            taken |= {first + k: tap for k, tap in inside.items()}
            kept, routings, first = [*kept, mine], [*routings, *found], first + len(layers)
            continue
        with jax.named_scope(f"layer_{first}"):
            for b, (angles, views, _) in enumerate(rest):
                # Layers behind a layer with an indexer, without one of their own, attend to its choice as
                # well.
                given = () if cfg.indexes(first) else choices[-1][b]
                x = micro_batches.after(xs[b], before)
                xs[b], mine, choice = attended(layers, model, x, Sight(angles, views, given), mine)
                before, chosen = xs[b], [*chosen, choice]
            for b, (_, views, ids) in enumerate(rest):
                x = micro_batches.after(xs[b], routed[-1].ids if routed and routed[-1] else None)
                xs[b], routing = fed(layers, model, x, views, ids if first < cfg.num_hash_layers else None)
                routed.append(routing)
        choices.append(chosen)
        first += 1
        taken |= _taken(taps, first, xs, on)
        kept += [] if mine is None else [mine]
        routings += [] if routed[0] is None else [_of_all(routed, on)]
    if STREAMS in taps:
        taken[STREAMS] = micro_batches.joined([x.reshape(*x.shape[:2], -1) for x in xs], on)
    ones = [on.collapsed(x, params.hyper_head, cfg) for x in xs]
    hidden = micro_batches.joined([on.finish(x, params.norm, cfg.rms_norm_eps) for x in ones], on)
    looked = [micro_batches.joined(chosen, on) for chosen in choices[1:]]
    return Traced(hidden, tuple(routings), tuple(kept), tuple(looked), taken)


def _taken(taps: Sequence[int], number: int, xs: list[Stream], on: Backend) -> Taps:
    """The residual stream of all batches, if it is to be handed on."""
    return {number: micro_batches.joined([on.tap(x) for x in xs], on)} if number in taps else {}


def _looped(
    layers: Stack[Layer],
    model: Model,
    x: Stream,
    angles: Float[Array, "B W ... 2 r"],
    cache: Stack[LayerCache],
    views: Views,
    taps: Taps,
) -> tuple[Stream, Stack[LayerCache], list[Routing], Taps]:
    """Layers alike, one after the other. The caches of all are one, of which each layer has its pages.

    taps: streams to fill in, by the number of these layers before each, with arrays of their shape.
    """
    pages = jax.tree.leaves(cache)[0].shape[1]

    def one(carry: tuple[Stream, LayerCache, Taps], i: Int[Array, ""]) -> tuple[Any, Routing | None]:
        p = one_of(layers, i)
        own = tuple(replace(v, page_table=v.page_table + i * pages) for v in views)
        x, mine, _ = attended(p, model, carry[0], Sight(angles, own), carry[1])
        x, routing = fed(p, model, x, own)
        taken = {k: jnp.where(i + 1 == k, model.on.tap(x), tap) for k, tap in carry[2].items()}
        return (x, mine, taken), routing

    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), cache.tree)
    (x, flat, taps), routing = jax.lax.scan(one, (x, flat, taps), jnp.arange(len(layers)))
    cache = Stack(jax.tree.map(lambda a: a.reshape(-1, pages, *a.shape[1:]), flat))
    numbers = () if routing is None else range(len(layers))
    return x, cache, [jax.tree.map(itemgetter(i), routing) for i in numbers], taps


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
        pages = jax.tree.leaves(cache)[0].shape[1]

        def layer(i: Int[Array, ""], flat: LayerCache) -> LayerCache:
            return on.move(flat, page_table + i * pages, source, target)

        flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), cache.tree)
        flat = jax.lax.fori_loop(0, len(cache), layer, flat)
        return Stack(jax.tree.map(lambda a: a.reshape(-1, pages, *a.shape[1:]), flat))

    return tuple(map(one, caches))


def _of_all(routed: Sequence[Routing | None], on: Backend) -> Routing:
    """The routing of all batches of a layer."""
    each = [r for r in routed if r is not None]
    if len(each) == 1:
        return each[0]
    ids, weights = (micro_batches.joined([getattr(r, of) for r in each], on) for of in ("ids", "weights"))
    over = [r.over for r in each if r.over is not None]
    return Routing(ids, weights, over=jnp.stack(over).sum(axis=0) if over else None)


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
