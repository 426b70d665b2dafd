"""Medusa heads as they are declared: their folder, their sizes, their parameters.

Folders have FasterDecoding's names (``N.0.linear.weight``, ``N.1.weight``) or vLLM's. The names here are
vLLM's: ``blocks.N.layers.M.weight``, ``lm_heads.N.weight``, behind ``DRAFT_HEAD``.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Self

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.head import DRAFT_HEAD, Captures, DraftHead, plain
from mtp_jax.model.layer_specs import Weight, table
from mtp_jax.model.spec import parameters

_BLOCK = re.compile(r"(\d{1,9})\.(\d{1,9})\.linear\.(weight|bias)")
_TABLE = re.compile(r"(\d{1,9})\.\d{1,9}\.weight")
# Options of vLLM's heads, and the values at which they change nothing.
_NEUTRAL = {"logit_scale": 1, "original_lm_head": False}
# Heads, and blocks of one. Parameters are specified for every block that a file asks for, and five heads are
# enough (arXiv 2401.10774): a number past this one is a slip, refused before anything is made for it.
_MOST = 64


@parameters
class MedusaBlock:
    """A residual block of a Medusa head: x + silu(linear(x) + bias). ``bias`` is None where there is none."""

    linear: Weight  # [D, D]
    bias: Weight  # [D]


@parameters
class MedusaTree:
    """Medusa heads beside a trunk of width D: see ``MedusaConfig``. Each has residual blocks and a table."""

    residual: tuple[tuple[MedusaBlock, ...], ...]
    tables: tuple[Weight, ...]  # [V, D]

    @property
    def blocks(self) -> tuple[()]:
        """It has no decoder blocks."""
        return ()

    @property
    def merging(self) -> tuple[MedusaBlock, ...]:
        """The parameters that one draft reads, without its table."""
        return self.residual[0]

    @property
    def entries(self) -> tuple[Weight, ...]:
        """Nothing is cached."""
        return ()

    @property
    def head(self) -> Weight:
        """The table behind the logits of one draft."""
        return self.tables[0]


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(DraftHead):
    """Medusa heads (arXiv 2401.10774, section 2.1.1), one for each draft, over the final hidden state.

    Attributes:
        heads: number of heads.
        layers: number of residual blocks of each head.
        bias: whether the blocks add a bias.
    """

    trees = "given"
    drafts = f"{__package__}.drafts:drafter"

    taps: tuple[int, ...] = ()
    heads: int
    layers: int = 1
    bias: bool = True

    @property
    def name(self) -> str:
        """Its kind."""
        return "Medusa"

    @property
    def most_drafts(self) -> int:
        """One draft per head."""
        return self.heads

    @property
    def described(self) -> str:
        """Their number."""
        return f"{self.heads} Medusa heads, which read the final hidden state"

    @classmethod
    def reads(cls, raw: JsonObject, tensors: Collection[str]) -> bool:
        """Whether config.json says so."""
        names = raw.get("architectures")
        said = [*(names if isinstance(names, list) else ()), raw.get("model_type")]
        return "medusa_num_heads" in raw or any("medusa" in str(name).lower() for name in said)

    @classmethod
    def names(cls, names: Collection[str]) -> dict[str, str]:
        """Turns names of tensors, the authors' or vLLM's, into vLLM's."""
        return {name: _own_name(name) for name in names}

    @classmethod
    def read(
        cls, raw: JsonObject, trunk: ModelConfig, tensors: Collection[str], captures: Captures | None
    ) -> Self:
        """See ``DraftHead``. captures: must be None, as they read no taps."""
        for name, wanted in (
            ("hidden_size", trunk.hidden_size),
            ("vocab_size", trunk.vocab_size),
            ("truncated_vocab_size", trunk.vocab_size),
        ):
            if (got := raw.get(name)) not in (None, wanted):
                raise ConfigError(f"the head is made for {name} = {got!r:.80}, the model has {wanted}")
        for key, neutral in _NEUTRAL.items():
            if raw.get(key, neutral) != neutral:
                raise ConfigError(
                    f"{key} = {raw[key]!r:.80} of Medusa heads is not supported; expected {neutral}"
                )
        if captures is not None:
            raise ConfigError(f"draft_captures = {captures!r}, but Medusa heads read no taps; leave it out")

        def whole(*keys: str, default: int | None = None) -> int:
            key, value = next(((k, raw[k]) for k in keys if k in raw), (keys[0], default))
            if type(value) is not int or not 1 <= value <= _MOST:
                raise ConfigError(f"{key} = {value!r:.80}; expected a whole number from 1 to {_MOST}")
            return value

        return cls(
            heads=whole("medusa_num_heads", "num_heads"),
            layers=whole("medusa_num_layers", "num_hidden_layers", default=1),
            bias=any(name.endswith(".bias") for name in tensors),
        )

    def specs(self, trunk: ModelConfig) -> MedusaTree:
        """Their parameters."""
        d = trunk.hidden_size

        def block_of(name: str) -> MedusaBlock:
            bias = replace(plain(f"{name}.bias", d), init="zeros")
            return MedusaBlock(plain(f"{name}.weight", d, d), bias if self.bias else None)

        blocks = (
            tuple(block_of(f"blocks.{i}.layers.{j}") for j in range(self.layers)) for i in range(self.heads)
        )
        tables = (table(f"{DRAFT_HEAD}.lm_heads.{i}.weight", trunk) for i in range(self.heads))
        return MedusaTree(tuple(blocks), tuple(tables))


def _own_name(name: str) -> str:
    name = name.removeprefix("model.").removeprefix("medusa_heads.").removeprefix("medusa_head.")
    if match := _BLOCK.fullmatch(name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    return f"lm_heads.{match[1]}.weight" if (match := _TABLE.fullmatch(name)) else name
