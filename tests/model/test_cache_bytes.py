"""Bytes that are computed of a cache are those that a state has."""

import jax
import pytest

from mtp_jax.checkpoint import summarise
from mtp_jax.decode.bookkeeping import abstract_state, bytes_per_page
from mtp_jax.decode.drafter.build import build
from mtp_jax.decode.state import StateShape
from mtp_jax.model.backend import xla_cpu
from mtp_jax.model.cache_bytes import slot_bytes, token_bytes
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.trunk import Model
from tests.models import TINY
from tests.planning.releases import write
from tests.v4 import v4_config


def size(tree) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("v4", [True, False], ids=["v4", "v3"])
def test_bytes_of_a_token_and_of_a_slot_are_those_of_a_state(dtype, v4):
    """Layers of every ratio and an MTP layer; without the hidden states at the end of a page."""
    cfg = ModelConfig.from_dict(v4_config()) if v4 else TINY
    pages, page, slots, window = 5, 128, 3, 4
    kind = {"dtype": "float32" if dtype == "fp8" else dtype, "fp8": dtype == "fp8"}
    shape = StateShape(slots, pages, page, 2, window=window, **kind)
    state = abstract_state(Model(cfg, xla_cpu()), build(cfg), shape)
    layers = range(cfg.num_hidden_layers + cfg.num_nextn_predict_layers)
    hidden = size(state.drafter.pages.boundary) / (pages + 1)
    assert bytes_per_page(state) == page * sum(token_bytes(cfg, i, dtype) for i in layers) + hidden
    *_, recent = state.in_slots
    assert size(recent) == slots * sum(slot_bytes(cfg, i, window) for i in layers)
    assert (size(recent) > 0) is v4


def test_info_counts_the_cache_of_v4_flash(tmp_path):
    """Rows of 43 layers and MTP; entries of 20 and of 21 layers, with index keys; 20 kB at a page's end."""
    rows, entries, keys = 44 * 512 * 2, 21 * 1024 // 4 + 20 * 1024 // 128, 21 * 256 // 4
    boundary = 21 * 4 * 2 * (512 + 128) * 4 // 128
    found = summarise(write(tmp_path, "DeepSeek-V4-Flash")).cache_bytes_per_token
    assert (rows, entries, keys, boundary) == (45_056, 5_536, 1_344, 3_360)
    assert found["bfloat16"] == rows + entries + keys + boundary == 55_296
    assert found["float32"] == 2 * (rows + entries + keys) + boundary
    assert found["fp8"] < 0.65 * found["bfloat16"]
