"""Parts of a ``ModelConfig``: YaRN, the indexer, grouped-query attention; rows of a cache."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject, is_number

Trees = Literal["grown", "given"]
"""Trees whose nodes are the best of all that a drafter finds, or a tree of nodes that the user names."""


Scoring = Literal["sigmoid", "sqrtsoftplus"]
"""The function that makes scores of a router's logits."""

MOST = 2**16
"""The limit of counts: each layer, head or expert has tensors of its own."""


def _check_part(part: Any, sizes: Iterable[str], flags: Iterable[str] = ()) -> None:
    """Check the types of fields, and the range of sizes. Raises ConfigError with the key of config.json."""
    for name in sizes:
        value = getattr(part, name)
        if type(value) is not int or not 1 <= value <= MOST:
            raise ConfigError(
                f"{part.KEYS[name]} = {value!r:.80}; expected a whole number from 1 to {MOST:,}"
            )
    for name in flags:
        if type(value := getattr(part, name)) is not bool:
            raise ConfigError(f"{part.KEYS[name]} = {value!r:.80}; expected true or false")


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
    truncate: bool = True  # the blend begins and ends at whole channels

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

    def check(self, rope: int, q_lora_rank: int | None, layers: int, nextn: int) -> None:
        """Raises ConfigError for values that do not go with a model's rope width, low rank and layers."""
        _check_part(self, ("heads", "dim", "topk"), ("interleaved", "share_drafts"))
        if self.dim < rope:
            raise ConfigError(f"index_head_dim = {self.dim}; expected qk_rope_head_dim = {rope} or more")
        if q_lora_rank is None:
            raise ConfigError("q_lora_rank = None; the indexer's queries are made of the queries' low rank")
        if len(self.shared) != layers or self.shared[0]:
            raise ConfigError(
                f"the indexer is said to be shared by layers {self.shared}; expected {layers} values, "
                "the first of them False: it has no layer before it"
            )
        if self.share_drafts and nextn > 1:
            raise ConfigError(
                f"index_share_for_mtp_iteration with num_nextn_predict_layers = {nextn}; "
                "expected one layer, or false"
            )


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

    @property
    def rope_dim(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_dim * self.rotary)

    def check(self, heads: int) -> None:
        """Raises ConfigError for values that do not go with a model's number of heads."""
        _check_part(self, ("kv_heads", "head_dim"), ("qk_norm", "bias"))
        if heads % self.kv_heads:
            raise ConfigError(
                f"num_key_value_heads = {self.kv_heads} does not divide num_attention_heads = {heads}"
            )
        sane = is_number(self.rotary) and 0 < self.rotary <= 1
        if not sane or self.rope_dim % 2 or not self.rope_dim:
            raise ConfigError(
                f"partial_rotary_factor = {self.rotary!r:.80} of head_dim = {self.head_dim}; expected a "
                "number above 0, at most 1, that gives an even number of channels"
            )


@dataclass(frozen=True)
class CompressedConfig:
    """Window and compressed attention in place of MLA, as DeepSeek-V4 has it.

    A token attends to the rows of the last ``window`` tokens and to entries that each compress r consecutive
    tokens: at ratio r = 4 the ``topk`` entries that an indexer chooses, at ratio 128 all of them.

    Attributes:
        head_dim: width of every query head, and of the one row per token that is key and value of all heads.
        groups: equal parts of the heads, each projected down on its own behind attention.
        group_rank: width of a group's projection.
        window: the last tokens that a token attends to, itself included.
        theta: base of rope's frequencies in layers that compress.
        index_heads: number of the indexer's heads.
        index_dim: width of an index head.
        topk: the most entries of ratio 4 that a token attends to.
        ratios: compression ratio of each layer of the trunk, 0 where it has the window alone. Draft layers
            have the window alone.
    """

    head_dim: int
    groups: int
    group_rank: int
    window: int
    theta: float
    index_heads: int
    index_dim: int
    topk: int
    ratios: tuple[int, ...]

    KEYS: ClassVar[Mapping[str, str]] = {
        "head_dim": "head_dim",
        "groups": "o_groups",
        "group_rank": "o_lora_rank",
        "window": "sliding_window",
        "theta": "compress_rope_theta",
        "index_heads": "index_n_heads",
        "index_dim": "index_head_dim",
        "topk": "index_topk",
        "ratios": "compress_ratios",
    }
    """Keys of config.json by field."""

    def ratio(self, layer: int) -> int:
        """The compression ratio of a layer; draft layers count on from the trunk's."""
        return self.ratios[layer] if layer < len(self.ratios) else 0

    def check(self, heads: int, rope: int) -> None:
        """Raises ConfigError for values that do not go with a model's heads and their rope width."""
        sizes = "head_dim", "groups", "group_rank", "window", "index_heads", "index_dim", "topk"
        _check_part(self, sizes)
        if not (is_number(self.theta) and self.theta > 1):
            raise ConfigError(f"compress_rope_theta = {self.theta!r:.80}; expected a number above 1")
        if heads % self.groups:
            raise ConfigError(f"o_groups = {self.groups} does not divide num_attention_heads = {heads}")
        for key, width in (("head_dim", self.head_dim), ("index_head_dim", self.index_dim)):
            if not 0 < rope <= width:
                raise ConfigError(f"qk_rope_head_dim = {rope}; expected at most {key} = {width}")

    @staticmethod
    def overlap(ratio: int) -> int:
        """Tokens before an entry's own that it is made of, too."""
        return ratio if ratio == 4 else 0


@dataclass(frozen=True)
class HyperConfig:
    """Manifold-constrained hyper-connections (arXiv 2512.24880): several residual streams side by side.

    Attributes:
        streams: number of streams.
        iterations: normalisations of the matrix that mixes them, columns and rows in turn.
        eps: added to sums and gates.
    """

    streams: int
    iterations: int
    eps: float

    KEYS: ClassVar[Mapping[str, str]] = {
        "streams": "hc_mult",
        "iterations": "hc_sinkhorn_iters",
        "eps": "hc_eps",
    }
    """Keys of config.json by field."""

    def check(self) -> None:
        """Raises ConfigError for impossible values."""
        _check_part(self, ("streams", "iterations"))
        if not (is_number(self.eps) and self.eps > 0):
            raise ConfigError(f"hc_eps = {self.eps!r:.80}; expected a positive number")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """A draft head beside a trunk; ``head.DraftHead`` asks it more, ``heads`` has kinds.

    Attributes:
        taps: residual streams of the trunk that the head reads, k the stream after k layers.
        maps: whether the head has a table of its tokens' ids (``d2t``).
        embeds: whether the head has an embedding of its own.
        trees: the trees that it can make.
        inside: whether its tensors are in the model's own folder.
    """

    trees: ClassVar[Trees | None] = None
    inside: ClassVar[bool] = False

    taps: tuple[int, ...]
    maps: bool = False
    embeds: bool = False

    @property
    def name(self) -> str:
        """Its kind, for people."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        """A noun phrase for it, for people."""
        return f"a {self.name} head"

    @property
    def keys(self) -> JsonObject:
        """Keys of the model's config.json that describe it; none of a head with a folder of its own."""
        return {}

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
