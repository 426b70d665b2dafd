"""Bytes of a layer's cache, without jax: of a token, and of a slot. NextN layers count on from the trunk's.

A dtype is "float32", "bfloat16" or "fp8".
"""

from mtp_jax.model.config import ModelConfig

_SIZES = {"float32": 4, "bfloat16": 2}


def row_bytes(cfg: ModelConfig, dtype: str) -> int:
    """Bytes of a row, or of an entry of compressed attention."""
    return cfg.row.fp8_bytes if dtype == "fp8" else cfg.row.width * _SIZES[dtype]


def key_bytes(cfg: ModelConfig, layer: int, dtype: str) -> int:
    """Bytes of an index key, in an FP8 cache with its scale; 0 where a layer has no indexer."""
    width = cfg.index_dim(layer)
    if dtype == "fp8":
        return width + 4 if width else 0
    return width * _SIZES[dtype]


def token_bytes(cfg: ModelConfig, layer: int, dtype: str, page_size: int) -> int | float:
    """Bytes of a token: its row, and an index key where the layer has an indexer.

    A page of compressed attention has the rows of its last tokens, the inputs of the next page's first entry,
    and entries of several tokens each, with their index keys.
    """
    row, key, c = row_bytes(cfg, dtype), key_bytes(cfg, layer, dtype), cfg.compressed
    if c is None or layer >= cfg.num_hidden_layers:
        return row + key
    ratio = c.ratio(layer)
    page = row * c.window + c.overlap(ratio) * _inputs(cfg, layer)
    return page / page_size + ((row + key) / ratio if ratio else 0)


def slot_bytes(cfg: ModelConfig, layer: int, dtype: str, widest: int) -> int:
    """Bytes of a slot: rows of recent tokens, and inputs of compressors. widest: most tokens of a step."""
    c = cfg.compressed
    if c is None or layer >= cfg.num_hidden_layers:
        return 0
    found = (c.window - 1 + widest - 1) * row_bytes(cfg, dtype)
    if not (ratio := c.ratio(layer)):
        return found
    over = c.overlap(ratio)
    return found + (ratio + over - 1 + widest - 1) * _inputs(cfg, layer) * (2 if over else 1)


def _inputs(cfg: ModelConfig, layer: int) -> int:
    """Bytes that a layer's compressors read of a token for one entry: values and gates, float32."""
    return 4 * 2 * (cfg.row.width + cfg.index_dim(layer))
