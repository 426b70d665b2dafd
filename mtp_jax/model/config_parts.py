"""Parts of a ``ModelConfig``: YaRN, the indexer, grouped-query attention; rows of a cache."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

Trees = Literal["grown", "given"]
"""Trees whose nodes are the best of all that a drafter finds, or a tree of nodes that the user names."""


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension (arXiv 2309.00071), in the names of ``rope_scaling``."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None

    def _mscale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def rope_factor(self) -> float:
        """The factor of cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def softmax_factor(self) -> float:
        """The factor of the softmax scale."""
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


@dataclass(frozen=True)
class IndexerConfig:
    """The indexer of DeepSeek's sparse attention (arXiv 2512.02556, section 2.1).

    Attributes:
        heads: number of heads.
        dim: width of a head; its first qk_rope_head_dim channels are rotated.
        topk: the most entries that a token attends to.
        interleaved: whether the rope pairs channels (0, 1), (2, 3), ...
        shared: for each layer of the trunk, whether it has no indexer, and attends to the entries that the
            last layer with one chose. A NextN layer always has its own.
        share_drafts: whether the first draft of a step chooses for all.
    """

    heads: int
    dim: int
    topk: int
    interleaved: bool = False
    shared: tuple[bool, ...] = ()
    share_drafts: bool = False

    KEYS: ClassVar[Mapping[str, str]] = {
        "heads": "index_n_heads",
        "dim": "index_head_dim",
        "topk": "index_topk",
        "interleaved": "indexer_rope_interleave",
        "share_drafts": "index_share_for_mtp_iteration",
    }
    """Keys of config.json by field."""


@dataclass(frozen=True)
class GqaConfig:
    """Grouped-query attention (GQA, arXiv 2305.13245) in place of MLA, as GLM-4.5 to 4.7 have it.

    Attributes:
        kv_heads: number of kv heads. Consecutive query heads share one, in groups of equal size.
        head_dim: width of every query, key and value head.
        rotary: the share of a head that is rotated: its first channels, half-split.
        qk_norm: whether queries and keys are normed head by head, before they are rotated.
        bias: whether the projections of queries, keys and values add a bias.
    """

    kv_heads: int
    head_dim: int
    rotary: float
    qk_norm: bool = False
    bias: bool = False

    KEYS: ClassVar[Mapping[str, str]] = {
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "rotary": "partial_rotary_factor",
        "qk_norm": "use_qk_norm",
        "bias": "attention_bias",
    }
    """Keys of config.json by field."""

    @property
    def width(self) -> int:
        """Number of keys, or of values, of all heads."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """A draft head beside a trunk; the kinds of heads are in ``head_config``.

    Attributes:
        taps: residual streams of the trunk that the head reads, k the stream after k layers.
        maps: whether the head has a table of its tokens' ids (``d2t``).
        embeds: whether the head has an embedding of its own.
        trees: the trees that it can make.
    """

    trees: ClassVar[Trees | None] = None

    taps: tuple[int, ...]
    maps: bool = False
    embeds: bool = False

    @property
    def name(self) -> str:
        """Its kind, for people."""
        raise NotImplementedError

    @property
    def most_drafts(self) -> int | None:
        """The most drafts of a chain; None: any number, by recursion."""
        return None


@dataclass(frozen=True)
class RowFormat:
    """A token's row in a layer's cache, and the way in which an FP8 cache stores it.

    Attributes:
        width: values of a row.
        keys: the part [start, stop) that scores are made of and the mixed values are not.
        e4m3: number of leading values that an FP8 cache stores in e4m3. Further values are bfloat16.
        block: number of consecutive e4m3 values that share a float32 scale.
    """

    width: int
    keys: tuple[int, int]
    e4m3: int
    block: int

    @property
    def fp8_bytes(self) -> int:
        """Bytes of a row in an FP8 cache."""
        return self.e4m3 + 2 * (self.width - self.e4m3) + 4 * -(-self.e4m3 // self.block)
