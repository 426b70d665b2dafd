"""Multi-head latent attention (MLA) as it is declared, and the indexer of sparse attention."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mtp_jax.errors import ConfigError
from mtp_jax.model.attention_config import OF_MLA, AttentionConfig, Reach, Reads, RowFormat
from mtp_jax.model.config_parts import check_even, check_part, check_size
from mtp_jax.model.hf_quantization import FP8_BLOCK


@dataclass(frozen=True)
class IndexerConfig:
    """The indexer of DeepSeek's sparse attention (arXiv 2512.02556, section 2.1).

    Attributes:
        heads: number of heads.
        dim: width of a head; its first qk_rope_head_dim channels are rotated.
        topk: the most entries that a token attends to.
        interleaved: whether the rope pairs channels (0, 1), (2, 3), ...
        shared: whether a layer of the trunk, each in turn, has no indexer, and attends to the entries that
            the last layer with one chose. A NextN layer always has its own.
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
        nope: number of channels of a query or key head that are not rotated.
        rope: number of channels that are, of each query head and of the key that all heads share.
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

    short = "MLA"
    sharpened = True
    fp8_size = "kv_lora_rank"

    @property
    def kernel_reach(self) -> Reach:
        """Kernels end at the last row that a token sees; a choice of rows needs a score of each."""
        return "keys" if self.sparse else "rows"

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

    def first_layers(self, count: int) -> Mapping[str, Any]:
        """See ``AttentionConfig``."""
        return {"indexer": self.indexer and replace(self.indexer, shared=self.indexer.shared[:count])}

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
