"""Model configuration: one frozen ``ModelConfig``, whose values go together."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import is_number
from mtp_jax.model.attention_config import AttentionConfig, RowFormat
from mtp_jax.model.compressed_config import CompressedConfig
from mtp_jax.model.config_parts import (
    MOST,
    MOST_SIZE,
    HeadConfig,
    HyperConfig,
    RopeScaling,
    Scoring,
    Trees,
    YarnConfig,
    is_whole,
)
from mtp_jax.model.gqa_config import GqaConfig
from mtp_jax.model.hf_quantization import INT4_PER_WORD, Nvfp4Layout
from mtp_jax.model.mla_config import IndexerConfig, MlaConfig

__all__ = [
    "CompressedConfig",
    "GqaConfig",
    "HeadConfig",
    "HyperConfig",
    "IndexerConfig",
    "MlaConfig",
    "ModelConfig",
    "RowFormat",
    "YarnConfig",
]


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V3-family model; fields keep their Hugging Face names.

    The dimensions of MLA, ``kv_lora_rank`` to ``q_lora_rank``, are 0 and None where ``gqa`` describes
    attention instead; with ``compressed``, which does so too, ``q_lora_rank`` counts. ``attention`` has the
    facts of either kind.

    ``nextn_moe[k]`` says whether NextN layer ``k`` has an MoE block; a checkpoint reader decides it from the
    tensors present, since some models ship a dense one. ``fp8``, ``fp4``, ``nvfp4``, its layout, and
    ``int4_group``, the inputs that share a scale, say that the checkpoint has such weights; which they are,
    its tensors tell.
    ``drafter`` describes a draft head beside the model, which drafts in the place of NextN layers. ``family``
    is a key of ``family.FAMILIES``: it says how the model is described and stored.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    q_lora_rank: int | None = None
    moe_intermediate_size: int = 0
    n_routed_experts: int = 0
    n_shared_experts: int = 0
    num_experts_per_tok: int = 0
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_interleave: bool = True
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 4096
    indexer: IndexerConfig | None = None
    gqa: GqaConfig | None = None
    compressed: CompressedConfig | None = None
    hyper: HyperConfig | None = None
    scoring_func: Scoring = "sigmoid"
    swiglu_limit: float | None = None
    num_hash_layers: int = 0
    num_nextn_predict_layers: int = 0
    nextn_moe: tuple[bool, ...] = ()
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 0
    eos_token_ids: tuple[int, ...] = (1,)
    dtype: str = "bfloat16"
    fp8: bool = False
    int4_group: int | None = None
    nvfp4: Nvfp4Layout | None = None
    fp4: bool = False
    drafter: HeadConfig | None = None
    family: str = "deepseek_v3"

    def __post_init__(self) -> None:
        _check(self)
        if self.n_routed_experts:
            _check_experts(self)

    @cached_property
    def attention(self) -> AttentionConfig:
        """The facts of the kind of attention."""
        sizes = self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        return self.gqa or self.compressed or MlaConfig(*sizes, self.q_lora_rank, self.indexer)

    def indexes(self, layer: int) -> bool:
        """Whether a layer has an indexer; NextN layers count on from the trunk's."""
        return self.attention.index_width(layer) > 0

    @property
    def row(self) -> RowFormat:
        """A row of a layer's cache."""
        return self.attention.row

    @property
    def streams(self) -> int:
        """Number of residual streams, side by side."""
        return self.hyper.streams if self.hyper else 1

    @property
    def usual_page(self) -> int:
        """Tokens of a page where no number is asked for."""
        unit = self.attention.page_unit
        return -(-DEFAULT_PAGE // unit) * unit

    @property
    def softmax_scale(self) -> float:
        """Factor on attention scores, YaRN's part included where the kind of attention has one."""
        scaling = self.rope_scaling if self.attention.sharpened else None
        return self.attention.key_dim**-0.5 * (scaling.softmax_factor if scaling else 1.0)

    def is_moe(self, layer: int) -> bool:
        """Whether trunk layer ``layer`` has an MoE block (first_k_dense_replace, moe_layer_freq)."""
        return (
            self.n_routed_experts > 0
            and layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
        )

    @property
    def moe_layers(self) -> int:
        """Number of the trunk's layers with an MoE block."""
        return sum(map(self.is_moe, range(self.num_hidden_layers)))

    def with_nextn(self, moe: tuple[bool, ...]) -> "ModelConfig":
        """The model's configuration with ``len(moe)`` NextN layers."""
        return replace(self, num_nextn_predict_layers=len(moe), nextn_moe=moe)

    @property
    def drafts(self) -> bool:
        """Whether the model has NextN layers or a draft head."""
        return self.num_nextn_predict_layers > 0 or self.drafter is not None

    @property
    def trees(self) -> Trees | None:
        """The trees that its drafter makes; several NextN layers make none."""
        one = "grown" if self.num_nextn_predict_layers == 1 else None
        return self.drafter.trees if self.drafter else one

    @property
    def drafter_title(self) -> str:
        """A noun phrase for its drafter: "1 NextN layer", "a DFlash head"."""
        layers = self.num_nextn_predict_layers
        return self.drafter.title if self.drafter else f"{layers or 'no'} NextN layer{'s' * (layers != 1)}"

    def without_drafts(self) -> "ModelConfig":
        """The trunk alone."""
        return replace(self.with_nextn(()), drafter=None)

    def with_eos(self, eos: int | list[int] | None) -> "ModelConfig":
        """The model's configuration with other end-of-text ids; None keeps them."""
        if eos is None:
            return self
        return replace(self, eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,))


