"""DSpark stages of DeepSeek-V4 against their formulas in float64: contexts, blocks, drafts."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.checkpoint import load
from mtp_jax.errors import ConfigError
from mtp_jax.heads.blocks.declared import BlockHead
from mtp_jax.heads.stages.drafts import Stages
from mtp_jax.model.backend import Backend, mosaic_gpu, xla, xla_cpu
from mtp_jax.model.cache import empty_cache
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.narrow import is_narrow
from mtp_jax.model.params import Params
from tests import v4, v4_stages
from tests.rounding import near, of_model

DENSE = xla(experts="dense")
CONFIG = v4.v4_config(**v4.DSPARK | {"n_mtp_layers": 2})
WINDOW, SIZE = CONFIG["sliding_window"], 8
# Contexts of a slot: none, fewer than the window, and more.
LENGTHS = (0, 3, WINDOW, 2 * WINDOW + 5)
NEWEST = (5, 11, 2, 40)


def taps(length: int) -> np.ndarray:
    width = len(CONFIG["dspark_target_layer_ids"]) * CONFIG["hidden_size"]
    return np.random.default_rng(length).normal(size=(length, width)).astype(np.float32)


def blocks(params: Params, cfg: ModelConfig, on: Backend, broken: int = 0) -> tuple[Any, ...]:
    """Contexts, rows before the final norm and logits of all slots; one more slot is idle, its page broken.

    broken: rows of NaN behind each slot's contexts.
    """
    module, longest, slots = Stages(cfg), max(LENGTHS) + SIZE, len(LENGTHS)
    given = np.full((slots, longest, taps(1).shape[1]), np.nan, np.float32)
    at = np.full((slots, longest), -1)
    for slot, length in enumerate(LENGTHS):
        given[slot, :length] = taps(length)
        at[slot, : length + broken] = np.arange(length + broken)
    pages = -(-longest // SIZE)
    table = jnp.asarray(np.random.default_rng(0).permutation(slots * pages).reshape(slots, pages))
    sizes, count = module.head.layers, slots * pages + 1
    layers = range(sizes.num_hidden_layers)

    @jax.jit
    def run(params: Params, given: jax.Array) -> tuple[jax.Array, ...]:
        caches = tuple(empty_cache(count, SIZE, sizes, i, jnp.float32) for i in layers)
        context = module.context(params, on, jnp.split(given, len(module.head.taps), axis=-1))
        caches = module.write(params, on, context, jnp.asarray(at), table, caches)
        idle = jnp.full((1, pages), count - 1)
        seen = module.seen(jnp.asarray([*LENGTHS, 9]), jnp.asarray([True] * slots + [False]))
        tokens = jnp.asarray([*NEWEST, 1])
        rows = module.run(params, on, tokens, seen, jnp.concatenate([table, idle]), caches)
        return context, rows, module.logits(params, on, module.normed(params, rows))

    return jax.device_get(run(params, given))


def terms(cfg: ModelConfig) -> int:
    """Roundings of the stages, which follow the trunk's numbers that are given."""
    return of_model(cfg, max(LENGTHS))


@pytest.mark.parametrize(
    "on",
    [
        pytest.param(DENSE, id="dense"),
        pytest.param(xla(), id="sparse", marks=pytest.mark.slow),
        pytest.param(xla_cpu(), id="cpu", marks=pytest.mark.slow),
        pytest.param(mosaic_gpu(kernels=frozenset()), id="no kernels", marks=pytest.mark.slow),
    ],
)
def test_contexts_and_blocks_are_the_formulas(on: Backend):
    tensors = v4.v4_tensors(CONFIG)
    found, plain = v4.loaded(CONFIG, tensors), v4_stages.Stages(CONFIG, tensors)
    module, (context, rows, logits) = Stages(found.config), blocks(found.params, found.config, on, broken=3)
    params, n = found.params, terms(found.config)

    choosing = jax.jit(module.after)
    assert module.head.taps == (2, 3, 4)
    for slot, (length, newest) in enumerate(zip(LENGTHS, NEWEST, strict=True)):
        before = plain.context(taps(length))
        near(context[slot, :length], before, n)
        near(rows[slot], plain.block(newest, before), n)
        drafts, chosen_by = plain.drafts(newest, before)
        previous = np.array([newest, *drafts[:-1]])
        got = jax.device_get(choosing(params, rows[slot], logits[slot], previous))
        near(got, chosen_by, n)
        assert np.argmax(got, axis=-1).tolist() == drafts
    assert np.isfinite(rows).all()


def test_rows_behind_the_window_and_of_other_layers_make_other_blocks():
    """The comparison above would see them."""
    plain = v4_stages.Stages(CONFIG, v4.v4_tensors(CONFIG))
    wider = v4_stages.Stages(CONFIG | {"sliding_window": WINDOW + 1}, plain.w)
    context = plain.context(taps(LENGTHS[-1]))
    assert np.abs(wider.block(5, context) - plain.block(5, context)).max() > 0.01


@pytest.mark.rest
def test_narrow_weights_are_used_as_they_are(tmp_path: Path):
    held = v4.write_v4(tmp_path, CONFIG, v4.v4_tensors(CONFIG), fp4=True)
    found, plain = load(tmp_path, dtype="float32", narrow="keep"), v4_stages.Stages(CONFIG, held)
    assert isinstance(found.params.drafter, BlockHead)
    assert is_narrow(found.params.drafter.fuse)
    _, rows, _ = blocks(found.params, found.config, DENSE)
    want = plain.block(NEWEST[-1], plain.context(taps(LENGTHS[-1])))
    near(rows[len(LENGTHS) - 1], want, terms(found.config))


def test_kernels_that_must_attend_refuse_them():
    found = v4.loaded(CONFIG, v4.v4_tensors(CONFIG))
    with pytest.raises(ConfigError, match="compressed attention has no kernel; take kernels=auto"):
        blocks(found.params, found.config, mosaic_gpu(strict=True))
