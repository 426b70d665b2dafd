"""Bytes that attention and experts of one layer read, and their operations, per sequence and per row."""

from dataclasses import dataclass

from mtp_jax.model.config import CompressedConfig, ModelConfig


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

    With sparse attention and more rows than a token may choose, the indexer scores all index keys, and each
    token reads its own rows if these are together fewer than all rows (`model/attention/source.py:
    Paged.of`). Otherwise every row is read once, and every pair of a token and a row is computed.
    """
    if cfg.compressed:
        return _compressed(cfg, cfg.compressed, layer, width, cached)
    index, rows, pairs = cfg.indexer, cached, width * cached
    if index is None or cached <= index.topk:
        return AttentionWork(rows, pairs * pair_flops(cfg))
    if width * index.topk <= cached:
        rows = pairs = width * index.topk
    keys = cached if cfg.indexes(layer) else 0
    return AttentionWork(rows, pairs * pair_flops(cfg), keys, 2 * width * keys * index.heads * index.dim)


def _compressed(cfg: ModelConfig, c: CompressedConfig, layer: int, width: int, cached: int) -> AttentionWork:
    """Attention over the window's rows and over entries; a token that chooses reads its own entries."""
    near, ratio = min(cached, c.window), c.ratio(layer)
    entries = cached // ratio if ratio else 0
    pairs = width * (near + min(entries, c.topk if ratio == 4 else entries)) * pair_flops(cfg)
    rows = min(cached, c.window + width - 1)
    if ratio == 4 and entries > c.topk:
        scoring = 2 * width * entries * c.index_heads * c.index_dim
        return AttentionWork(rows + width * c.topk, pairs, entries, scoring)
    return AttentionWork(rows + entries, pairs)


def pair_flops(cfg: ModelConfig) -> int:
    """Operations of all heads for one token and one row: a score and a mixed value, of MLA absorbed."""
    if own := cfg.gqa or cfg.compressed:
        return 4 * cfg.num_attention_heads * own.head_dim
    return 2 * cfg.num_attention_heads * (cfg.latent_dim + cfg.kv_lora_rank)


def expected_experts(cfg: ModelConfig, rows: float) -> float:
    """Different experts of a layer that ``rows`` tokens visit, if each chooses evenly; 0 in a dense model."""
    if not cfg.n_routed_experts:
        return 0.0
    return cfg.n_routed_experts * (1 - (1 - cfg.num_experts_per_tok / cfg.n_routed_experts) ** rows)


def expected_gpus(cfg: ModelConfig, gpus: int) -> float:
    """Different GPUs that hold the experts of one row, if it chooses evenly within ``topk_group`` groups."""
    reachable = max(gpus * cfg.topk_group / cfg.n_group, 1)
    return reachable * (1 - (1 - 1 / reachable) ** cfg.num_experts_per_tok)
