"""Bytes of weights that a step touches: what speculation costs where reading weights is what takes time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from mtp_jax.model.moe import Routing
from mtp_jax.model.params import Layer, Moe, NextN, Params


@dataclass(frozen=True)
class Weights:
    """Bytes of a part of the model.

    Attributes:
        always: bytes that every pass touches.
        expert: bytes of one routed expert, summed over the part's MoE layers.
    """

    always: int
    expert: int

    def touched(self, experts: float) -> float:
        """Bytes of a pass that visits this many different experts per MoE layer."""
        return self.always + self.expert * experts

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(self.always + other.always, self.expert + other.expert)


def _bytes(tree: object) -> int:
    return sum(a.nbytes for a in jax.tree.leaves(tree))


def of_layer(layer: Layer) -> Weights:
    """One decoder block."""
    if not isinstance(layer.mlp, Moe):
        return Weights(_bytes(layer), 0)
    routed = _bytes((layer.mlp.gate_up, layer.mlp.down))
    return Weights(_bytes(layer) - routed, routed // layer.mlp.down.shape[0])


def of_trunk(params: Params) -> Weights:
    """Decoder blocks and final norm, without tables: an embedding costs only its rows."""
    return sum((of_layer(p) for p in params.layers), Weights(_bytes(params.norm), 0))


def of_head(params: Params) -> Weights:
    """The vocabulary table behind the logits."""
    return Weights(_bytes(params.embed if params.head is None else params.head), 0)


def of_nextn(p: NextN) -> Weights:
    """One NextN layer without its tables."""
    return of_layer(p.layer) + Weights(_bytes((p.token_norm, p.hidden_norm, p.merge, p.norm)), 0)


def of_nextn_cache(p: NextN) -> Weights:
    """What the cache rows of a NextN layer need: its merge and the latent projection."""
    norms = (p.token_norm, p.hidden_norm, p.layer.attention_norm, p.layer.attention.kv_norm)
    return Weights(_bytes((*norms, p.merge, p.layer.attention.kv_a)), 0)


def step_bytes(params: Params, depth: int, experts: Mapping[int, float]) -> float:
    """Bytes that one draft-and-verify step of one slot touches.

    The trunk and its head over a window of depth + 1; NextN and the head once per draft, one row each; and to
    extend the NextN cache over the window, all of each layer but the last, of which only the rows. Layers
    but the first also write their row of the newest token. Without drafts the rows are deferred, to a program
    of its own.
    ``experts[w]``: different experts per MoE layer that a window of w visits.
    """
    trunk, head = of_trunk(params), of_head(params)
    window = depth + 1
    total = trunk.touched(experts[window]) + head.always
    if not depth:
        return total
    layers = [of_nextn(p) for p in params.nextn]
    drafts = sum(layers[k % len(layers)].touched(experts[1]) for k in range(depth))
    extend = sum(p.touched(experts[window]) for p in layers[:-1])
    extend += of_nextn_cache(params.nextn[-1]).always
    newest = sum(of_nextn_cache(p).always for p in params.nextn[1:depth])
    return total + depth * head.always + drafts + extend + newest


def predicted_speedup(acceptance: float, plain: float, speculative: float) -> float:
    """Tokens per step times the cost of a plain step over the cost of a speculative one."""
    return acceptance * plain / speculative


def distinct_experts(ids: np.ndarray, window: int) -> float:
    """Mean number of different experts in a sliding window over rows of expert ids [T, k]."""
    starts = range(len(ids) - window + 1)
    return float(np.mean([len(np.unique(ids[i : i + window])) for i in starts]))


def experts_per_window(routing: Sequence[Routing], windows: Sequence[int]) -> dict[int, float]:
    """Per window width the mean over the MoE layers of ``distinct_experts``; 0 for a dense model."""
    layers = [np.asarray(r.ids[0]) for r in routing]
    return {w: float(np.mean([distinct_experts(ids, w) for ids in layers] or [0.0])) for w in windows}
