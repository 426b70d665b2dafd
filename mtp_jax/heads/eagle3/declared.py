"""An EAGLE-3 head as it is declared: its folder, its sizes, its parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from mtp_jax.errors import ConfigError
from mtp_jax.heads.reading import HeadFile, LayeredHead, flag, taps_of
from mtp_jax.heads.tables import OUT, own_embedding, target_offset
from mtp_jax.json_object import JsonObject, is_number
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import config_json
from mtp_jax.model.head import DRAFT_HEAD, Captures, StoredTensor, plain
from mtp_jax.model.layer_specs import Layer, Weight, block, norm, table
from mtp_jax.model.spec import parameters


@parameters
class Eagle3:
    """An EAGLE-3 head (arXiv 2503.01840, section 3.1) for a trunk of width D, itself of width d.

    ``embed`` and ``head`` are None where the trunk's serve, ``target_offset`` where head and trunk have one
    vocabulary.
    """

    tap_norms: tuple[Weight, ...]  # [D] of every tap, [taps * D] of all, or none
    fuse: Weight  # [d, taps * D], fc
    hidden_norm: Weight  # [d]
    layer: Layer  # its attention reads 2d values: the normed embedding, the normed hidden state
    norm: Weight  # [d]
    head: Weight  # [v, d], of the head's own vocabulary
    embed: Weight  # [V, d]
    target_offset: Weight  # [v] int32, d2t: token i of the head is token i + d2t[i] of the trunk

    @property
    def blocks(self) -> tuple[Layer, ...]:
        """Its layer."""
        return (self.layer,)

    @property
    def merging(self) -> tuple[Weight, ...]:
        """The norms beside the layer that a draft reads."""
        return self.hidden_norm, self.norm

    @property
    def entries(self) -> tuple[Weight, ...]:
        """Parameters that make entries of tokens: the fusion of taps, and latents or keys and values."""
        return *self.tap_norms, self.fuse, self.hidden_norm, *self.layer.entries


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayeredHead):
    """An EAGLE-3 head (arXiv 2503.01840, section 3.1): one layer over hidden states from inside the trunk.

    Attributes:
        layer: sizes of the head's layer; the layer's vocabulary holds the tokens that the head drafts.
        tap_norms: number of RMSNorms before the product that fuses the taps: one of each tap (``fc_norm``),
            one of all taps in a row (``norm_before_fc``), or none.
        normed_output: ``norm_output``: whether the state after the head's final norm is fed back, not the
            state before it.
        normed_residual: ``norm_before_residual``: whether the layer adds to the hidden state after its norm.
        logit_scale: factor of the head's logits.
        heads: whether it has an output table of its own.
    """

    form = "EAGLE-3"
    trees = "grown"
    drafts = "mtp_jax.heads.eagle3.drafts:drafter"

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

    @classmethod
    def read(
        cls,
        raw: JsonObject,
        trunk: ModelConfig,
        tensors: Mapping[str, StoredTensor],
        captures: Captures | None,
    ) -> Self:
        """See ``DraftHead``.

        captures: None: outputs if the list begins with 1, else inputs, as SGLang and vLLM read it.
        """
        file = HeadFile(raw, trunk, tensors)
        layer, said, layers = file.layers(blocks=False), file.said, trunk.num_hidden_layers
        if said.get("use_aux_hidden_state", True) is not True:
            raise ConfigError(
                "use_aux_hidden_state = false is not supported; expected a head that reads taps"
            )
        if layer.num_hidden_layers != 1:
            raise ConfigError(
                f"an EAGLE-3 head of {layer.num_hidden_layers} layers is not supported; expected 1"
            )
        key = "eagle_aux_hidden_state_layer_ids"
        if said.get(key) is None:
            said, captures = {**said, key: _own_taps(layers)}, "inputs"
        if captures is None:
            captures = "outputs" if isinstance(said[key], list) and said[key][:1] == [1] else "inputs"
        taps = taps_of(said, key, layers, captures)
        each, joint = flag(said, "fc_norm"), flag(said, "norm_before_fc")
        if each and joint:
            raise ConfigError("fc_norm and norm_before_fc are both true; expected one of them at most")
        scale = said.get("logit_scale", 1.0)
        if not is_number(scale) or scale <= 0:
            raise ConfigError(f"logit_scale = {scale!r:.80}; expected a positive number")
        return cls(
            layer=layer,
            taps=taps,
            maps=file.maps,
            embeds=file.embeds,
            heads=file.heads or not tensors,
            tap_norms=len(taps) if each else int(joint),
            normed_output=flag(said, "norm_output"),
            normed_residual=flag(said, "norm_before_residual"),
            logit_scale=float(scale),
        )

    @staticmethod
    def fresh(trunk: ModelConfig, vocab: int | None = None, mlp: int | None = None) -> JsonObject:
        """The config.json of a new head: one layer with the trunk's attention.

        vocab: number of tokens that it drafts; None: all. mlp: width of its MLP; None: the trunk's dense one.
        """
        return config_json(trunk) | {
            "architectures": ["LlamaForCausalLMEagle3" if trunk.gqa else "Eagle3DeepseekV2ForCausalLM"],
            "draft_vocab_size": vocab or trunk.vocab_size,
            "intermediate_size": mlp or trunk.intermediate_size,
            "num_hidden_layers": 1,
            "eagle_aux_hidden_state_layer_ids": _own_taps(trunk.num_hidden_layers),
            "norm_output": True,
            "tie_word_embeddings": False,
        }

    def specs(self, trunk: ModelConfig) -> Eagle3:
        """Its parameters."""
        d, width = self.layer.hidden_size, len(self.taps) * trunk.hidden_size
        one, p = [f"{DRAFT_HEAD}.input_norm.weight"], f"{DRAFT_HEAD}.layers.0"
        each = [f"{DRAFT_HEAD}.fc_norm.{i}.weight" for i in range(self.tap_norms)]
        names, size = (one, width) if self.tap_norms == 1 else (each, trunk.hidden_size)
        return Eagle3(
            tap_norms=tuple(norm(name, size) for name in names if self.tap_norms),
            fuse=plain("fc.weight", d, width),
            hidden_norm=norm(f"{p}.hidden_norm.weight", d),
            layer=block(self.layer, p, moe=False, indexes=False, inputs=2 * d),
            norm=norm(f"{DRAFT_HEAD}.norm.weight", d),
            head=table(OUT, self.layer) if self.heads else None,
            embed=own_embedding(trunk, self, self.layer),
            target_offset=target_offset(self, self.layer),
        )


def _own_taps(layers: int) -> list[int]:
    """EAGLE's own three: inputs of layers near the start, in the middle, near the end."""
    return [2 if layers > 1 else 0, layers // 2, max(layers - 3, 0)]
