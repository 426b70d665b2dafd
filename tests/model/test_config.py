"""Model configs: both dialects, defaults, and a reason for everything that is refused."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from mtp_jax.errors import ConfigError
from mtp_jax.model.config import IndexerConfig, YarnConfig
from mtp_jax.model.family import config_json, config_of, config_of_file
from mtp_jax.model.hf_config import read_json
from tests.golden import VARIANTS, model_dir

YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
# As released; num_key_value_heads and the keys that only training uses are there to be ignored.
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in (V3 | changes).items() if k not in keys}


def test_deepseek_v3():
    c = config_of(V3)
    assert (c.num_hidden_layers, c.nextn_moe, c.fp8, c.dtype) == (61, (True,), True, "bfloat16")
    assert (c.attention.key_dim, c.row.width, c.eos_token_ids) == (192, 576, (1,))
    assert [c.is_moe(i) for i in (0, 2, 3, 60)] == [False, False, True, True]
    assert c.rope_scaling == YarnConfig(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    assert c.rope_scaling is not None
    assert c.rope_scaling.rope_factor == 1.0
    assert math.isclose(c.softmax_scale, 0.1352338, rel_tol=1e-6)


def test_the_dialect_of_transformers_5():
    new = without("rope_scaling", "rope_theta", "torch_dtype", dtype="bfloat16")
    new["rope_parameters"] = YARN | {"rope_theta": 10000, "rope_type": "yarn"}
    assert config_of(new) == config_of(V3)
    nested = without("rope_theta", rope_scaling=YARN | {"rope_theta": 5e4})
    assert config_of(nested) == config_of(V3 | {"rope_theta": 5e4})
    new["rope_parameters"] = {"rope_theta": 5e4, "rope_type": "default"}
    assert config_of(new) == config_of(V3 | {"rope_scaling": None, "rope_theta": 5e4})


@pytest.mark.parametrize("idle", [None, {}, {"rope_type": "default"}, {"type": "default", "rope_theta": 1e4}])
def test_a_dialect_that_says_nothing_leaves_it_to_the_other(idle: dict[str, object] | None):
    yarn = YARN | {"rope_theta": 10000, "rope_type": "yarn"}
    for scaling, parameters in ((idle, yarn), (YARN, idle)):
        both = {"rope_scaling": scaling, "rope_parameters": parameters}
        assert config_of(V3 | both) == config_of(V3)


def test_defaults():
    optional = (
        "num_nextn_predict_layers",
        "rope_scaling",
        "rms_norm_eps",
        "topk_method",
        "scoring_func",
        "tie_word_embeddings",
        "quantization_config",
        "q_lora_rank",
        "eos_token_id",
        "model_type",
        "norm_topk_prob",
        "torch_dtype",
        "rope_theta",
    )
    c = config_of(without(*optional))
    assert (c.num_nextn_predict_layers, c.nextn_moe, c.eos_token_ids) == (0, (), ())
    assert (c.rope_interleave, c.rope_scaling, c.q_lora_rank, c.fp8) == (True, None, None, False)
    assert (c.rms_norm_eps, c.rope_theta, c.norm_topk_prob, c.tie_word_embeddings) == (1e-6, 1e4, True, False)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"eos_token_id": [1, 2]}, "eos_token_ids", (1, 2)),
        ({"eos_token_id": None}, "eos_token_ids", ()),
        ({"quantization_config": ""}, "fp8", False),
        ({"quantization_config": FP8 | {"scale_fmt": "ue8m0"}}, "fp8", True),
        ({"rope_interleave": False}, "rope_interleave", False),
        ({"torch_dtype": "torch.float32"}, "dtype", "float32"),
        ({"torch_dtype": "float16"}, "dtype", "float32"),
        ({"num_nextn_predict_layers": 2}, "nextn_moe", (True, True)),
        ({"nextn_moe": [False]}, "nextn_moe", (False,)),
        ({"model_type": "kimi_k2"}, "vocab_size", 129280),
        ({"model_type": "joyai_llm_flash_mtp"}, "vocab_size", 129280),
        ({"model_type": None, "architectures": ["DeepseekMTPForCausalLM"]}, "vocab_size", 129280),
        ({"n_routed_experts": None}, "first_k_dense_replace", 61),
        ({"n_routed_experts": None}, "nextn_moe", (False,)),
        (
            {"first_k_dense_replace": None, "mlp_layer_types": ["dense"] + ["sparse"] * 60},
            "first_k_dense_replace",
            1,
        ),
    ],
)
def test_values_that_are_read(changes: dict[str, Any], field: str, value: Any):
    assert getattr(config_of(V3 | changes), field) == value


@pytest.mark.parametrize(
    ("changes", "rope", "softmax"),
    [
        ({}, 1.0, 1.3688879454),
        ({"mscale": 1.0, "mscale_all_dim": 0.707}, 1.3688879454 / 1.2608037774, 1.2608037774),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0, 1.2608037774),
        ({"mscale": None}, 1.3688879454, 1.3688879454),
        ({"mscale_all_dim": None}, 1.3688879454, 1.0),
        ({"mscale_all_dim": 0}, 1.3688879454, 1.0),
        ({"mscale": None, "mscale_all_dim": None}, 1.3688879454, 1.0),
        ({"mscale": None, "mscale_all_dim": None, "attention_factor": 0.9}, 0.9, 1.0),
        ({"factor": 1}, 1.0, 1.0),
    ],
)
def test_mscale(changes: dict[str, Any], rope: float, softmax: float):
    c = config_of(V3 | {"rope_scaling": YARN | changes})
    assert c.rope_scaling is not None
    assert math.isclose(c.rope_scaling.rope_factor, rope, rel_tol=1e-9)
    assert math.isclose(c.softmax_scale * math.sqrt(192), softmax**2, rel_tol=1e-9)


INDEX = {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
GLM52_FULL = {0, 1, 2, *range(6, 78, 4)}


def test_sparse_attention():
    index = config_of(V3 | INDEX).indexer
    assert index == IndexerConfig(64, 128, 2048, interleaved=False, shared=(False,) * 61)
    # The first release of V3.2 called itself deepseek_v3.
    assert config_of(V3 | INDEX | {"model_type": "deepseek_v3"}).indexer == index
    assert config_of(V3).indexer is None


@pytest.mark.parametrize(
    ("changes", "interleaved"),
    [
        ({}, False),
        ({"model_type": "glm_moe_dsa"}, True),
        ({"model_type": None, "architectures": ["GlmMoeDsaForCausalLM"]}, True),
        ({"model_type": "glm_moe_dsa", "indexer_rope_interleave": False}, False),
        ({"indexer_rope_interleave": True}, True),
    ],
)
def test_the_rope_of_an_indexer_is_the_models_unless_the_config_says(changes: Any, interleaved: bool):
    index = config_of(V3 | INDEX | changes).indexer
    assert index is not None
    assert index.interleaved == interleaved


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({}, set(range(78))),
        ({"indexer_types": ["full" if i in GLM52_FULL else "shared" for i in range(78)]}, GLM52_FULL),
        ({"index_topk_pattern": "".join("F" if i in GLM52_FULL else "S" for i in range(78))}, GLM52_FULL),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, GLM52_FULL),
        ({"index_topk_freq": 4}, {0, *range(1, 78, 4)}),
        ({"indexer_types": ["full"] * 78, "index_topk_freq": 4}, set(range(78))),
    ],
)
def test_layers_that_share_an_indexer(changes: Any, full: set[int]):
    cfg = config_of(V3 | INDEX | {"num_hidden_layers": 78} | changes)
    assert {i for i in range(78) if cfg.indexes(i)} == full
    assert cfg.indexes(78), "a NextN layer has its own"


REFUSED = [
    ({"model_type": "deepseek_v41"}, "'deepseek_v41' is not supported: its layers share compressed"),
    (
        {"model_type": None, "architectures": ["DeepseekV41ForCausalLM"]},
        "'DeepseekV41ForCausalLM' is not supported: its",
    ),
    ({"model_type": "deepseek_v32"}, "config.json lacks index_n_heads, index_head_dim, index_topk; sparse"),
    ({"model_type": "deepseek_v2"}, "'deepseek_v2' is not supported: its softmax router"),
    ({"model_type": "kimi_k3"}, "'kimi_k3' is not supported: its layers mix"),
    ({"model_type": "mamba"}, "'mamba' is not supported; expected one of deepseek_v3"),
    ({"index_topk": 2048}, "config.json lacks index_n_heads, index_head_dim; sparse attention needs"),
    (INDEX | {"index_topk": 0}, "index_topk = 0; expected a whole number from 1 to"),
    (INDEX | {"index_head_dim": 32}, "index_head_dim = 32; expected qk_rope_head_dim = 64 or more"),
    (INDEX | {"indexer_rope_interleave": 1}, "indexer_rope_interleave = 1; expected true or false"),
    (INDEX | {"q_lora_rank": None}, "q_lora_rank = None; the indexer's queries"),
    (
        INDEX | {"indexer_types": ["full"]},
        "indexer_types = ['full']; expected 'full' or 'shared' for each of",
    ),
    (INDEX | {"index_topk_pattern": "FFFx"}, "index_topk_pattern = 'FFFx'; expected 'F' or 'S'"),
    (INDEX | {"index_topk_pattern": "S" * 61}, "expected 61 values, the first of them False"),
    (
        INDEX | {"index_topk_freq": 0},
        "index_topk_freq = 0, index_skip_topk_offset = 2; expected whole numbers",
    ),
    (
        INDEX | {"index_share_for_mtp_iteration": True, "num_nextn_predict_layers": 2},
        "index_share_for_mtp_iteration with num_nextn_predict_layers = 2; expected one layer",
    ),
    ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported; expected 'sigmoid'"),
    ({"topk_method": "greedy"}, "topk_method = 'greedy' is not supported; expected 'noaux_tc'"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; expected 'silu'"),
    ({"attention_bias": True}, "attention_bias = True is not supported; expected False"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    (
        {"rope_scaling": {"type": "linear", "factor": 2}},
        "rope scaling 'linear' is not supported; expected 'yarn'",
    ),
    ({"rope_scaling": {"factor": 40}}, "rope scaling 'none' is not supported; expected 'yarn'"),
    ({"rope_scaling": {"type": "yarn"}}, "yarn rope scaling has no factor"),
    ({"rope_scaling": YARN | {"factor": "much"}}, "factor = 'much'; expected a number"),
    ({"rope_scaling": YARN | {"mscale": math.nan}}, "mscale = nan; expected a number"),
    (
        {"rope_scaling": YARN | {"original_max_position_embeddings": 0.5}},
        "expected whole original_max_position_embeddings",
    ),
    ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn'; expected objects or null"),
    ({"rope_parameters": [1]}, "rope_parameters = [1]"),
    ({"rope_theta": "10000"}, "rope_theta = '10000'; expected a number"),
    ({"rope_theta": 10**400}, "expected a number"),
    ({"rope_theta": 1}, "rope_theta = 1.0; expected more than 1 with YaRN"),
    ({"rope_parameters": {"rope_theta": 5e4}}, "rope_theta is given as 10000.0 and 50000.0"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not supported"),
    (
        {"rope_scaling": YARN | {"original_max_position_embeddings": 10**400}},
        "expected whole original_max_position_embeddings",
    ),
    ({"quantization_config": FP8 | {"weight_block_size": 128}}, "weight_block_size 128"),
    ({"rope_scaling": YARN | {"factor": 0.5}}, "expected factor >= 1"),
    ({"rope_scaling": YARN | {"beta_slow": 64}}, "expected factor >= 1 and beta_fast >= beta_slow > 0"),
    ({"rope_scaling": YARN | {"truncate": 0}}, "truncate = 0; expected true or false"),
    ({"torch_dtype": "int8"}, "dtype 'int8' is not supported; expected float32, bfloat16 or float16"),
    (
        {"quantization": {"bits": 4, "group_size": 64}, "quantization_config": {"bits": 4, "group_size": 64}},
        "quantization of 4 bits by mlx is not supported; expected fp8",
    ),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization 'awq' is not supported; expected fp8"),
    ({"quantization_config": "int8"}, "quantization 'int8' is not supported"),
    ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size None"),
    ({"quantization_config": FP8 | {"weight_block_size": [1, 128]}}, "weight_block_size [1, 128]"),
    ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "fmt e5m2 is not supported"),
    ({"quantization_config": FP8 | {"activation_scheme": "static"}}, "activation_scheme 'static'"),
    ({"hidden_size": None}, "config.json lacks hidden_size"),
    (
        {"routed_scaling_factor": None, "num_experts_per_tok": None, "n_group": None},
        "lacks num_experts_per_tok, routed_scaling_factor, n_group",
    ),
    ({"hidden_size": 0}, "hidden_size = 0; expected a positive integer"),
    ({"hidden_size": "7168"}, "hidden_size = '7168'; expected a positive integer"),
    ({"hidden_size": True}, "hidden_size = True; expected a positive integer"),
    ({"hidden_size": 7168.0}, "hidden_size = 7168.0; expected a positive integer"),
    ({"q_lora_rank": 0}, "q_lora_rank = 0; expected a positive integer or null"),
    ({"n_shared_experts": -1}, "n_shared_experts = -1; expected an integer >= 0"),
    ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers = -1; expected an integer >= 0"),
    ({"num_nextn_predict_layers": "1"}, "wrong type"),
    (
        {"num_nextn_predict_layers": 10**12},
        "num_nextn_predict_layers = 1000000000000; expected at most 65,536",
    ),
    ({"rms_norm_eps": 0}, "rms_norm_eps = 0; expected a positive number"),
    ({"rope_theta": -1}, "rope_theta = -1.0; expected a positive number"),
    ({"rope_theta": 0}, "rope_theta = 0.0; expected a positive number"),
    ({"routed_scaling_factor": "x"}, "routed_scaling_factor = 'x'; expected a positive number"),
    ({"norm_topk_prob": 1}, "norm_topk_prob = 1; expected true or false"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'; expected true or false"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63; expected an even number"),
    ({"eos_token_id": "</s>"}, "eos_token_ids = ('</s>',); expected token ids"),
    ({"nextn_moe": [True, True]}, "nextn_moe has 2 entries, num_nextn_predict_layers is 1"),
    ({"nextn_moe": ["MoE"]}, "nextn_moe = ('MoE',); expected true or false"),
    ({"n_routed_experts": 10**9}, "n_routed_experts = 1000000000; expected at most 65,536"),
    (
        {"n_routed_experts": 4096, "num_hidden_layers": 65536},
        "65537 layers of n_routed_experts = 4096; expected at most 131,072 experts in all",
    ),
    ({"n_group": 7}, "n_group = 7 does not divide n_routed_experts = 256"),
    ({"topk_group": 9}, "topk_group = 9"),
    ({"topk_group": 1, "num_experts_per_tok": 33}, "at most 32 experts lie in 1 of 8 groups"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0"),
    ({"n_group": 256, "topk_group": 8}, "expert groups of one"),
    ({"moe_intermediate_size": 0}, "moe_intermediate_size = 0; expected a positive integer"),
    ({"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types = ['sparse', 'dense'] is not supported"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_refusals(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        config_of({k: v for k, v in (V3 | changes).items() if v is not None})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("{", "is not readable JSON"),
        ("[" * 100_000, "is not readable JSON"),
        ("1" * 5000, "is not readable JSON"),
        ("[]", "holds a JSON list; expected an object"),
    ],
)
def test_unreadable_files(tmp_path: Path, text: str | None, message: str):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        config_of_file(tmp_path / "config.json")


WRONG = ["x", "", [], [1], {}, -1, 0, 1.5, True, None, 10**400, math.nan, math.inf, [None], [[1]]]


KEYS = [*V3, "rope_parameters", "mlp_layer_types", "nextn_moe", "dtype"]
NESTED = [key for key in KEYS if "rope" in key]


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if key in NESTED else pytest.mark.rest) for key in KEYS]
)
def test_any_value_is_read_or_refused(key: str):
    """Nested settings likewise; ModelConfig raises nothing but ConfigError."""
    inner = V3[key] if isinstance(V3.get(key), dict) else {}
    for wrong in WRONG:
        for value in (wrong, *({**inner, k: wrong} for k in inner)):
            with contextlib.suppress(ConfigError):
                config_of({**V3, key: value})


@pytest.mark.parametrize("variant", VARIANTS)
def test_written_configs_are_read_back(variant: str):
    path = model_dir(variant) / "config.json"
    before = config_of_file(path)
    after = config_of(json.loads(json.dumps(config_json(before))))
    assert after == config_of(read_json(path) | {"quantization_config": None})
    assert after.with_nextn(()).num_nextn_predict_layers == 0
    assert after.with_eos([3, 4]).eos_token_ids == (3, 4)
    assert after.with_eos(5).eos_token_ids == (5,)
    assert after.with_eos(None) == after
