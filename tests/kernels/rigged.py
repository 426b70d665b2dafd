"""A small model of DeepSeek-V3's head dimensions, which the kernels take, whose greedy text is known."""

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mtp_jax.lab.bench.synthetic import preset, rigged_params
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.narrow import FP8_BLOCK, Fp8
from mtp_jax.model.params import Params, Spec, param_specs
from mtp_jax.model.spec import may_be_narrow, scale_spec

E4M3_MAX = 448.0


def config() -> ModelConfig:
    """One dense and three MoE layers, and a NextN layer with experts."""
    return replace(
        preset("moe").config,
        dtype="bfloat16",
        hidden_size=1024,
        intermediate_size=2048,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=16,
        q_lora_rank=512,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )


def params(cfg: ModelConfig, weights: Literal["bfloat16", "fp8"], noise: float = 4.4) -> Params:
    """``rigged_params`` in bfloat16, or with its projections in block-scaled FP8."""
    wide = rigged_params(cfg, noise, dtype="bfloat16")
    if weights == "bfloat16":
        return wide

    def narrow(spec: Spec, w: jax.Array) -> Any:
        name: Any = spec.names
        while not isinstance(name, str):
            name = name[0]
        if not may_be_narrow(name) or spec.rows is not None:
            return w
        return quantised(w, spec, scale_spec(spec).shape)

    return jax.tree.map(narrow, param_specs(cfg), wide)


def quantised(w: jax.Array, spec: Spec, blocks: tuple[int, ...]) -> Fp8:
    """A weight with a scale for each of its ``blocks``, of 128x128, whose largest number becomes 448."""
    (*stack, down, across), (rows, columns) = blocks, spec.tensor_shape
    matrix = w.astype(jnp.float32).reshape(*stack, rows, columns)
    more = [(0, 0)] * len(stack) + [(0, down * FP8_BLOCK - rows), (0, across * FP8_BLOCK - columns)]
    cut = jnp.pad(matrix, more).reshape(*stack, down, FP8_BLOCK, across, FP8_BLOCK)
    scale = jnp.maximum(jnp.abs(cut).max(axis=(-3, -1)), 1e-10) / E4M3_MAX
    values = (cut / scale[..., :, None, :, None]).reshape(*stack, down * FP8_BLOCK, across * FP8_BLOCK)
    return Fp8(values[..., :rows, :columns].reshape(w.shape).astype(jnp.float8_e4m3fn), scale)
