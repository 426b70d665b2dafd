"""Least bytes and operations of a launch: the cost of speculation where most time goes to reading weights.

Counted are weights once per pass, the experts that its rows visit, the cached rows of the bucket, and two
operations per weight and row. Activations count as free.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import numpy as np
from jaxtyping import PyTree

from mtp_jax.decode.keys import StepKey
from mtp_jax.lab.planning.work import attention, expected_experts
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.head import HeadTree, head_of
from mtp_jax.model.moe import Routing
from mtp_jax.model.narrow import is_narrow, nbytes
from mtp_jax.model.params import Layer, NextN, Params, type_of
from mtp_jax.model.stack import each


@dataclass(frozen=True)
class Size:
    """Size of a part of the model, in bytes or in weights.

    Attributes:
        always: bytes or weights that every pass touches.
        expert: bytes or weights of one routed expert, summed over the part's MoE layers.
    """

    always: int
    expert: int = 0

    def touched(self, experts: float) -> float:
        """Size of the weights that a pass over ``experts`` different experts per MoE layer touches."""
        return self.always + self.expert * experts

    def __add__(self, other: "Size") -> "Size":
        return Size(self.always + other.always, self.expert + other.expert)


_T = TypeVar("_T")
Measure = Callable[[PyTree], int]
"""The size of a tree of parameters: ``nbytes``, or ``count``."""


def count(weights: PyTree) -> int:
    """Number of weights in a tree of parameters, narrow weights included."""
    return sum(math.prod(w.shape) for w in jax.tree.leaves(weights, is_leaf=is_narrow))


def of_layer(layer: Layer, size: Measure = nbytes) -> Size:
    """The size of one decoder block."""
    if not (moe := layer.moe):
        return Size(size(layer))
    routed = size(moe.routed)
    return Size(size(layer) - routed, routed // moe.down.shape[0])


def of_trunk(params: Params, size: Measure = nbytes) -> Size:
    """The size of decoder blocks and final norm, without tables: an embedding costs only its rows.

    A runner's blocks count, too: layers alike are a stack there.
    """
    sizes = (of_layer(_shapes(tree, len(at)), size) for tree, at in each(params.layers))
    return sum(sizes, Size(size(params.norm)))


def _shapes(tree: Layer, indices: int) -> Layer:
    """The shapes of a tree of weights, without their first axes."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[indices:], a.dtype), tree)


def of_head(params: Params, size: Measure = nbytes) -> Size:
    """The size of the vocabulary table for the logits."""
    return Size(size(params.table))


def of_nextn(p: NextN | HeadTree, size: Measure = nbytes) -> Size:
    """One NextN layer, or the part of a draft head that one draft reads, without tables."""
    return sum((of_layer(layer, size) for layer in p.blocks), Size(size(p.merging)))


def of_entries(p: NextN | HeadTree, size: Measure = nbytes) -> Size:
    """The parameters of a NextN layer, or of a draft head, that make its entries of the cache."""
    return Size(size(p.entries))


def _of_drawn(params: Params, size: Measure = nbytes) -> Size:
    """The table behind the drafts' logits: a runner's parameters have the rows that drafts choose among."""
    own = params.drafter and params.drafter.head
    shared = params.table if params.draft_rows is None else params.draft_rows.table
    return Size(size(shared if own is None else own))


def of_draft(params: Params, size: Measure = nbytes) -> Size:
    """One draft of a NextN layer, or of a draft head that drafts one token in a pass: its layer and table."""
    modules: tuple[NextN | HeadTree, ...] = (params.drafter,) if params.drafter else params.nextn
    return of_nextn(modules[0], size) + _of_drawn(params, size)


