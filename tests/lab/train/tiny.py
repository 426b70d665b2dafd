"""The model that the tests of this room train, of the demo tokenizer's vocabulary."""

import functools
import math

import jax
import numpy as np

from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import config_of
from mtp_jax.model.params import Params, Spec, param_specs

TINY = {
    "vocab_size": 8192,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.0,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_nextn_predict_layers": 1,
    "nextn_moe": [False],
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-3,  # unlike that of the norms on low ranks
    "torch_dtype": "float32",
}
CONFIG = config_of(TINY)


@functools.cache
def params(cfg: ModelConfig = CONFIG) -> Params:
    """Parameters as ``init_params`` draws them, by numpy."""
    rng = np.random.default_rng(0)

    def draw(spec: Spec) -> jax.Array:
        if spec.init in ("ones", "zeros"):
            return jax.device_put(np.full(spec.shape, spec.init == "ones", np.float32))
        std = 0.02 if spec.init == "embedding" else 1 / math.sqrt(spec.tensor_shape[-1])
        return jax.device_put(rng.normal(0, std, spec.shape).astype(np.float32))

    return jax.tree.map(draw, param_specs(cfg))
