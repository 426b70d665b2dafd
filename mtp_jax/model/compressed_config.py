"""Window and compressed attention as it is declared."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import is_number
from mtp_jax.model.attention_config import AttentionConfig, Reads, Ropes, RowFormat
from mtp_jax.model.config_parts import RopeScaling, check_even, check_part
from mtp_jax.model.hf_quantization import FP8_BLOCK


@dataclass(frozen=True)
class CompressedConfig(AttentionConfig):
    """Window and compressed attention in place of MLA, as DeepSeek-V4 has it.

    A token attends to the rows of the last ``window`` tokens and to entries that each compress r consecutive
    tokens: at ratio r = 4 the ``topk`` entries that an indexer chooses, at ratio 128 all of them.

    Attributes:
        head_dim: width of every query head, and of the one row per token that is key and value of all heads.
        rope: number of the last channels of a head, which are rotated.
        groups: number of equal parts of the heads, each projected down on its own behind attention.
        group_rank: width of a group's projection.
        window: number of the last tokens that a token attends to, itself included.
        theta: factor between rope's frequencies, their base, in layers that compress.
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

    short = "compressed attention"
    consecutive = True
    trained = False
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

    @property
    def described(self) -> str:
        """See ``AttentionConfig``."""
        chosen, whole = (self.ratios.count(ratio) for ratio in (4, 128))
        return (
            f"the last {self.window} tokens; in {chosen} of {len(self.ratios)} layers {self.topk:,} entries "
            f"of 4 tokens, in {whole} all entries of 128"
        )

    def first_layers(self, count: int) -> Mapping[str, Any]:
        """See ``AttentionConfig``."""
        return {"compressed": replace(self, ratios=self.ratios[:count])}

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
