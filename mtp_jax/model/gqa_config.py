"""Grouped-query attention as it is declared."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import is_number
from mtp_jax.model.attention_config import OF_MLA, AttentionConfig, RowFormat
from mtp_jax.model.config_parts import check_part


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

    short = "GQA"
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

    def heads_described(self, heads: int) -> str:
        """See ``AttentionConfig``."""
        return f"{heads} in {self.kv_heads} groups"

    def split_fault(self, heads: int, each: int) -> str | None:
        """See ``AttentionConfig``."""
        group = heads // self.kv_heads
        if each % group == 0 or group % each == 0:
            return None
        return f"each {group} share a kv head: they are neither whole groups nor within one"

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
