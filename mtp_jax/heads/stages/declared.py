"""DSpark stages of DeepSeek-V4 as they are declared: keys of the model's config.json, sizes, parameters."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Self

from mtp_jax.errors import ConfigError
from mtp_jax.heads.blocks.declared import MOST_ROWS, BlockConfig, BlockHead, BlockLayer, Confidence, Markov
from mtp_jax.heads.reading import taps_of, whole
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.layer_specs import norm
from mtp_jax.model.v4_specs import hyper_head, v4_block
from mtp_jax.model.v4_specs import whole as v4_tensor

# Fields of a trunk that say nothing of its stages, at their defaults.
_OF_FILES = {"eos_token_ids": (), "dtype": "bfloat16", "fp8": False, "fp4": False}


@dataclass(frozen=True, kw_only=True)
class StagesConfig(BlockConfig):
    """DSpark stages among DeepSeek-V4's own tensors, ``mtp.{k}``: blocks of the trunk with windows alone."""

    inside = True
    drafts = "mtp_jax.heads.stages.drafts:drafter"

    @property
    def keys(self) -> JsonObject:
        """Their keys of the model's config.json, which counts outputs of layers from 0, and no stages."""
        return {
            "dspark_block_size": self.block,
            "dspark_noise_token_id": self.mask,
            "dspark_target_layer_ids": [tap - 1 for tap in self.taps],
            "dspark_markov_rank": self.markov,
        }

    @classmethod
    def reads(cls, raw: JsonObject, tensors: Collection[str]) -> bool:
        """No folder has them alone: they lie among the tensors of a model."""
        return False

    @classmethod
    def of(cls, raw: JsonObject, trunk: ModelConfig, count: int) -> Self:
        """``count`` stages of a DeepSeek-V4, as its config.json describes them. Raises ConfigError."""
        assert trunk.compressed is not None, "DeepSeek-V4 has compressed attention"
        told = raw.get("n_mtp_layers")
        if told not in (None, count):
            raise ConfigError(f"n_mtp_layers = {told!r:.80}; expected {count}, or no such key")
        layers = replace(
            trunk.without_drafts(),
            num_hidden_layers=count,
            num_hash_layers=0,
            compressed=replace(trunk.compressed, ratios=(0,) * count),
            **_OF_FILES,
        )
        return cls(
            layers=layers,
            taps=taps_of(raw, "dspark_target_layer_ids", trunk.num_hidden_layers, "outputs"),
            block=whole(raw, "dspark_block_size", 1, MOST_ROWS),
            mask=whole(raw, "dspark_noise_token_id", 0, trunk.vocab_size - 1),
            anchored=True,
            markov=whole(raw, "dspark_markov_rank"),
            confidence=True,
            markov_confidence=True,
        )

    def specs(self, trunk: ModelConfig) -> BlockHead:
        """Their parameters, by the names of the release."""
        d, v, r, count = trunk.hidden_size, trunk.vocab_size, self.markov, self.layers.num_hidden_layers
        blocks, last = (v4_block(self.layers, f"mtp.{k}", k) for k in range(count)), f"mtp.{count - 1}"
        markov = (v4_tensor(f"{last}.markov_head.{name}.weight", v, r) for name in ("markov_w1", "markov_w2"))
        return BlockHead(
            fuse=v4_tensor("mtp.0.main_proj.weight", d, len(self.taps) * d),
            context_norm=norm("mtp.0.main_norm.weight", d),
            layers=tuple(BlockLayer(each, None, None) for each in blocks),
            norm=norm(f"{last}.norm.weight", d),
            markov=Markov(*markov),
            confidence=Confidence(v4_tensor(f"{last}.confidence_head.proj.weight", 1, d + r), None),
            selector=None,
            head=None,
            embed=None,
            target_offset=None,
            hyper_head=hyper_head(self.layers, f"{last}."),
        )

    def layers_named(self, sizes: ModelConfig) -> str:
        """Their number."""
        return f"{sizes.num_hidden_layers} stages"