@dataclass(frozen=True)
class LaunchCost:
    """Bytes read and floating-point operations of one launch."""

    bytes: float
    flops: float

    def __add__(self, other: "LaunchCost") -> "LaunchCost":
        return LaunchCost(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class ModelPart:
    """A part of the model: the bytes of its weights, and their number."""

    bytes: Size
    count: Size

    @classmethod
    def of(cls, part: Callable[[_T, Measure], Size], params: _T) -> "ModelPart":
        """A part of some parameters, with its bytes and its number of weights."""
        return cls(part(params, nbytes), part(params, count))


def _drafting_layers(cfg: ModelConfig) -> range:
    """Numbers of the layers that attend for one draft: a NextN layer's, or a head's own."""
    first, head = cfg.num_hidden_layers, head_of(cfg)
    if head is None:
        return range(first, first + 1)
    return range(first, first + (head.sizes.num_hidden_layers if head.sizes else 0))


def of_launch(
    key: StepKey,
    cfg: ModelConfig,
    params: Params,
    page_size: int,
    dtype: str,
    shards: int,
    visited: Callable[[int], float] | None = None,
) -> LaunchCost:
    """The work of one launch of an executable, over all devices; padding counts, as it is computed too.

    The trunk runs over windows of depth + 1 tokens and the chunk, its head over the windows and the last row
    of each prompt; NextN, or a draft head, and the table behind its logits once per draft, one row each (a
    head that drafts blocks once, all rows together); and, to extend the NextN cache over windows and chunk,
    all of each layer but the last, of which only the rows. Layers but the first also write their row of the
    newest token. Without drafts the windows' NextN entries are deferred.

    visited: number of different experts of a layer that n rows visit; None: ``expected_experts``.
    """
    visited = visited or partial(expected_experts, cfg)
    itemsize = type_of[dtype].dtype.itemsize
    modules: tuple[NextN | HeadTree, ...] = (params.drafter,) if params.drafter else params.nextn
    nextn = [ModelPart.of(of_nextn, p) for p in modules]
    rows_only = [ModelPart.of(of_entries, p) for p in modules]
    head, trunk = ModelPart.of(of_head, params), ModelPart.of(of_trunk, params)
    drawn, draft_head = ModelPart.of(_of_drawn, params), head_of(cfg)
    cached = key.pages * page_size
    # Layers that attend: the drafting layers, or none, where only rows are written.
    own, none = _drafting_layers(cfg), range(0)
    sizes = draft_head and draft_head.sizes

    def run(part: ModelPart, layers: range, *rows: tuple[int, int]) -> LaunchCost:
        """Add one pass over rows: (sequences, tokens in each)."""
        count = sum(slots * width for slots, width in rows)
        experts = visited(count)
        active = part.count.touched(min(cfg.num_experts_per_tok or 0, experts))
        attending = sum((of_attention(layer, some) for layer in layers for some in rows), LaunchCost(0, 0))
        return LaunchCost(part.bytes.touched(experts), 2 * count * active) + attending

    def of_attention(layer: int, rows: tuple[int, int]) -> LaunchCost:
        """The work of attention in a layer, of windows over the cached rows of their slots."""
        (slots, width), of = rows, cfg
        if sizes and layer in own:
            of = sizes
        a = attention(of, layer, width, cached)
        values = a.rows * of.row.width + a.keys * of.attention.index_width(layer)
        return LaunchCost(slots * values * itemsize, slots * (a.flops + a.scoring))

    def extend(rows: tuple[int, int]) -> list[LaunchCost]:
        """Add the NextN entries of known tokens; the last layer computes its entries only."""
        passes = [run(p, own, rows) for p in nextn[:-1]]
        return [*passes, *(run(p, none, rows) for p in rows_only[-1:])]

    one, windows, chunk = (key.slots, 1), (key.slots, key.depth + 1), (key.prompts * shards, key.tokens)
    passes = [
        run(trunk, range(cfg.num_hidden_layers), windows, chunk),
        run(head, none, windows, (chunk[0], 1)),
    ]
    if key.depth:
        if draft_head and draft_head.rows:
            block = key.slots, draft_head.rows
            passes += [run(nextn[0], own, block), run(drawn, none, (key.slots, key.depth))]
        else:
            passes += [run(drawn, none, one)] * key.depth
            passes += [run(p, none, one) for p in rows_only[1 : key.depth]]
            passes += [run(nextn[k % len(nextn)], own, one) for k in range(key.depth)]
        passes += extend(windows)
    if key.tokens:
        passes += extend(chunk)
    return sum(passes, LaunchCost(0, 0))


def distinct_experts(ids: np.ndarray, window: int) -> float:
    """Mean number of different experts in a sliding window over rows of expert ids [T, k]."""
    starts = range(len(ids) - window + 1)
    return float(np.mean([len(np.unique(ids[i : i + window])) for i in starts]))


def experts_per_window(routing: Sequence[Routing], windows: Sequence[int]) -> dict[int, float]:
    """Per window width the mean over the MoE layers of ``distinct_experts``; 0 for a dense model."""
    layers = [np.asarray(r.ids[0]) for r in routing]
    return {w: float(np.mean([distinct_experts(ids, w) for ids in layers] or [0.0])) for w in windows}
