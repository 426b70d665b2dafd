"""Draft heads beside a trunk: their sizes, as the config.json of their folder says them."""

from dataclasses import dataclass, fields
from typing import Literal

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.config_parts import HeadConfig

Captures = Literal["outputs", "inputs"]
"""A list of taps in a draft head's config.json counts outputs of layers, or their inputs."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """An EAGLE-3 head (arXiv 2503.01840, section 3.1): one layer over hidden states from inside the trunk.

    Attributes:
        layer: sizes of the head's layer; its vocabulary is the one that the head drafts from.
        tap_norms: number of RMSNorms before the product that fuses the taps: one of each tap (``fc_norm``),
            one of all taps in a row (``norm_before_fc``), or none.
        normed_output: ``norm_output``: whether the state after the head's final norm is fed back, not the
            state before it.
        normed_residual: ``norm_before_residual``: whether the layer adds to the hidden state after its norm.
        logit_scale: factor of the head's logits.
        heads: whether it has an output table of its own.
    """

    trees = "grown"
    layer: ModelConfig
    tap_norms: int = 0
    normed_output: bool = False
    normed_residual: bool = False
    logit_scale: float = 1.0
    heads: bool = True

    @property
    def name(self) -> str:
        """Its kind."""
        return "EAGLE-3"

    @property
    def sizes(self) -> ModelConfig:
        """Its layer."""
        return self.layer


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """A head that drafts a whole block in one pass: DFlash, DFlash2 or DSpark.

    Attributes:
        layers: sizes of the head's layers; their vocabulary is the one that the head drafts from.
        block: rows of a block: the newest token, then masks.
        mask: the token id of a mask.
        anchored: ``sample_from_anchor``: row i is draft i + 1, so that there are as many drafts as rows; else
            row 0 is no draft.
        convolution: (taps, channels that share a kernel) of the convolutions around sublayers of DFlash2.
        selector: (rank, candidates) of DFlash2's choice among the best tokens of each row.
        markov: rank of DSpark's bias by the token before; 0: none.
        confidence: whether there is a confidence head. markov_confidence: whether it reads the embedding of
            the token before, too.
        heads: whether it has an output table of its own.
    """

    layers: ModelConfig
    block: int
    mask: int
    anchored: bool = False
    convolution: tuple[int, int] | None = None
    selector: tuple[int, int] | None = None
    markov: int = 0
    confidence: bool = False
    markov_confidence: bool = False
    heads: bool = False

    @property
    def name(self) -> str:
        """Its kind."""
        return "DFlash2" if self.selector else "DSpark" if self.markov else "DFlash"

    @property
    def sizes(self) -> ModelConfig:
        """Its layers."""
        return self.layers

    @property
    def most_drafts(self) -> int:
        """Rows that are drafts."""
        return self.block if self.anchored else self.block - 1


@dataclass(frozen=True, kw_only=True)
class StagesConfig(BlockConfig):
    """DSpark stages among DeepSeek-V4's own tensors, ``mtp.{k}``: blocks of the trunk with windows alone."""

    inside = True

    @property
    def keys(self) -> JsonObject:
        """Their keys of the model's config.json, which counts outputs of layers from 0, and no stages."""
        return {
            "dspark_block_size": self.block,
            "dspark_noise_token_id": self.mask,
            "dspark_target_layer_ids": [tap - 1 for tap in self.taps],
            "dspark_markov_rank": self.markov,
        }


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """Medusa heads (arXiv 2401.10774, section 2.1.1), one for each draft, over the final hidden state.

    Attributes:
        heads: their number.
        layers: residual blocks of each head.
        bias: whether the blocks add a bias.
    """

    trees = "given"
    taps: tuple[int, ...] = ()
    heads: int
    layers: int = 1
    bias: bool = True

    @property
    def name(self) -> str:
        """Its kind."""
        return "Medusa"

    @property
    def sizes(self) -> None:
        """It has no decoder layers."""

    @property
    def most_drafts(self) -> int:
        """One draft per head."""
        return self.heads


Head = Eagle3Config | BlockConfig | MedusaConfig
_KINDS = (Eagle3Config, BlockConfig, StagesConfig, MedusaConfig)


def head_of(cfg: ModelConfig) -> Head | None:
    """The draft head beside a model; None without."""
    return cfg.drafter if isinstance(cfg.drafter, Head) else None


def head_to_json(head: Head) -> JsonObject:
    """The head as JSON, for ``head_from_json``."""
    values = {f.name: getattr(head, f.name) for f in fields(head)}
    sizes = {name: v.to_dict() for name, v in values.items() if isinstance(v, ModelConfig)}
    return {"kind": type(head).__name__, **values, **sizes}


def head_from_json(raw: JsonObject) -> Head:
    """The head that ``head_to_json`` wrote. Raises ConfigError for anything else."""
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in raw.items()}
    kind = {k.__name__: k for k in _KINDS}.get(str(values.pop("kind", None)))
    try:
        sizes = {name: ModelConfig.from_dict(v) for name, v in values.items() if isinstance(v, dict)}
        if kind is not None:
            return kind(**{**values, **sizes})
    except TypeError as e:
        raise ConfigError(f"the draft head is not what convert writes: {e}") from e
    names = ", ".join(k.__name__ for k in _KINDS)
    raise ConfigError(f"a draft head of kind {raw.get('kind')!r:.80}; expected one of {names}")
