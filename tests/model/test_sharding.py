"""Meshes and the rules from logical to mesh axes. What runs on a mesh is in tests/sharding."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from mtp_jax.checkpoint import load
from mtp_jax.errors import ConfigError
from mtp_jax.model import trunk
from mtp_jax.model.backend import backend
from mtp_jax.model.params import Moe, param_specs
from mtp_jax.model.sharding import (
    check_divisible,
    constrain,
    data_size,
    make_mesh,
    param_sharding,
    partition,
    sharded,
    with_auto_axes,
)
from tests.golden import model_dir
from tests.models import TINY, make_engine
from tests.rounding import near, of_model


def test_mesh_axes():
    mesh = make_mesh(4, 2)
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    assert data_size(mesh) == 4
    assert data_size(None) == 1


def test_too_few_devices():
    with pytest.raises(ConfigError, match="a 4x4 mesh needs 16 devices; 8 are visible"):
        make_mesh(4, 4)


def test_rules():
    assert partition("slots", None) == PartitionSpec("data", None)
    assert partition("pages") == PartitionSpec("data")
    assert partition("heads", "mlp") == PartitionSpec("model", "model")
    assert partition("experts") == PartitionSpec(("data", "model"))


def test_without_a_mesh_nothing_happens():
    x = jnp.ones(3)
    assert constrain(x, None, "slots") is x

    def f(a: jax.Array) -> jax.Array:
        return a

    assert sharded(f, None, (PartitionSpec(),), PartitionSpec()) is f
    check_divisible(TINY, None)


def test_parameters_are_split_where_the_rules_say():
    mesh = make_mesh(2, 4)
    placed = jax.tree.map(lambda spec: param_sharding(spec, mesh), param_specs(TINY))
    block = placed.layers[1]
    assert isinstance(block.mlp, Moe)
    assert placed.embed.spec == PartitionSpec("model", None)
    assert placed.norm.spec == PartitionSpec(None)
    assert block.attention.q_b.spec == PartitionSpec("model", None, None)
    assert block.attention.o.spec == PartitionSpec(None, "model", None)
    assert block.attention.kv_a.spec == PartitionSpec(None, None)
    assert block.mlp.gate_up.spec == PartitionSpec(("data", "model"), None, None, None)
    assert block.mlp.router.spec == PartitionSpec(None, None)
    assert block.mlp.shared is not None
    assert block.mlp.shared.down.spec == PartitionSpec(None, "model")


@pytest.mark.parametrize(
    ("change", "data", "model", "message"),
    [
        ({"num_attention_heads": 6}, 2, 4, r"heads = 6 .*4 devices"),
        ({"vocab_size": 50}, 1, 4, r"vocab = 50 .*4 devices"),
        ({"intermediate_size": 42}, 1, 8, r"mlp = 42 .*8 devices"),
        ({"n_routed_experts": 12, "n_group": 4}, 4, 2, r"experts = 12 .*8 devices"),
        ({"moe_intermediate_size": 12}, 1, 8, r"mlp = 12 .*8 devices"),
    ],
)
def test_sizes_that_do_not_divide(change, data, model, message):
    cfg = replace(TINY, **change)
    with pytest.raises(ConfigError, match=message) as caught:
        check_divisible(cfg, make_mesh(data, model))
    assert "choose a mesh" in str(caught.value)
    check_divisible(cfg, make_mesh(1, 1))


def test_axes_must_be_named_data_and_model():
    mesh = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,))
    with pytest.raises(ConfigError, match="mesh axes are"):
        check_divisible(TINY, mesh)


@pytest.mark.rest
def test_a_mesh_of_jax_works_as_ours_does():
    """``jax.make_mesh`` makes Explicit axes, which tracing refuses deep within."""
    theirs, ours = jax.make_mesh((1, 2), ("data", "model"), devices=jax.devices()[:2]), make_mesh(1, 2)
    assert with_auto_axes(theirs) == with_auto_axes(ours) == ours != theirs
    assert backend(mesh=theirs).mesh == ours
    model = load(model_dir("v3"), mesh=theirs)
    assert all(leaf.sharding.mesh == ours for leaf in jax.tree.leaves(model.params))
    tokens, alone = jnp.array([[3, 1, 4, 1, 5]]), load(model_dir("v3"))
    forward = jax.jit(trunk.forward, static_argnums=1)
    got, want = (forward(m.params, m.config, tokens) for m in (model, alone))
    near(got, want, of_model(alone.config, 5))
    assert make_engine(mesh=theirs, max_num_seqs=2).shards == 1
    with pytest.raises(ConfigError, match="mesh axes are"):
        load(model_dir("v3"), mesh=jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]))


def test_slots_must_divide_over_data():
    with pytest.raises(ConfigError, match="max_num_seqs = 6 does not divide over a data axis of 4"):
        make_engine(mesh=make_mesh(4, 2), max_num_seqs=6)
