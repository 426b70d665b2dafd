"""Configs of DeepSeek-V4 in both dialects, and a reason for everything that is refused."""

import math
from typing import Any

import pytest

from mtp_jax.errors import ConfigError
from mtp_jax.model.family import config_json, config_of
from tests.v4 import v4_config

YARN = v4_config()["rope_scaling"]
MAIN = {"rope_type": "default", "rope_theta": 10000.0}
# The same model as transformers writes it.
OTHER = {
    "compress_ratios": None, "rope_scaling": None, "rope_theta": None, "compress_rope_theta": None,
    "num_hash_layers": None, "qk_rope_head_dim": None, "partial_rotary_factor": 0.25,
    "rope_parameters": {"main": MAIN, "compress": YARN | {"rope_theta": 160000.0}},
    "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "compress_rate_csa": 4,
}  # fmt: skip


def other(**changes: Any) -> dict[str, Any]:
    return v4_config(**(OTHER | changes))


def test_both_dialects_are_one_model():
    assert config_of(other()) == config_of(v4_config())


def test_null_is_no_yarn():
    cfg = config_of(v4_config() | {"rope_scaling": None})
    assert cfg.rope_scaling is None
    assert config_of(config_json(cfg)) == cfg


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    (v4_config(num_hidden_layers="4"), "num_hidden_layers = '4'; expected an integer >= 0"),
    (v4_config(num_nextn_predict_layers=-1), "num_nextn_predict_layers = -1; expected an integer >= 0"),
    (
        v4_config(num_nextn_predict_layers=0),
        "compress_ratios has 5 entries; expected 4 for num_hidden_layers",
    ),
    (v4_config(num_nextn_predict_layers=3), "expected 4 for num_hidden_layers, or 7 with num_nextn_predict"),
    (v4_config(compress_ratios="0,4"), "compress_ratios = '0,4', not a list; expected 4"),
    (v4_config(compress_ratios=[0, 4, 64, 4]), "[0, 4, 64, 4] is not supported; expected 0, 4, 128"),
    (v4_config(n_routed_experts=0), "n_routed_experts = 0; expected a positive integer"),
    (v4_config(routed_scaling_factor=None), "lacks routed_scaling_factor; a DeepSeek-V4 config has them all"),
    (v4_config(rope_scaling=None), "config.json lacks rope_scaling (null: no YaRN)"),
    (
        v4_config(rope_scaling={"type": "yarn", "factor": 16}),
        "no beta_fast, beta_slow, original_max_position_embeddings: {'type': 'yarn'",
    ),
    (v4_config(model_type="deepseek_v4.1"), "'deepseek_v4.1' is not supported: its layers share compressed"),
    (v4_config(vision_config={}), "vision_config: DeepSeek-V4 with vision is not supported"),
    (other(layer_types=[["sliding_attention"]] * 4), "layer_types = [['sliding_attention'], "),
    (other(compress_rates=[4, 128]), "compress_rates = [4, 128]; expected an object"),
    (other(compress_rates={"compressed_sparse_attention": 8}), "compressed_sparse_attention': 8"),
    (other(compress_rate_csa=8), "compress_rates = {'compress"),
    (other(mlp_layer_types=["hash_moe"]), "expected 'hash_moe's, then 'moe's, for 4 layers"),
    (other(partial_rotary_factor=math.nan), "partial_rotary_factor = nan; expected a number above 0"),
    (other(head_dim=10**400), "head_dim = 1000"),
    (
        other(rope_parameters={"main": MAIN | {"rope_type": "yarn"}, "compress": YARN}),
        "rope_parameters.main has rope_type = 'yarn'; expected 'default'",
    ),
)


@pytest.mark.parametrize(("raw", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_a_fault_is_named(raw: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        config_of(raw)
    assert message in str(error.value)