DEFAULT_PAGE = 64
"""Tokens of a page where no number is asked for, of a model whose pages may have any."""

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "n_group",
    "topk_group",
    "moe_layer_freq",
)
_NATURAL = (
    "num_hash_layers",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "first_k_dense_replace",
    "num_nextn_predict_layers",
)

# Counts with a limit each, as each layer or expert has tensors of its own.
_COUNTS = "num_hidden_layers", "num_nextn_predict_layers", "n_routed_experts"
# Most tensors of all layers together: about five times Kimi-K2's, 61 layers of 384.
_MOST_EXPERTS = 2**17


def _need(c: ModelConfig, ok: bool, name: str, expected: str) -> None:
    if not ok:
        raise ConfigError(f"{name} = {getattr(c, name)!r:.200}; expected {expected}")


def _check(c: ModelConfig) -> None:
    need = partial(_need, c)
    for name in _POSITIVE:
        need(is_whole(getattr(c, name), 1), name, "a positive integer")
    for name in _NATURAL:
        need(is_whole(getattr(c, name), 0), name, "an integer >= 0")
    for name in _COUNTS:
        need(getattr(c, name) <= MOST, name, f"at most {MOST:,}")
    for name in ("rms_norm_eps", "rope_theta", "routed_scaling_factor"):
        need(is_number(getattr(c, name)) and getattr(c, name) > 0, name, "a positive number")
    for name in ("norm_topk_prob", "rope_interleave", "tie_word_embeddings"):
        need(type(getattr(c, name)) is bool, name, "true or false")
    for name in c.attention.excludes:
        if getattr(c, name):
            raise ConfigError(
                f"{name} = {getattr(c, name)!r:.200} is not supported with grouped-query attention; expected "
                "no such key"
            )
    c.attention.check(c.num_attention_heads, c.num_hidden_layers, c.num_nextn_predict_layers)
    need(all(is_whole(i, 0) and i <= MOST_SIZE for i in c.eos_token_ids), "eos_token_ids", "token ids")
    need(c.bos_token_id is None or is_whole(c.bos_token_id, 0), "bos_token_id", "a token id or null")
    for name in (*_POSITIVE, *_NATURAL, "bos_token_id"):
        need((getattr(c, name) or 0) <= MOST_SIZE, name, f"at most {MOST_SIZE:,}")
    need(c.dtype in ("float32", "bfloat16"), "dtype", "float32 or bfloat16")
    need(all(type(m) is bool for m in c.nextn_moe), "nextn_moe", "true or false for each layer")
    if c.rope_scaling:
        c.rope_scaling.check(c.rope_theta)
    if len(c.nextn_moe) != c.num_nextn_predict_layers:
        raise ConfigError(
            f"nextn_moe has {len(c.nextn_moe)} entries, num_nextn_predict_layers is "
            f"{c.num_nextn_predict_layers}"
        )
    group = c.int4_group
    need(group is None or is_whole(group, 1), "int4_group", "a positive integer or null")


def _check_experts(c: ModelConfig) -> None:
    layers = c.num_hidden_layers + c.num_nextn_predict_layers
    if layers * c.n_routed_experts > _MOST_EXPERTS:
        raise ConfigError(
            f"{layers} layers of n_routed_experts = {c.n_routed_experts}; expected at most "
            f"{_MOST_EXPERTS:,} experts in all"
        )
    if c.n_routed_experts % c.n_group:
        raise ConfigError(f"n_group = {c.n_group} does not divide n_routed_experts = {c.n_routed_experts}")
    reachable = c.n_routed_experts // c.n_group * c.topk_group
    if not 1 <= c.num_experts_per_tok <= reachable or c.topk_group > c.n_group:
        raise ConfigError(
            f"num_experts_per_tok = {c.num_experts_per_tok}, topk_group = {c.topk_group}: at most "
            f"{reachable} experts lie in {c.topk_group} of {c.n_group} groups"
        )
    if c.n_group > 1 and c.n_routed_experts // c.n_group < 2:
        raise ConfigError("expert groups of one: a group's score is the sum of its two best experts")
    _need(c, c.moe_intermediate_size > 0, "moe_intermediate_size", "a positive integer")
    if c.int4_group:
        unit = math.lcm(c.int4_group, INT4_PER_WORD)
        for name in ("hidden_size", "moe_intermediate_size"):
            expected = f"int4 weights have {c.int4_group} inputs in a group, 8 in a word"
            _need(c, getattr(c, name) % unit == 0, name, f"a multiple of {unit}: {expected}")
