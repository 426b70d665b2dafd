"""Kinds of attention as they are declared, without jax: sizes, the facts of a cached row, and costs.

The equations are in ``mtp_jax/model/attention/``, a file per kind; a ``Backend`` says which belongs to which.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import is_number
from mtp_jax.model.config_parts import RopeScaling, check_even, check_part, check_size
from mtp_jax.model.hf_quantization import FP8_BLOCK

Ropes = Sequence[tuple[float, RopeScaling | None]]
"""The base of rope's frequencies and their scaling, of each kind of layers."""

OF_MLA = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Fields of ``ModelConfig`` that a model with MLA needs."""


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

    def bytes(self, dtype: str) -> int:
        """Bytes of a row in a cache of a dtype: "float32", "bfloat16" or "fp8"."""
        return self.fp8_bytes if dtype == "fp8" else self.width * _SIZES[dtype]


_SIZES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Reads:
    """The cached rows that attention of one sequence reads in one layer.

    Attributes:
        rows: number of rows, entries of compressed attention among them.
        pairs: number of pairs of a token and a row that are computed.
        keys: number of index keys.
        scoring: operations of the indexer.
    """

    rows: int
    pairs: int
    keys: int = 0
    scoring: int = 0


class AttentionConfig(ABC):
    """The facts of a kind of attention that the rest of the project asks for.

    Layers have numbers; draft layers count on from the trunk's.

    Attributes:
        consecutive: whether neighbouring rows must be of consecutive tokens.
        sharpened: whether YaRN has a part in the factor of scores.
        excludes: fields of ``ModelConfig`` that must not be set beside it.
        fp8_size: the size, for people, that decides how many values of a row an FP8 cache holds in e4m3.
    """

    consecutive: ClassVar[bool] = False
    sharpened: ClassVar[bool] = False
    excludes: ClassVar[Sequence[str]] = ()
    fp8_size: ClassVar[str] = "head_dim"

    @property
    def page_unit(self) -> int:
        """The number of tokens that a page holds a multiple of, so that no entry is split between two."""
        return 1

    @property
    def sparse(self) -> bool:
        """Whether tokens attend to rows that they choose."""
        return False

    @property
    @abstractmethod
    def key_dim(self) -> int:
        """Width of one query or key head, rope part included."""

    @property
    @abstractmethod
    def value_dim(self) -> int:
        """Width of one value head."""

    @property
    @abstractmethod
    def rope_dim(self) -> int:
        """Channels of a head that are rotated."""

    @property
    @abstractmethod
    def row(self) -> RowFormat:
        """A row of a layer's cache."""

    @property
    @abstractmethod
    def pair_values(self) -> int:
        """Values that a head multiplies for one token and one cached row: of the score, and of the mix."""

    @abstractmethod
    def check(self, heads: int, layers: int, nextn: int) -> None:
        """Raises ConfigError for values that do not go with a model's numbers of heads and layers."""

    def parts(self) -> Mapping[str, int]:
        """Numbers that the GPUs of a group must divide, beside the model's own, by key of config.json."""
        return {}

    def index_width(self, layer: int) -> int:
        """Width of a layer's index keys; 0 where it has none."""
        return 0

    def has_entries(self, layer: int) -> bool:
        """Whether tokens of a layer attend to entries of several tokens, too."""
        return False

    def ropes(self, theta: float, scaling: RopeScaling | None) -> Ropes:
        """Base and scaling of the frequencies, of each kind of layers. theta, scaling: the model's."""
        return ((theta, scaling),)

    def reads(self, layer: int, width: int, cached: int) -> Reads:
        """Rows that ``width`` tokens of a sequence read, which has ``cached`` of them.

        Every row is read once, and every pair of a token and a row is computed.
        """
        return Reads(cached, width * cached)

    def prompt_reads(self, layer: int, seen: float) -> tuple[float, float]:
        """Rows that a token of a prompt attends to, and operations of the indexer for it.

        seen: mean number of tokens before the tokens of the prompt.
        """
        return seen, 0.0

    def token_bytes(self, layer: int, dtype: str, page_size: int) -> int | float:
        """Bytes of a token in a layer's cache: its row, and an index key where the layer has an indexer."""
        return self.row.bytes(dtype) + self.key_bytes(layer, dtype)

    def slot_bytes(self, layer: int, dtype: str, widest: int) -> int:
        """Bytes of a slot in a layer's cache, beside its pages. widest: most tokens of a step."""
        return 0

    def key_bytes(self, layer: int, dtype: str) -> int:
        """Bytes of an index key, in an FP8 cache with its scale; 0 where a layer has no indexer."""
        width = self.index_width(layer)
        if dtype == "fp8":
            return width + 4 if width else 0
        return width * _SIZES[dtype]


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
        check_part(self, ("heads", "dim", "topk"), ("interleaved", "share_drafts"))
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
class MlaConfig(AttentionConfig):
    """Multi-head latent attention (MLA, arXiv 2405.04434, section 2.1), sparse where there is an indexer.

    Attributes:
        rank: width of the latent, ``kv_lora_rank``.
        nope: channels of a query or key head that are not rotated.
        rope: channels that are, of each query head and of the key that all heads share.
        v: width of a value head.
        q_rank: width of the queries' low rank; None: queries have none.
        indexer: chooses the rows that a token attends to; None: it attends to all.
    """

    rank: int
    nope: int
    rope: int
    v: int
    q_rank: int | None
    indexer: IndexerConfig | None

    sharpened = True
    fp8_size = "kv_lora_rank"

    @property
    def sparse(self) -> bool:
        """See ``AttentionConfig``."""
        return self.indexer is not None

    @property
    def key_dim(self) -> int:
        """See ``AttentionConfig``."""
        return self.nope + self.rope

    @property
    def value_dim(self) -> int:
        """See ``AttentionConfig``."""
        return self.v

    @property
    def rope_dim(self) -> int:
        """See ``AttentionConfig``."""
        return self.rope

    @property
    def row(self) -> RowFormat:
        """[latent | rope key]; an FP8 cache holds the latent in e4m3 and the rope key in bfloat16."""
        return RowFormat(self.rank + self.rope, (self.rank, self.rank + self.rope), self.rank, FP8_BLOCK)

    @property
    def pair_values(self) -> int:
        """See ``AttentionConfig``; of the absorbed form."""
        return 2 * self.rank + self.rope

    def check(self, heads: int, layers: int, nextn: int) -> None:
        """See ``AttentionConfig``."""
        sizes = zip(OF_MLA, (self.rank, self.nope, self.rope, self.v), strict=True)
        for name, value in sizes:
            check_size(name, value)
        if self.q_rank is not None:
            check_size("q_lora_rank", self.q_rank, " or null")
        check_even("qk_rope_head_dim", self.rope)
        if self.indexer:
            self.indexer.check(self.rope, self.q_rank, layers, nextn)

    def index_width(self, layer: int) -> int:
        """See ``AttentionConfig``; a draft layer always has an indexer of its own."""
        i = self.indexer
        return 0 if i is None or (layer < len(i.shared) and i.shared[layer]) else i.dim

    def reads(self, layer: int, width: int, cached: int) -> Reads:
        """See ``AttentionConfig``.

        With sparse attention and more rows than a token may choose, the indexer scores all index keys, and
        each token reads its own rows if these are together fewer than all rows
        (`model/attention/source.py: Paged.of`).
        """
        i, rows, pairs = self.indexer, cached, width * cached
        if i is None or cached <= i.topk:
            return Reads(rows, pairs)
        if width * i.topk <= cached:
            rows = pairs = width * i.topk
        keys = cached if self.index_width(layer) else 0
        return Reads(rows, pairs, keys, 2 * width * keys * i.heads * i.dim)

    def prompt_reads(self, layer: int, seen: float) -> tuple[float, float]:
        """See ``AttentionConfig``."""
        i = self.indexer
        if i is None or 2 * seen <= i.topk:  # at the end of the prompt
            return seen, 0.0
        return min(seen, i.topk), 2 * i.heads * self.index_width(layer) * seen


