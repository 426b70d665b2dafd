"""YaRN against transformers' formulas, written anew in float64; in an EAGLE-3 head with Llama's layer."""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.heads.eagle3.declared import Eagle3Config
from mtp_jax.model.config import ModelConfig, YarnConfig
from mtp_jax.model.family import config_json, config_of
from mtp_jax.model.layers import angles_of
from tests import eagle3
from tests.golden import expected
from tests.models import apart
from tests.rounding import near, of_model, roundoff

SCALING: dict[str, dict[str, Any]] = {
    "factor alone": {"factor": 4.0, "original_max_position_embeddings": 64},
    "betas": {"factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0},
    "not truncated": {"factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    "its own attention factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.7,
    },
    "mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.9,
        "mscale_all_dim": 0.5,
    },
    "mscale of all": {"factor": 40.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0},
    "not extended": {"factor": 1.0, "original_max_position_embeddings": 64},
}


def yarn(scaling: dict[str, Any], dim: int, base: float) -> tuple[np.ndarray, float]:
    """Inverse frequencies and attention factor, as ``_compute_yarn_parameters`` of transformers has them."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")

    def get_mscale(scale: float, mscale: float = 1) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = get_mscale(factor, mscale) / get_mscale(factor, mscale_all_dim)
        else:
            attention_factor = get_mscale(factor)

    def correction_dim(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = correction_dim(scaling.get("beta_fast") or 32)
    high = correction_dim(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    frequencies = base ** (np.arange(0, dim, 2) / dim)
    extrapolated, interpolated = 1 / frequencies, 1 / (factor * frequencies)
    return interpolated * ramp + extrapolated * (1 - ramp), attention_factor


def llama(**changes: Any) -> ModelConfig:
    """A GQA model, as a draft head's layer is."""
    cfg = eagle3.loaded("eagle3").config.drafter
    assert isinstance(cfg, Eagle3Config)
    return replace(cfg.layer, **changes)


@pytest.mark.parametrize("name", SCALING)
def test_a_config_that_is_written_reads_the_same(name: str):
    cfg = llama(rope_scaling=YarnConfig(**SCALING[name]))
    assert config_of(config_json(cfg)) == cfg


@pytest.mark.parametrize("name", SCALING)
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_angles_in_a_grouped_query_layer(name: str, theta: float):
    scaling = SCALING[name]
    cfg = llama(rope_scaling=YarnConfig(**scaling), rope_theta=theta)
    inv, factor = yarn(scaling, cfg.attention.rope_dim, theta)
    positions = np.array([[0, 1, 5, 63, 200]])
    angle = positions[..., None] * inv
    want = np.stack([np.cos(angle), np.sin(angle)], axis=-2) * factor
    got = np.asarray(angles_of(cfg, jnp.asarray(positions), 0))
    # Three roundings of the largest angle: a power, its interpolation, the product with a position.
    np.testing.assert_allclose(got, want, rtol=0, atol=3 * roundoff() * positions.max() * factor)
    assert cfg.softmax_scale == cfg.attention.key_dim**-0.5


def normed(x: np.ndarray, weight: Any, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


def head_in_numpy(fused: np.ndarray, following: np.ndarray, scaling: dict[str, Any] | None) -> np.ndarray:
    """Logits of the golden EAGLE-3 head at every token, in float64, all at once."""
    found = eagle3.loaded("eagle3")
    p, cfg = found.params.drafter, llama()
    assert isinstance(p, eagle3.Eagle3)
    raw = {n: t.array().astype(np.float64) for n, t in eagle3.tensors("eagle3").items() if t.dtype == "F32"}
    w = {n.removeprefix("midlayer."): array for n, array in raw.items()}
    eps, heads, width = cfg.rms_norm_eps, cfg.num_attention_heads, cfg.attention.key_dim
    embedded = np.asarray(found.params.embed, np.float64)[following]
    x = np.concatenate(
        [normed(embedded, w["input_layernorm.weight"], eps), normed(fused, w["hidden_norm.weight"], eps)], -1
    )
    inv, factor = (
        yarn(scaling, width, cfg.rope_theta)
        if scaling
        else (
            cfg.rope_theta ** (-np.arange(0, width, 2) / width),
            1.0,
        )
    )
    angle = np.arange(len(x))[:, None] * inv
    cos, sin = (np.concatenate([f(angle)] * 2, -1) * factor for f in (np.cos, np.sin))

    def rotated(rows: np.ndarray) -> np.ndarray:
        a, b = np.split(rows, 2, -1)
        return rows * cos[:, None] + np.concatenate([-b, a], -1) * sin[:, None]

    q, k, v = ((x @ w[f"self_attn.{n}_proj.weight"].T).reshape(len(x), -1, width) for n in ("q", "k", "v"))
    q, k = rotated(q), rotated(k)
    k, v = (np.repeat(rows, heads // rows.shape[1], axis=1) for rows in (k, v))
    scores = np.einsum("qnd,knd->nqk", q, k) / math.sqrt(width)
    scores = np.where(np.tril(np.ones((len(x), len(x)), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("nqk,knd->qnd", weights / weights.sum(-1, keepdims=True), v).reshape(len(x), -1)
    out = fused + mixed @ w["self_attn.o_proj.weight"].T
    rows = normed(out, w["post_attention_layernorm.weight"], eps)
    gate, up = (rows @ w[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    out = out + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down_proj.weight"].T
    return normed(out, w["norm.weight"], eps) @ w["lm_head.weight"].T


@pytest.mark.parametrize("scaling", apart([None, "factor alone", "mscale", "not truncated"], "mscale"))
def test_a_head_with_yarn_in_a_llama_layer(scaling: str | None):
    """Beside the golden head, to which the formulas in numpy agree without YaRN."""
    found, want = eagle3.loaded("eagle3"), expected("eagle3")
    ids, following = want["input_ids"], want["eagle_in_ids"]
    cfg = found.config
    given = SCALING[scaling] if scaling else None
    if given:
        head = cfg.drafter
        assert isinstance(head, Eagle3Config)
        layer = replace(head.layer, rope_scaling=YarnConfig(**given))
        cfg = replace(cfg, drafter=replace(head, layer=layer))
    got = eagle3.forward(found.params, cfg, ids, following)
    plain = head_in_numpy(want["eagle_fc"].astype(np.float64), following, given)
    near(eagle3.of_head(found.params, got["logits"]), plain, of_model(cfg, len(ids)))
    differs = np.abs(plain - want["eagle_logits"]).max()
    assert (differs > 1e-2) == bool(given)
