"""DeepSeek-V3, V3.1 and R1, Kimi-K2, GLM-4.7-Flash; and V3.2 and GLM-5, whose attention is sparse."""

from typing import Any, ClassVar

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.model.attention_config import OF_MLA
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family.family import Family
from mtp_jax.model.family.hints import TensorNames, contradicts
from mtp_jax.model.family.index_keys import index_keys, indexer
from mtp_jax.model.family.keys import dense_layers, rope

# Models with sparse attention, and whether the indexer's rope pairs neighbours if the config does not say.
_SPARSE = {"deepseek_v32": False, "glm_moe_dsa": True}


class DeepSeekV3(Family):
    """MLA, with an indexer or without, and experts that a sigmoid scores."""

    name, title, stem = "deepseek_v3", "DeepSeek-V3", "DeepseekV3"
    types = ("deepseek_v3", "kimi_k2", "glm4_moe_lite", "joyai_llm_flash", *_SPARSE)
    architectures: ClassVar = {
        "DeepseekV3For": "deepseek_v3",
        "DeepseekMTPFor": "deepseek_v3",
        "DeepseekV32For": "deepseek_v32",
        "GlmMoeDsaFor": "glm_moe_dsa",
    }
    allowed: ClassVar = {**Family.allowed, "attention_bias": False, "partial_rotary_factor": 1}
    needed = OF_MLA

    def translate(self, raw: JsonObject, kind: str) -> dict[str, Any]:
        """See ``Family``."""
        return {**dense_layers(raw), **rope(raw), "indexer": indexer(raw, _SPARSE.get(kind))}

    def own_hints(self, cfg: ModelConfig, names: TensorNames) -> list[str]:
        """See ``Family``; whether queries have a low rank, and of the indexer."""
        out = super().own_hints(cfg, names)
        if names.lacks("self_attn.q_proj.weight"):
            out.append(contradicts("q_lora_rank", "null", "the tensors have no q_proj.weight"))
        if names.lacks("self_attn.q_a_proj.weight"):
            out.append(contradicts("q_lora_rank", cfg.q_lora_rank, "the tensors have no q_a_proj.weight"))
        if cfg.indexer is None and any(".indexer." in name for name in names.found):
            out.append(
                "the tensors have an indexer, as DeepSeek-V3.2 does, and config.json has no index_topk"
            )
        return out

    def kind(self, cfg: ModelConfig) -> tuple[str, str]:
        """See ``Family``."""
        if cfg.indexer is None:
            return super().kind(cfg)
        if cfg.indexer.interleaved:
            return "glm_moe_dsa", "GlmMoeDsaForCausalLM"
        return "deepseek_v32", "DeepseekV32ForCausalLM"

    def exported_to_xllm(self, cfg: ModelConfig) -> JsonObject:
        """See ``Family``."""
        kind, layers = self.kind(cfg)[0], cfg.num_nextn_predict_layers
        if (kind, layers) != (self.name, 1):
            raise ConfigError(
                f"layout = 'xllm' is known of {self.name} with one NextN layer, this is {kind} with "
                f"{layers}; take 'lmsys'"
            )
        architectures = ["DeepseekMTPForCausalLM"]
        counts = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1, "first_k_dense_replace": 0}
        return {"model_type": "deepseek_v3_mtp", "architectures": architectures, **counts}

    def keys(self, cfg: ModelConfig) -> JsonObject:
        """See ``Family``."""
        out = {"topk_method": "noaux_tc", "attention_bias": False}
        out["num_key_value_heads"] = cfg.num_attention_heads
        return out | (index_keys(cfg.indexer) if cfg.indexer else {})
