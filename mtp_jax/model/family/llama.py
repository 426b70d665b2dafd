"""Llama 2 to 3.3, SmolLM2 and other dense models of that shape: grouped-query attention and no experts."""

from typing import Any, ClassVar

from mtp_jax.json_object import JsonObject
from mtp_jax.model.attention_config import OF_MLA
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.config_parts import Llama3Scaling
from mtp_jax.model.family.family import Family
from mtp_jax.model.family.keys import numbers, rope, yarn
from mtp_jax.model.gqa_config import GqaConfig

# Fields that describe experts.
_OF_EXPERTS = (
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group"),
    *("moe_intermediate_size", "routed_scaling_factor", "norm_topk_prob", "scoring_func"),
    *("first_k_dense_replace", "moe_layer_freq"),
)


class Llama(Family):
    """Heads that are rotated as a whole, neither norms of queries and keys nor biases, dense layers."""

    name, title, stem = "llama", "Llama", "Llama"
    types = ("llama",)
    architectures: ClassVar = {"LlamaFor": "llama"}
    allowed: ClassVar = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1,
        "rope_interleaved": False,  # SmolLM's key, whose neighbours transformers never pairs
    }
    needed = ("max_position_embeddings",)
    unwritten = (*Family.unwritten, *OF_MLA, "q_lora_rank", *_OF_EXPERTS)

    def translate(self, raw: JsonObject, kind: str) -> dict[str, Any]:
        """See ``Family``. Without their keys, every head has a kv head, and heads divide the hidden size."""
        heads, width = raw.get("num_attention_heads"), raw.get("hidden_size")
        kv_heads, head_dim = raw.get("num_key_value_heads", heads), raw.get("head_dim")
        if head_dim is None and type(heads) is int and heads > 0 and type(width) is int:
            head_dim = width // heads
        interleaved = raw.get("rope_interleave")
        return {
            **rope(raw, {"llama3": _llama3, "yarn": yarn}),
            **dict.fromkeys(("n_routed_experts", "n_shared_experts", "moe_intermediate_size"), 0),
            "rope_interleave": False if interleaved is None else interleaved,
            "gqa": GqaConfig(**{"kv_heads": kv_heads, "head_dim": head_dim, "rotary": 1.0}),
        }

    def keys(self, cfg: ModelConfig) -> JsonObject:
        """See ``Family``."""
        assert cfg.gqa is not None, "a Llama has grouped-query attention"
        g = cfg.gqa
        return {"attention_bias": False, "num_key_value_heads": g.kv_heads, "head_dim": g.head_dim}


def _llama3(raw: JsonObject, scaling: JsonObject) -> Llama3Scaling:
    names = "factor", "low_freq_factor", "high_freq_factor"
    original: Any = scaling.get("original_max_position_embeddings")
    return Llama3Scaling(original_max_position_embeddings=original, **numbers(scaling, names, names))
