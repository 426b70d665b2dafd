"""config.json of models with grouped-query attention: what is read, what is refused."""

import contextlib
import math
from typing import Any

import pytest

from mtp_jax.errors import ConfigError
from mtp_jax.model.config import GqaConfig
from mtp_jax.model.family import config_json, config_of

# As zai-org/GLM-4.5 has it.
GLM45: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_qk_norm": True,
    "vocab_size": 151552,
}


def test_grouped_query_attention():
    cfg = config_of(GLM45)
    assert cfg.gqa == GqaConfig(8, head_dim=128, rotary=0.5, qk_norm=True, bias=True)
    assert (cfg.attention.rope_dim, cfg.rope_interleave, cfg.softmax_scale) == (64, False, 128**-0.5)
    assert (cfg.row.width, cfg.row.keys, cfg.row.fp8_bytes) == (2048, (0, 1024), 2048 + 16 * 4)
    unsaid = {k: v for k, v in GLM45.items() if k not in ("model_type", "use_qk_norm", "attention_bias")}
    assert config_of(unsaid).gqa == GqaConfig(8, head_dim=128, rotary=0.5)
    nested = {"rope_theta": 1e6, "partial_rotary_factor": 0.5, "rope_type": "default"}
    new = {k: v for k, v in GLM45.items() if k not in ("rope_theta", "rope_scaling", "partial_rotary_factor")}
    assert config_of(new | {"rope_parameters": nested}) == cfg
    written = config_json(cfg)
    assert written.items() >= (GLM45 | {"rope_theta": 1e6}).items()
    assert not written.keys() & {"kv_lora_rank", "q_lora_rank", "v_head_dim"}


REFUSED = [
    (
        {"num_key_value_heads": None, "head_dim": None},
        "config.json lacks num_key_value_heads, head_dim",
    ),
    ({"partial_rotary_factor": None}, "config.json lacks partial_rotary_factor; glm4_moe has grouped-query"),
    ({"num_key_value_heads": 7}, "num_key_value_heads = 7 does not divide num_attention_heads = 96"),
    ({"num_key_value_heads": 0}, "num_key_value_heads = 0; expected a whole number from 1"),
    ({"head_dim": "128"}, "head_dim = '128'; expected a whole number from 1"),
    (
        {"partial_rotary_factor": 1.5},
        "partial_rotary_factor = 1.5 of head_dim = 128; expected a number",
    ),
    ({"partial_rotary_factor": 3 / 128}, "that gives an even number of channels"),
    (
        {"rope_parameters": {"partial_rotary_factor": 1.0}},
        "partial_rotary_factor is given as 1.0 and 0.5; expected one value",
    ),
    ({"use_qk_norm": 1}, "use_qk_norm = 1; expected true or false"),
    ({"attention_bias": "yes"}, "attention_bias = 'yes'; expected true or false"),
    ({"kv_lora_rank": 512}, "kv_lora_rank = 512 is not supported with grouped-query attention"),
    ({"q_lora_rank": 512}, "q_lora_rank = 512 is not supported with grouped-query attention"),
    (
        {"index_n_heads": 4, "index_head_dim": 64, "index_topk": 8},
        "with grouped-query attention; expected no such key",
    ),
    ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported; expected 'sigmoid'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_refusals(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        config_of({k: v for k, v in (GLM45 | changes).items() if v is not None})
    assert message in str(caught.value)


@pytest.mark.rest
@pytest.mark.parametrize("key", [*GLM45, "rope_parameters"])
def test_any_value_is_read_or_refused(key: str):
    for wrong in ("x", "", [], {}, -1, 0, 1.5, True, None, 10**400, math.nan, math.inf, [None]):
        with contextlib.suppress(ConfigError):
            config_of({**GLM45, key: wrong})
