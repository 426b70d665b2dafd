"""One declaration gives shapes, dtypes, initial values and checkpoint names: they must fit each other."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Attention, Moe, Params, Spec, dtype_of, init_params, param_specs
from tests.models import TINY, gqa

CONFIGS = {
    "tiny": TINY,
    "no low rank": replace(TINY, q_lora_rank=None),
    "tied": replace(TINY, tie_word_embeddings=True),
    "two NextN layers": TINY.with_nextn((True, False)),
    "no NextN layer": TINY.with_nextn(()),
    "no shared expert": replace(TINY, n_shared_experts=0),
    "gqa": gqa(),
    "gqa without norms and biases": gqa(qk_norm=False, bias=False),
    "dense": replace(TINY, n_routed_experts=0, first_k_dense_replace=2),
}


def specs(cfg: ModelConfig) -> list[Spec]:
    return jax.tree.leaves(param_specs(cfg))


def names(cfg: ModelConfig) -> Counter[str]:
    """How many parameters come from each checkpoint tensor."""
    return Counter(n for s in specs(cfg) for n in jax.tree.leaves(s.names))


@pytest.mark.rest
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_initial_values_fit_the_specs(name, dtype):
    cfg = CONFIGS[name]
    declared, values = param_specs(cfg), init_params(cfg, jax.random.key(0), dtype)
    assert jax.tree.structure(declared) == jax.tree.structure(values)
    for spec, value in zip(jax.tree.leaves(declared), jax.tree.leaves(values), strict=True):
        assert value.shape == spec.shape
        assert len(spec.axes) == len(spec.shape)
        assert value.dtype == dtype_of(spec, dtype)
        assert np.isfinite(np.asarray(value, np.float32)).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_add_up_to_the_parameter(name):
    for spec in specs(CONFIGS[name]):
        tensors = len(jax.tree.leaves(spec.names))
        each = int(np.prod(spec.tensor_shape))
        if spec.rows is None:
            assert tensors * each == np.prod(spec.shape)
        else:
            start, stop = spec.rows
            assert (stop - start) * spec.shape[0] * spec.tensor_shape[-1] == np.prod(spec.shape)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_is_used_once_and_kv_b_twice(name):
    for tensor, times in names(CONFIGS[name]).items():
        assert times == (2 if tensor.endswith("kv_b_proj.weight") else 1), tensor


def test_keys_and_values_share_kv_b_without_overlap():
    a = param_specs(TINY).layers[0].attention
    assert isinstance(a, Attention)
    assert a.k_up.names == a.v_up.names
    assert (a.k_up.rows, a.v_up.rows) == ((0, TINY.qk_nope_head_dim), (TINY.qk_nope_head_dim, 16))


def test_names_of_the_release():
    found = names(TINY)
    assert {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.0.self_attn.q_a_proj.weight",
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.experts.7.down_proj.weight",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.2.enorm.weight",
        "model.layers.2.hnorm.weight",
        "model.layers.2.eh_proj.weight",
        "model.layers.2.shared_head.norm.weight",
    } <= set(found)
    assert "model.layers.2.embed_tokens.weight" not in found
    own = param_specs(CONFIGS["two NextN layers"], [(False, False), (True, True)]).nextn[1]
    assert own.embed.names == "model.layers.3.embed_tokens.weight"
    assert own.head.names == "model.layers.3.shared_head.head.weight"


def test_what_is_absent_is_none():
    assert param_specs(CONFIGS["tied"]).head is None
    assert param_specs(CONFIGS["no NextN layer"]).nextn == ()
    attention = param_specs(CONFIGS["no low rank"]).layers[0].attention
    assert isinstance(attention, Attention)
    assert attention.q_a is None
    assert attention.q_norm is None
    assert "model.layers.0.self_attn.q_proj.weight" in names(CONFIGS["no low rank"])
    block = param_specs(CONFIGS["no shared expert"]).layers[1].mlp
    assert isinstance(block, Moe)
    assert block.shared is None
    assert [isinstance(n.layer.mlp, Moe) for n in param_specs(CONFIGS["two NextN layers"]).nextn] == [
        True,
        False,
    ]


def test_norms_and_router_stay_in_float32():
    low = jax.eval_shape(lambda: init_params(TINY, jax.random.key(0), "bfloat16"))
    block = low.layers[1]
    assert isinstance(block.mlp, Moe)
    assert isinstance(block.attention, Attention)
    kept = (low.norm, block.attention_norm, block.attention.kv_norm, block.mlp.router, block.mlp.bias)
    assert {a.dtype for a in kept} == {jnp.dtype("float32")}
    rest = (low.embed, low.head, block.attention.o, block.mlp.gate_up, block.mlp.down, low.nextn[0].merge)
    assert {a.dtype for a in rest} == {jnp.dtype("bfloat16")}


def test_initial_scale():
    """Matrices by fan-in, embeddings 0.02, norms one, the router's bias zero; a key decides all of it."""
    values = init_params(TINY, jax.random.key(3))
    block = values.layers[1]
    assert isinstance(block.mlp, Moe)
    assert np.std(values.embed) == pytest.approx(0.02, rel=0.1)
    assert np.std(block.mlp.gate_up) == pytest.approx(TINY.hidden_size**-0.5, rel=0.1)
    assert np.std(block.attention.o) == pytest.approx(64**-0.5, rel=0.1)
    assert (np.asarray(values.norm) == 1).all()
    assert (np.asarray(block.mlp.bias) == 0).all()

    def same(a: Params, b: Params) -> bool:
        return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)))

    assert same(values, init_params(TINY, jax.random.key(3)))
    assert not same(values, init_params(TINY, jax.random.key(4)))
    # No two arrays of one shape are alike.
    assert not (values.layers[0].attention.o == values.layers[1].attention.o).any()
