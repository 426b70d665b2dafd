"""The bytes that a configuration computes of its cache are the bytes of a real state."""

import jax
import pytest

from mtp_jax.checkpoint import summarise
from mtp_jax.decode.bookkeeping import abstract_state, bytes_per_page
from mtp_jax.decode.state import StateShape
from mtp_jax.heads.build import build
from mtp_jax.model.backend import xla_cpu
from mtp_jax.model.family import config_of
from mtp_jax.model.trunk import Model
from tests.lab.planning.releases import write
from tests.models import TINY
from tests.v4 import v4_config


def size(tree) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize(("v4", "page"), [(True, 128), (True, 512), (False, 16)])
def test_bytes_of_a_token_and_of_a_slot_are_those_of_a_state(dtype, v4, page):
    """Layers of every ratio and an MTP layer; without the hidden states at the end of a page."""
    cfg = config_of(v4_config()) if v4 else TINY
    pages, slots, widest = 5, 3, 4
    kind = {"dtype": "float32" if dtype == "fp8" else dtype, "fp8": dtype == "fp8"}
    shape = StateShape(slots, pages, page, 2, window=widest, **kind)
    state = abstract_state(Model(cfg, xla_cpu()), build(cfg), shape)
    layers = range(cfg.num_hidden_layers + cfg.num_nextn_predict_layers)
    hidden = size(state.drafter.pages.boundary) / (pages + 1)
    assert (
        bytes_per_page(state)
        == page * sum(cfg.attention.token_bytes(i, dtype, page) for i in layers) + hidden
    )
    *_, caches = state.in_slots
    assert size(caches) == slots * sum(cfg.attention.slot_bytes(i, dtype, widest) for i in layers)
    assert (size(caches) > 0) is v4


@pytest.mark.rest
def test_info_counts_the_cache_of_v4_flash(tmp_path):
    """Rows of 43 layers' windows and of MTP; entries of 20 and of 21 layers, with index keys; inputs."""
    window, mtp, entries, keys = 43 * 128 * 1024, 1024, 21 * 1024 // 4 + 20 * 1024 // 128, 21 * 256 // 4
    inputs = 21 * 4 * 2 * (512 + 128) * 4
    summary = summarise(write(tmp_path, "DeepSeek-V4-Flash"))
    found = summary.cache_bytes_per_token
    assert found["bfloat16"] == (window + inputs) // 128 + mtp + entries + keys == 55_296
    assert found["float32"] == 2 * (window // 128 + mtp + entries + keys) + inputs // 128
    assert found["fp8"] < 0.65 * found["bfloat16"]
    (line,) = [line for line in summary.text().splitlines() if line.startswith("cache per token")]
    assert line.endswith("55,296 B as bfloat16, 33,895 B as fp8, in pages of 128 tokens")

    def per_token(page: int) -> float:
        return sum(summary.config.attention.token_bytes(i, "bfloat16", page) for i in range(44))

    assert [per_token(page) for page in (128, 512, 2048)] == [55_296, 19_752, 10_866]
