"""Bytes of a layer's cache, without jax: of a token, and of a slot. NextN layers count on from the trunk's.

A dtype is "float32", "bfloat16" or "fp8".
"""

import math

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


def token_bytes(cfg: ModelConfig, layer: int, dtype: str) -> int | float:
    """Bytes of a token: its row, and an index key where the layer has an indexer.

    Several tokens share an entry of compressed attention, with its index key, and a page of ``page_unit``
    tokens shares the inputs of the next page's first entry.
    """
    row, key, c = row_bytes(cfg, dtype), key_bytes(cfg, layer, dtype), cfg.compressed
    if c is None or not (ratio := c.ratio(layer)):
        return row + key
    return row + (row + key) / ratio + 4 * math.prod(c.boundary(ratio)) / cfg.page_unit


def slot_bytes(cfg: ModelConfig, layer: int, window: int) -> int:
    """Bytes of a slot: recent inputs of compressors. window: most tokens of a slot that a step verifies."""
    c = cfg.compressed
    return 4 * math.prod(c.recent(ratio, window)) if c and (ratio := c.ratio(layer)) else 0
