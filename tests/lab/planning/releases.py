"""The config.json of released models, as far as a plan reads it."""

import json
from pathlib import Path
from typing import Any

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"actorder": None, "dynamic": False, **_WEIGHTS},
            "input_activations": None,
            "output_activations": None,
        }
    },
}
_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": _FP8,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}

_V4_PRO: dict[str, Any] = {
    "attention_bias": False,
    "bos_token_id": 0,
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 1024,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 61,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 16,
    "o_lora_rank": 1024,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "compress_ratios": [128, 128, *(4, 128) * 29, 4, 0],
    "quantization_config": _FP8 | {"scale_fmt": "ue8m0"},
}

RELEASES: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": _V3,
    "DeepSeek-V3.2": _V3
    | {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
    "GLM-5.2": _V3
    | {
        "model_type": "glm_moe_dsa",
        "hidden_size": 6144,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": 3,
        "index_topk": 2048,
        "index_topk_freq": 4,
        "intermediate_size": 12288,
        "max_position_embeddings": 1048576,
        "n_group": 1,
        "num_attention_heads": 64,
        "num_hidden_layers": 78,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "quantization_config": None,
        "topk_group": 1,
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "GLM-4.5": {
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 3,
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 160,
        "n_shared_experts": 1,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 92,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "use_qk_norm": True,
        "vocab_size": 151552,
    },
    "Kimi-K2-Thinking": _V3
    | {
        "model_type": "kimi_k2",
        "first_k_dense_replace": 1,
        "max_position_embeddings": 262144,
        "n_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_nextn_predict_layers": 0,
        "quantization_config": _INT4,
        "routed_scaling_factor": 2.827,
        "topk_group": 1,
        "vocab_size": 163840,
    },
    "DeepSeek-V4-Pro": _V4_PRO,
    "DeepSeek-V4-Flash": _V4_PRO
    | {
        "compress_ratios": [0, 0, *(4, 128) * 20, 4, 0],
        "hidden_size": 4096,
        "index_topk": 512,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_attention_heads": 64,
        "num_hidden_layers": 43,
        "o_groups": 8,
        "q_lora_rank": 1024,
        "routed_scaling_factor": 1.5,
    },
}
# Its 15,000 experts are tensors by name, which a summary counts for a second.
FEWER_LAYERS = {"GLM-4.5": {"num_hidden_layers": 12}}


def write(folder: Path, name: str, **changes: Any) -> Path:
    """A folder called like the model, with its config.json alone."""
    model = folder / name
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(RELEASES[name] | changes))
    return model
