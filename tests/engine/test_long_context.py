"""What a window costs over a long history, with sparse attention and without."""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import quantiles
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mtp_jax.decode.keys import SamplingMode, StepKey
from mtp_jax.lab.bench import cost
from mtp_jax.lab.bench.synthetic import preset
from mtp_jax.model import trunk
from mtp_jax.model.backend import Backend, backend
from mtp_jax.model.cache import LayerCache, PagedView
from mtp_jax.model.config import IndexerConfig, ModelConfig
from mtp_jax.model.device import compiler_options
from mtp_jax.model.params import init_params
from mtp_jax.model.visible import chain
from tests.engine.operations import operations

PAGE, WINDOW = 64, 4


def config(layers: int, topk: int) -> ModelConfig:
    """The synthetic model of `mtp_jax.lab.bench`, with an indexer of DeepSeek-V3.2's proportions."""
    index = IndexerConfig(heads=8, dim=64, topk=topk, shared=(False,) * layers)
    dense = replace(preset("dense").config, num_nextn_predict_layers=0, nextn_moe=())
    return replace(dense, num_hidden_layers=layers, first_k_dense_replace=layers, indexer=index)


def window(cfg: ModelConfig, entries: int, on: Backend) -> tuple[Any, Callable[[], tuple[Any, ...]]]:
    """The trunk over the last tokens of one slot with cached entries, and a function of its arguments."""

    def make() -> tuple[Any, ...]:
        keys = iter(jax.random.split(jax.random.key(0), 2 * cfg.num_hidden_layers + 1))
        shape, index = (entries // PAGE + 1, PAGE), cfg.indexer
        assert index is not None
        widths = cfg.row.width, index.dim
        pages = tuple(
            LayerCache(*(jax.random.normal(next(keys), (*shape, width)) for width in widths))
            for _ in range(cfg.num_hidden_layers)
        )
        return init_params(cfg, next(keys), "float32"), pages

    table, start = jnp.arange(entries // PAGE)[None], jnp.asarray([entries - WINDOW])
    tokens, positions = jnp.arange(WINDOW)[None], start[:, None] + jnp.arange(WINDOW)

    def run(params: Any, pages: Any) -> Any:
        view = PagedView(table, positions, chain(start, WINDOW))
        return trunk.run(params, trunk.Model(cfg, on), tokens, positions, pages, (view,)).hidden

    return run, make


def predicted(cfg: ModelConfig, entries: int, params: Any) -> float:
    """Operations of the trunk over a window, as `mtp-jax profile` counts them."""
    key = StepKey(0, 0, entries // PAGE, SamplingMode(), WINDOW, 1)  # and one row of the head
    return cost.of_launch(key, cfg, params, PAGE, "float32", 1).flops - 2 * cost.of_head(params).always / 4


def factor(layers: int, topk: int, entries: int) -> tuple[float, float]:
    """Of forced dense attention over selection: (operations counted, as predicted)."""
    counts, expected = [], []
    for k in (entries, topk):
        cfg = config(layers, k)
        run, make = window(cfg, entries, backend("xla"))
        given = jax.eval_shape(make)
        counts.append(operations(run, *given))
        expected.append(predicted(cfg, entries, given[0]))
        assert counts[-1] == pytest.approx(expected[-1], rel=0.2)
    return counts[0] / counts[1], expected[0] / expected[1]


@pytest.mark.rest
def test_selection_computes_as_much_less_as_predicted():
    counted, expected = factor(layers=2, topk=64, entries=2048)
    assert counted == pytest.approx(expected, rel=0.2)
    assert counted > 1.5


@pytest.mark.slow
def test_a_window_over_8192_tokens(capsys: pytest.CaptureFixture[str]):
    """24 layers, 256 entries for each token. The operations are held to; the time is reported."""
    counted, expected = factor(layers=24, topk=256, entries=8192)
    assert counted == pytest.approx(expected, rel=0.2)
    compiled: dict[str, Any] = {}
    for name, topk in (("dense", 8192), ("selection", 256), ("dense again", 8192)):
        run, make = window(config(24, topk), 8192, backend())
        given = make()
        compiled[name] = jax.jit(run).lower(*given).compile(compiler_options()), given
    spent: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(10):
        for name, (run, given) in compiled.items():
            began = time.perf_counter()
            jax.block_until_ready(run(*given))
            spent[name].append(time.perf_counter() - began)
    with capsys.disabled():
        print(f"\noperations: dense over selection {counted:.2f}, predicted {expected:.2f}")
        for name, seconds in spent.items():
            low, middle, high = (1e3 * t for t in quantiles(seconds[1:], n=4))
            print(f"{name}: {middle:.1f} ms ({low:.1f} to {high:.1f})")