@dataclass(frozen=True)
class GqaConfig(AttentionConfig):
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

    excludes = (*OF_MLA, "q_lora_rank", "indexer")

    @property
    def key_dim(self) -> int:
        """See ``AttentionConfig``."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """See ``AttentionConfig``."""
        return self.head_dim

    @property
    def rope_dim(self) -> int:
        """See ``AttentionConfig``."""
        return int(self.head_dim * self.rotary)

    @property
    def row(self) -> RowFormat:
        """[keys of every kv head | their values].

        An FP8 cache holds all in e4m3, with a scale for every head of either, so that none spans both.
        """
        width = self.kv_heads * self.head_dim
        return RowFormat(2 * width, (0, width), 2 * width, self.head_dim)

    @property
    def pair_values(self) -> int:
        """See ``AttentionConfig``."""
        return 2 * self.head_dim

    def check(self, heads: int, layers: int, nextn: int) -> None:
        """See ``AttentionConfig``."""
        check_part(self, ("kv_heads", "head_dim"), ("qk_norm", "bias"))
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
class CompressedConfig(AttentionConfig):
    """Window and compressed attention in place of MLA, as DeepSeek-V4 has it.

    A token attends to the rows of the last ``window`` tokens and to entries that each compress r consecutive
    tokens: at ratio r = 4 the ``topk`` entries that an indexer chooses, at ratio 128 all of them.

    Attributes:
        head_dim: width of every query head, and of the one row per token that is key and value of all heads.
        rope: the last channels of a head that are rotated.
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
    rope: int
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
        "rope": "qk_rope_head_dim",
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

    consecutive = True
    fp8_size = "head_dim - qk_rope_head_dim"

    @property
    def sparse(self) -> bool:
        """See ``AttentionConfig``."""
        return True

    @property
    def page_unit(self) -> int:
        """See ``AttentionConfig``."""
        return max((1, *self.ratios))

    @property
    def key_dim(self) -> int:
        """See ``AttentionConfig``."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """See ``AttentionConfig``."""
        return self.head_dim

    @property
    def rope_dim(self) -> int:
        """See ``AttentionConfig``."""
        return self.rope

    @property
    def row(self) -> RowFormat:
        """The one key and value of all heads."""
        return RowFormat(self.head_dim, (0, self.head_dim), self.head_dim - self.rope, FP8_BLOCK // 2)

    @property
    def pair_values(self) -> int:
        """See ``AttentionConfig``."""
        return 2 * self.head_dim

    def index_width(self, layer: int) -> int:
        """See ``AttentionConfig``."""
        return self.index_dim if self.ratio(layer) == 4 else 0

    def has_entries(self, layer: int) -> bool:
        """See ``AttentionConfig``."""
        return self.ratio(layer) > 0

    def ropes(self, theta: float, scaling: RopeScaling | None) -> Ropes:
        """Base and scaling of layers without entries, and of layers with entries."""
        return (theta, None), (self.theta, scaling)

    def reads(self, layer: int, width: int, cached: int) -> Reads:
        """The window's rows, and entries; a token that chooses reads its own entries."""
        near, ratio = min(cached, self.window), self.ratio(layer)
        entries = cached // ratio if ratio else 0
        pairs = width * (near + min(entries, self.topk if ratio == 4 else entries))
        rows = min(cached, self.window + width - 1)
        if ratio == 4 and entries > self.topk:
            scoring = 2 * width * entries * self.index_heads * self.index_dim
            return Reads(rows + width * self.topk, pairs, entries, scoring)
        return Reads(rows + entries, pairs)

    def prompt_reads(self, layer: int, seen: float) -> tuple[float, float]:
        """See ``AttentionConfig``."""
        found = self.reads(layer, 1, int(seen))
        return found.pairs, found.scoring

    def token_bytes(self, layer: int, dtype: str, page_size: int) -> int | float:
        """See ``AttentionConfig``.

        A page has the rows of its last tokens, the inputs of the next page's first entry, and entries of
        several tokens each, with their index keys.
        """
        row = super().token_bytes(layer, dtype, page_size)
        if layer >= len(self.ratios):
            return row
        ratio = self.ratio(layer)
        page = self.row.bytes(dtype) * self.window + self.overlap(ratio) * self._inputs(layer)
        return page / page_size + (row / ratio if ratio else 0)

    def slot_bytes(self, layer: int, dtype: str, widest: int) -> int:
        """See ``AttentionConfig``: rows of recent tokens, and inputs of compressors."""
        if layer >= len(self.ratios):
            return 0
        found = (self.window - 1 + widest - 1) * self.row.bytes(dtype)
        if not (ratio := self.ratio(layer)):
            return found
        over = self.overlap(ratio)
        return found + (ratio + over - 1 + widest - 1) * self._inputs(layer) * (2 if over else 1)

    def _inputs(self, layer: int) -> int:
        """Bytes that a layer's compressors read of a token for one entry: values and gates, float32."""
        return 4 * 2 * (self.row.width + self.index_width(layer))

    def check(self, heads: int, layers: int, nextn: int) -> None:
        """See ``AttentionConfig``."""
        sizes = "head_dim", "rope", "groups", "group_rank", "window", "index_heads", "index_dim", "topk"
        check_part(self, sizes)
        check_even("qk_rope_head_dim", self.rope)
        if not (is_number(self.theta) and self.theta > 1):
            raise ConfigError(f"compress_rope_theta = {self.theta!r:.80}; expected a number above 1")
        if heads % self.groups:
            raise ConfigError(f"o_groups = {self.groups} does not divide num_attention_heads = {heads}")
        for key, width in (("head_dim", self.head_dim), ("index_head_dim", self.index_dim)):
            if self.rope > width:
                raise ConfigError(f"qk_rope_head_dim = {self.rope}; expected at most {key} = {width}")

    def parts(self) -> Mapping[str, int]:
        """See ``AttentionConfig``."""
        return {"o_groups": self.groups}

    @staticmethod
    def overlap(ratio: int) -> int:
        """Tokens before an entry's own that it is made of, too."""
        return ratio if ratio == 4 else 0
