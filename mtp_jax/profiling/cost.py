"""What a program must at least read and compute, and what XLA says of it.

XLA counts the body of a loop once, however often it runs, so its figures leave most of the experts out; and
it counts an operand again for everything that reads it. The count here is from the model: weights once per
pass, the experts that this many rows visit if routing is uniform, the cached rows of the bucket, two
operations per weight and row. Activations count as free.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mtp_jax.bench import cost
from mtp_jax.bench.cost import Weights
from mtp_jax.decode.keys import StepKey
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Fp8, Params, type_of


@dataclass(frozen=True)
class Work:
    """Bytes read and floating-point operations of one launch."""

    bytes: float
    flops: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Part:
    """A part of the model: the bytes of its weights, and their number."""

    bytes: Weights
    count: Weights


def _one_byte_each(weight: Any) -> np.ndarray:
    """Stands for a weight where bytes are counted."""
    return np.broadcast_to(np.int8(0), weight.shape)


def of_launch(
    key: StepKey, cfg: ModelConfig, params: Params, page_size: int, dtype: str, shards: int
) -> Work:
    """The work of one launch of an executable, over all devices; padding counts, as it is computed too."""
    itemsize = type_of[dtype].dtype.itemsize
    both = (params, jax.tree.map(_one_byte_each, params, is_leaf=lambda a: isinstance(a, Fp8)))
    layers = list(zip(*(each.nextn for each in both), strict=True))
    nextn = [Part(*map(cost.of_nextn, p)) for p in layers]
    rows_only = [Part(*map(cost.of_nextn_cache, p)) for p in layers]
    head, trunk = Part(*map(cost.of_head, both)), Part(*map(cost.of_trunk, both))
    cached = key.pages * page_size

    def run(part: Part, layers: int, *rows: tuple[int, int]) -> Work:
        """One pass over rows of so many sequences, so many tokens in each."""
        count = sum(slots * width for slots, width in rows)
        experts = expected_experts(cfg, count)
        active = part.count.touched(min(cfg.num_experts_per_tok or 0, experts))
        latent = cfg.latent_dim * layers
        attention = 4 * count * cached * cfg.num_attention_heads * latent
        read = sum(slots for slots, _ in rows) * cached * latent * itemsize
        return Work(part.bytes.touched(experts), 2 * count * active) + Work(read, attention)

    def extend(slots: int, width: int) -> list[Work]:
        """The NextN rows of known tokens: of the last layer nothing but its rows."""
        passes = [run(p, 1, (slots, width)) for p in nextn[:-1]]
        return [*passes, *(run(p, 0, (slots, width)) for p in rows_only[-1:])]

    one, windows, chunk = (key.slots, 1), (key.slots, key.depth + 1), (key.prompts * shards, key.tokens)
    scored = run(head, 0, windows, (chunk[0], 1))
    passes = [run(trunk, cfg.num_hidden_layers, windows, chunk), scored]
    if key.depth:  # without drafts NextN entries are deferred
        passes += [run(head, 0, one)] * key.depth
        passes += [run(p, 0, one) for p in rows_only[1 : key.depth]]
        passes += [run(nextn[k % len(nextn)], 1, one) for k in range(key.depth)]
        passes += extend(*windows)
    if key.tokens:
        passes += extend(*chunk)
    return sum(passes, Work(0, 0))


def expected_experts(cfg: ModelConfig, rows: int) -> float:
    """Different experts of a layer that ``rows`` tokens visit, if each chooses evenly; 0 in a dense model."""
    if not cfg.n_routed_experts:
        return 0.0
    return cfg.n_routed_experts * (1 - (1 - cfg.num_experts_per_tok / cfg.n_routed_experts) ** rows)


def by_xla(program: Any) -> dict[str, float]:
    """FLOPs and bytes as XLA counts them; empty where the backend does not say."""
    found = program.cost_analysis() or {}
    return {name: found[name] for name in ("flops", "bytes accessed", "transcendentals") if name in found}


def memory(program: Any) -> dict[str, int]:
    """Bytes of a program's arguments, outputs, aliased buffers, temporaries and code; empty where unknown."""
    found = program.memory_analysis()
    kinds = ("argument", "output", "alias", "temp", "generated_code")
    return {} if found is None else {k: getattr(found, f"{k}_size_in_bytes") for k in kinds}
