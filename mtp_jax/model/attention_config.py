"""The facts of a kind of attention, without jax: sizes, the format of a cached row, and costs.

Kinds are declared in ``mla_config``, ``gqa_config`` and ``compressed_config``. Their equations are in
``mtp_jax/model/attention/``, a file per kind; a ``Backend`` says which belongs to which.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from mtp_jax.model.config_parts import RopeScaling

Ropes = Sequence[tuple[float, RopeScaling | None]]
"""The base of rope's frequencies and their scaling, of each kind of layers."""

OF_MLA = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Fields of ``ModelConfig`` that a model with MLA needs."""

Reach = Literal["rows", "keys", "table"]
"""The memory and time of attention over a page table. rows: they follow the rows in use, however wide the
table is. keys: an indexer's scores take a number of the table's width for every token. table: scores of every
head do.
"""


@dataclass(frozen=True)
class RowFormat:
    """A token's row in a layer's cache, and the way in which an FP8 cache stores it.

    Attributes:
        width: number of values of a row.
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
        scoring: number of operations of the indexer.
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
        short: its name for people.
        trained: whether ``tune-head`` has derivatives of layers with it.
        fp8_size: the size, for people, that decides how many values of a row an FP8 cache holds in e4m3.
    """

    consecutive: ClassVar[bool] = False
    sharpened: ClassVar[bool] = False
    excludes: ClassVar[Sequence[str]] = ()
    fp8_size: ClassVar[str] = "head_dim"
    short: ClassVar[str]
    trained: ClassVar[bool] = True

    @property
    def page_unit(self) -> int:
        """The number of tokens that a page holds a multiple of, so that no entry is split between two."""
        return 1

    @property
    def sparse(self) -> bool:
        """Whether tokens attend to rows that they choose."""
        return False

    @property
    def kernel_reach(self) -> Reach:
        """The reach of this engine's GPU kernels, where they take the shapes; without kernels the table."""
        return "table"

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

    @property
    def described(self) -> str | None:
        """The rows that tokens attend to, for people; None: all."""
        return None

    def heads_described(self, heads: int) -> str:
        """The number of query heads, for people."""
        return str(heads)

    def split_fault(self, heads: int, each: int) -> str | None:
        """The reason why a device cannot have ``each`` of a model's query heads; None: it can."""
        return None

    def first_layers(self, count: int) -> Mapping[str, Any]:
        """Fields of ``ModelConfig`` that differ in a model with the first ``count`` layers alone."""
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

        seen: number of tokens before the tokens of the prompt, on average.
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
