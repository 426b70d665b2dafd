"""Weights and caches are counted as the model declares them."""

import pytest

from mtp_jax.checkpoint import summarise
from mtp_jax.lab.planning.deployment import Deployment
from mtp_jax.lab.planning.hardware import GPUS
from mtp_jax.lab.planning.memory import memory
from mtp_jax.lab.planning.releases import DEEPSEEK_V3, KNOWN
from mtp_jax.lab.planning.weights import BlockWeights, Storage
from mtp_jax.model.family import config_of, config_of_file
from mtp_jax.model.layer_specs import Moe
from mtp_jax.model.spec import count
from mtp_jax.model.specs import param_specs, parameter_counts
from tests import golden
from tests.lab.planning.releases import FEWER_LAYERS, RELEASES, write
from tests.v4 import v4_config


@pytest.mark.parametrize("variant", [*golden.VARIANTS, None])
def test_blocks_have_every_parameter_of_their_layer(variant):
    v4 = config_of(v4_config())
    specs = param_specs(summarise(golden.model_dir(variant)).config if variant else v4)
    for layer in (*specs.layers, *(p.layer for p in specs.nextn)):
        block = BlockWeights.of(layer)
        parts = sum(w.narrow + w.half + w.single for w in block.parts)
        table = count(layer.mlp.by_token) if isinstance(layer.mlp, Moe) else 0
        assert parts + block.expert * block.experts + table == count(layer)


@pytest.mark.parametrize("name", RELEASES)
@pytest.mark.parametrize("gpus", [pytest.param(1, marks=pytest.mark.rest), 8])
def test_bytes_are_those_of_the_checkpoint_in_memory(tmp_path, name, gpus):
    """On one GPU, and on each of those that divide heads, width, vocabulary and experts."""
    model = write(tmp_path, name, **FEWER_LAYERS.get(name, {}))
    summary = summarise(model, devices=gpus)
    cfg = config_of_file(model / "config.json")
    drafts = int(cfg.num_nextn_predict_layers > 0)
    d = Deployment(cfg, Storage.of(cfg), GPUS["h200"], data=1, model=gpus, depth=drafts)
    found = memory(d)
    narrow = next((k for k in summary.weight_bytes if k not in ("float32", "bfloat16")), "bfloat16")
    # Scales of blocks that are cut off are counted by their share.
    assert found.of.taken == pytest.approx(summary.weight_bytes_per_device[narrow], rel=1e-6)
    assert found.per_token == summary.cache_bytes_per_token["bfloat16"]


def test_deepseek_v3_is_as_large_as_published():
    trunk, _, nextn = parameter_counts(DEEPSEEK_V3)
    assert round(trunk / 1e9) == 671
    assert (
        round((nextn + 2 * DEEPSEEK_V3.vocab_size * DEEPSEEK_V3.hidden_size) / 1e9) == 13
    )  # with its tables
    d = Deployment(DEEPSEEK_V3, Storage.of(DEEPSEEK_V3), GPUS["h200"], data=1, depth=1)
    one, kept = memory(d), 1 + 4 / 128**2
    # In memory kv_b of 62 layers and the tables are in 16 bits, the routers of 59 in 32.
    wide = 62 * 128 * 256 * 512 + 2 * 129280 * 7168 + 2 * 7168**2
    routers = 59 * 256 * 7168
    assert one.of.taken == pytest.approx(
        (trunk + nextn - wide - routers) * kept + 2 * wide + 4 * routers, rel=1e-5
    )


@pytest.mark.parametrize("name", [name for name in RELEASES if "V4" not in name])
def test_cached_tokens_take_the_bytes_of_their_rows(name):
    cfg = config_of(RELEASES[name])
    indexed = [i for i in range(cfg.num_hidden_layers) if cfg.indexes(i)]
    d = Deployment(cfg, Storage.of(cfg), GPUS["h200"], data=1, cache="fp8")
    keys = len(indexed) * (128 + 4)
    assert d.cache_bytes == cfg.num_hidden_layers * cfg.row.fp8_bytes + keys
    expected = {"DeepSeek-V3": 61 * 656, "DeepSeek-V3.2": 61 * (656 + 132), "GLM-4.5": 92 * (2048 + 64)}
    assert d.cache_bytes == expected.get(name, d.cache_bytes)
    assert len(indexed) == {"DeepSeek-V3.2": 61, "GLM-5.2": 21}.get(name, 0)


def test_a_slot_of_v4_takes_memory_beside_its_tokens():
    """Rows of 127 tokens and a window's drafts; inputs, in float32, of 7 at ratio 4 and of 127 at 128."""
    cfg, depth = KNOWN["deepseek-v4-flash"], 3
    d = Deployment(cfg, Storage.of(cfg), GPUS["h200"], data=4, depth=depth, context=1000)
    found = memory(d)
    inputs = 21 * (7 + depth) * 4 * (512 + 128) + 20 * (127 + depth) * 2 * 512
    assert found.per_slot == 43 * (127 + depth) * 512 * 2 + 4 * inputs
    assert found.requests == found.of.bytes // (1000 * found.per_token + found.per_slot) * 4
    taken = 10 * found.per_slot
    assert found.beside(10) == (found.of.bytes - taken) // found.per_token < found.tokens / 4
