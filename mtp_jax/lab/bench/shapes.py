"""Shapes of models for measurements with random weights, by name or as a config.json describes them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mtp_jax.errors import ConfigError
from mtp_jax.lab.planning.declared import declared
from mtp_jax.lab.planning.releases import DEEPSEEK_V3, KNOWN
from mtp_jax.model.config import IndexerConfig, ModelConfig

INDEXER = IndexerConfig(heads=64, dim=128, topk=2048)
"""The indexer of DeepSeek-V3.2, for any number of layers."""


@dataclass(frozen=True)
class NamedShape:
    """A shape that has a name.

    Attributes:
        about: its description.
        whole: the model with all its layers.
        layers: number of layers of the trunk where no other number is asked for.
    """

    about: str
    whole: ModelConfig
    layers: int


def v3(layers: int, indexer: IndexerConfig | None = None, experts: int = 256) -> ModelConfig:
    """DeepSeek-V3, or V3.2, in FP8, with another number of layers, one of them dense, and of experts."""
    return replace(
        DEEPSEEK_V3,
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        n_routed_experts=experts,
        indexer=indexer and replace(indexer, shared=(False,) * layers),
    )


_WHOLE = DEEPSEEK_V3.num_hidden_layers
# JoyAI-LLM-Flash: where its sizes are not DeepSeek-V3's.
_JOYAI = replace(
    v3(40),
    hidden_size=2048,
    intermediate_size=7168,
    moe_intermediate_size=768,
    num_attention_heads=32,
    n_group=1,
    topk_group=1,
    nextn_moe=(False,),
)
_SHARE = replace(
    DEEPSEEK_V3,
    vocab_size=16384,
    intermediate_size=2304,
    moe_intermediate_size=256,
    num_attention_heads=16,
    n_routed_experts=128,
)
_TINY = replace(
    _JOYAI,
    vocab_size=512,
    hidden_size=256,
    intermediate_size=256,
    moe_intermediate_size=128,
    num_attention_heads=8,
    q_lora_rank=128,
    n_routed_experts=16,
)

NAMED: Mapping[str, NamedShape] = {
    "share": NamedShape(
        "the part of DeepSeek-V3 that one of 8 GPUs computes, its heads, widths and vocabulary split over 8, "
        "without the collectives; 128 of 256 experts, of which a step of few tokens reads as many",
        _SHARE,
        _WHOLE,
    ),
    "deep": NamedShape(
        "DeepSeek-V3 with 16 experts in each layer",
        replace(DEEPSEEK_V3, n_routed_experts=16, n_group=1, topk_group=1),
        _WHOLE,
    ),
    "wide": NamedShape("5 layers of DeepSeek-V3", v3(_WHOLE), 5),
    "sparse": NamedShape("5 layers of DeepSeek-V3.2 with 128 experts in each", v3(_WHOLE, INDEXER, 128), 5),
    "joyai": NamedShape("JoyAI-LLM-Flash, 48 B", _JOYAI, 40),
    "tiny": NamedShape("2 small layers, for a CPU", _TINY, 2),
}
"""The shapes by name, all in FP8: each fits into the memory of one GPU."""


def find(model: Path, layers: int | None, trunk_alone: bool) -> tuple[str, ModelConfig]:
    """The name and the configuration of a shape.

    Args:
        model: a name of ``NAMED`` or of ``planning.releases.KNOWN``, a directory with config.json, or that
            file.
        layers: number of layers of the trunk to keep; None: the shape's own number.
        trunk_alone: whether nothing will be drafted.

    Raises ConfigError.
    """
    if (shape := NAMED.get(str(model))) and not model.exists():
        return str(model), cut(shape.whole, layers or shape.layers)
    if not model.exists() and len(model.parts) == 1 and str(model).lower() not in KNOWN:
        raise ConfigError(
            f"{model} is neither a directory nor a shape; name a directory with config.json, or one of "
            f"{', '.join((*NAMED, *KNOWN))}"
        )
    name, cfg = declared(model, trunk_alone, "--depths")
    return name, cut(cfg, layers or cfg.num_hidden_layers)


def cut(cfg: ModelConfig, layers: int) -> ModelConfig:
    """A model with the first layers of its trunk, and all that drafts. Raises ConfigError for too many."""
    if layers > cfg.num_hidden_layers:
        raise ConfigError(
            f"--layers {layers}; the trunk has {cfg.num_hidden_layers} layers: expected at most that"
        )
    return replace(
        cfg,
        num_hidden_layers=layers,
        first_k_dense_replace=min(cfg.first_k_dense_replace, layers),
        num_hash_layers=min(cfg.num_hash_layers, layers),
        **cfg.attention.first_layers(layers),
    )
