"""Model configuration: one frozen ``ModelConfig``, whose values go together."""

import math
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject, is_number
from mtp_jax.model import hf_config
from mtp_jax.model.attention_config import (
    OF_MLA,
    AttentionConfig,
    CompressedConfig,
    GqaConfig,
    IndexerConfig,
    MlaConfig,
    RowFormat,
)
from mtp_jax.model.config_parts import (
    MOST,
    MOST_SIZE,
    HeadConfig,
    HyperConfig,
    Scoring,
    YarnConfig,
    check_size,
    is_whole,
)
from mtp_jax.model.hf_quantization import INT4_PER_WORD

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
    tensors present, since some models ship a dense one. ``fp8``, ``fp4`` and ``int4_group``, the inputs
    that share a scale, say that the checkpoint has such weights; which they are, its tensors tell.
    ``drafter`` describes a draft head beside the model, which drafts in the place of NextN layers.
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
    rope_scaling: YarnConfig | None = None
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
    fp4: bool = False
    drafter: HeadConfig | None = None

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelConfig":
        """Read ``config.json``. Raises ConfigError for unreadable JSON or an unsupported model."""
        return cls.from_dict(hf_config.read_json(path))

    @classmethod
    def from_dict(cls, raw: JsonObject) -> "ModelConfig":
        """Build from the parsed JSON of either dialect; a multimodal model is read as its text part.

        Raises ConfigError.
        """
        raw = hf_config.text_part(raw)
        translated = hf_config.translate(raw)
        known = {f.name: f for f in fields(cls)}
        values = {k: v for k, v in raw.items() if k in known and v is not None} | translated
        moe = bool(values.get("n_routed_experts"))
        required = [n for n, f in known.items() if f.default is MISSING]
        mla = not (values["gqa"] or values["compressed"])
        required += [
            *(_REQUIRED_OF_MOE if moe else ()),
            *(_GROUPS if moe and not values["compressed"] else ()),
        ]
        required += OF_MLA if mla else ()
        missing = [n for n in required if n not in values]
        if missing:
            family = "V4" if values["compressed"] else "V3"
            raise ConfigError(
                f"config.json lacks {', '.join(missing)}; a DeepSeek-{family} config has them all"
            )
        if not moe:
            values["first_k_dense_replace"] = values["num_hidden_layers"]
        for name, kind in _PARTS.items():
            values[name] = None if values[name] is None else kind(**values[name])
        try:
            count = values.get("num_nextn_predict_layers", 0)
            values["nextn_moe"] = tuple(raw.get("nextn_moe", [moe] * min(count, MOST + 1)))
            return cls(**values)
        except (TypeError, OverflowError) as e:
            raise ConfigError(f"config.json has a value of the wrong type: {e}") from e

    def to_dict(self) -> JsonObject:
        """``config.json`` in the dialect of the release, without quantisation."""
        model_type, architecture = self._kind()
        out: JsonObject = {
            "architectures": [architecture],
            "model_type": model_type,
            "hidden_act": "silu",
            "topk_method": "noaux_tc",
        }
        of_mla = () if self.gqa is None else (*OF_MLA, "q_lora_rank")
        left_out = {"fp8", "fp4", "int4_group", "indexer", "gqa", "compressed", "hyper", "drafter", *of_mla}
        if self.compressed:
            left_out |= {*OF_MLA, *_NOT_IN_V4}
        else:
            left_out |= {"swiglu_limit", "num_hash_layers"}
        out |= {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        out |= self._attention_keys() | self._index_keys() | (self.drafter.keys if self.drafter else {})
        out["torch_dtype"] = out.pop("dtype")
        ids = out.pop("eos_token_ids")
        out["eos_token_id"] = ids[0] if len(ids) == 1 else list(ids) or None
        if self.rope_scaling:
            yarn = {k: v for k, v in asdict(self.rope_scaling).items() if v is not None}
            if self.rope_scaling.truncate:
                del yarn["truncate"]
            out["rope_scaling"] = {"type": "yarn"} | yarn
        out["nextn_moe"] = list(self.nextn_moe)
        return out

    def _kind(self) -> tuple[str, str]:
        if self.compressed:
            return "deepseek_v4", "DeepseekV4ForCausalLM"
        if self.gqa:
            return "glm4_moe", "Glm4MoeForCausalLM"
        if self.indexer is None:
            return "deepseek_v3", "DeepseekV3ForCausalLM"
        if self.indexer.interleaved:
            return "glm_moe_dsa", "GlmMoeDsaForCausalLM"
        return "deepseek_v32", "DeepseekV32ForCausalLM"

    def _attention_keys(self) -> JsonObject:
        """Keys of ``config.json`` for attention beside the dimensions of MLA."""
        g, c, h = self.gqa, self.compressed, self.hyper
        if c and h:
            ratios = {"compress_ratios": [*c.ratios, *(0,) * self.num_nextn_predict_layers]}
            sizes = {key: getattr(part, name) for part in (c, h) for name, key in part.KEYS.items()}
            return {"attention_bias": False, "num_key_value_heads": 1, **sizes, **ratios}
        if g is None:
            return {"attention_bias": False, "num_key_value_heads": self.num_attention_heads}
        return {key: getattr(g, name) for name, key in g.KEYS.items()}

    def _index_keys(self) -> JsonObject:
        """Keys of ``config.json`` for the indexer."""
        i = self.indexer
        if i is None:
            return {}
        types = ["shared" if shared else "full" for shared in i.shared]
        return {key: getattr(i, name) for name, key in i.KEYS.items()} | {"indexer_types": types}

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
    def usual_page(self) -> int:
        """Tokens of a page where no number is asked for."""
        unit = self.attention.page_unit
        return -(-DEFAULT_PAGE // unit) * unit

    @property
    def softmax_scale(self) -> float:
        """Factor on attention scores, YaRN's part included where the kind of attention has one."""
        yarn = self.rope_scaling if self.attention.sharpened else None
        return self.attention.key_dim**-0.5 * (yarn.softmax_factor if yarn else 1.0)

    def is_moe(self, layer: int) -> bool:
        """Whether trunk layer ``layer`` has an MoE block (first_k_dense_replace, moe_layer_freq)."""
        return (
            self.n_routed_experts > 0
            and layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
        )

    def with_nextn(self, moe: tuple[bool, ...]) -> "ModelConfig":
        """The model's configuration with ``len(moe)`` NextN layers."""
        return replace(self, num_nextn_predict_layers=len(moe), nextn_moe=moe)

    @property
    def drafts(self) -> bool:
        """Whether the model has NextN layers or a draft head."""
        return self.num_nextn_predict_layers > 0 or self.drafter is not None

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

# Fields that are read into classes of their own.
_PARTS = {
    "rope_scaling": YarnConfig,
    "indexer": IndexerConfig,
    "gqa": GqaConfig,
    "compressed": CompressedConfig,
    "hyper": HyperConfig,
}

# Fields without a key of their own in DeepSeek-V4's files.
_NOT_IN_V4 = (
    "intermediate_size",
    "n_group",
    "topk_group",
    "first_k_dense_replace",
    "moe_layer_freq",
    "rope_interleave",
)

# Their defaults in transformers are DeepSeek-V3's own values, which a file of another model must not fall
# back to.
_REQUIRED_OF_MOE = (
    "moe_intermediate_size",
    "num_experts_per_tok",
    "routed_scaling_factor",
)
_GROUPS = ("n_group", "topk_group")

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


def _check(c: ModelConfig) -> None:
    def need(ok: bool, name: str, expected: str) -> None:
        if not ok:
            raise ConfigError(f"{name} = {getattr(c, name)!r:.200}; expected {expected}")

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
    if c.compressed:
        assert c.hyper is not None, "files have both or neither"
        c.hyper.check()
        need(is_number(c.swiglu_limit) and c.swiglu_limit > 0, "swiglu_limit", "a positive number")
        check_size("q_lora_rank", c.q_lora_rank, ": queries have a low rank")
        need(c.n_routed_experts > 0, "n_routed_experts", "a positive integer")
        need(c.n_shared_experts == 1, "n_shared_experts", "1")
        need(c.norm_topk_prob, "norm_topk_prob", "true")
        most = c.num_hidden_layers
        need(c.num_hash_layers <= most, "num_hash_layers", f"at most num_hidden_layers = {most}")
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
    if c.n_routed_experts:
        layers = c.num_hidden_layers + c.num_nextn_predict_layers
        if layers * c.n_routed_experts > _MOST_EXPERTS:
            raise ConfigError(
                f"{layers} layers of n_routed_experts = {c.n_routed_experts}; expected at most "
                f"{_MOST_EXPERTS:,} experts in all"
            )
        if c.n_routed_experts % c.n_group:
            raise ConfigError(
                f"n_group = {c.n_group} does not divide n_routed_experts = {c.n_routed_experts}"
            )
        reachable = c.n_routed_experts // c.n_group * c.topk_group
        if not 1 <= c.num_experts_per_tok <= reachable or c.topk_group > c.n_group:
            raise ConfigError(
                f"num_experts_per_tok = {c.num_experts_per_tok}, topk_group = {c.topk_group}: at most "
                f"{reachable} experts lie in {c.topk_group} of {c.n_group} groups"
            )
        if c.n_group > 1 and c.n_routed_experts // c.n_group < 2:
            raise ConfigError("expert groups of one: a group's score is the sum of its two best experts")
        need(c.moe_intermediate_size > 0, "moe_intermediate_size", "a positive integer")
    group = c.int4_group
    need(group is None or is_whole(group, 1), "int4_group", "a positive integer or null")
    if group and c.n_routed_experts:
        for name in ("hidden_size", "moe_intermediate_size"):
            unit = math.lcm(group, INT4_PER_WORD)
            divides = getattr(c, name) % unit == 0
            need(
                divides,
                name,
                f"a multiple of {unit}: int4 weights have {group} inputs in a group, 8 in a word",
            )
