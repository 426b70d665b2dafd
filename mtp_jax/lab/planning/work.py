"""Bytes that attention and experts of one layer read, and their operations, per sequence and per row."""

from dataclasses import dataclass

from mtp_jax.model.config import ModelConfig


@dataclass(frozen=True)
class AttentionWork:
    """Attention of one sequence in one layer.

    Attributes:
        rows: number of cached rows that are read, entries of compressed attention among them.
        flops: number of operations of scores and mixed values, of all heads.
        keys: index keys that are read.
        scoring: number of operations of the indexer.
    """

    rows: int
    flops: int
    keys: int = 0
    scoring: int = 0


def attention(cfg: ModelConfig, layer: int, width: int, cached: int) -> AttentionWork:
    """Attention of ``width`` tokens over ``cached`` rows; NextN layers count on from the trunk's.

    See ``AttentionConfig.reads``.
    """
    found = cfg.attention.reads(layer, width, cached)
    return AttentionWork(found.rows, found.pairs * pair_flops(cfg), found.keys, found.scoring)


def pair_flops(cfg: ModelConfig) -> int:
    """Operations of all heads for one token and one row: a score and a mixed value, of MLA absorbed."""
    return 2 * cfg.num_attention_heads * cfg.attention.pair_values


def expected_experts(cfg: ModelConfig, rows: float) -> float:
    """Different experts of a layer that ``rows`` tokens visit, if each chooses evenly; 0 in a dense model."""
    if not cfg.n_routed_experts:
        return 0.0
    return cfg.n_routed_experts * (1 - (1 - cfg.num_experts_per_tok / cfg.n_routed_experts) ** rows)


def expected_gpus(cfg: ModelConfig, gpus: int) -> float:
    """Different GPUs that hold the experts of one row, if it chooses evenly within ``topk_group`` groups."""
    reachable = max(gpus * cfg.topk_group / cfg.n_group, 1)
    return reachable * (1 - (1 - 1 / reachable) ** cfg.num_experts_per_tok)
