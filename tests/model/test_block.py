"""Heads that draft blocks against the oracle, without an engine: taps, context, block, choice of drafts."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.checkpoint import Loaded, load
from mtp_jax.errors import ConfigError
from mtp_jax.model import trunk
from mtp_jax.model.attention import kind
from mtp_jax.model.backend import Backend, mosaic_gpu, xla
from mtp_jax.model.block import Blocks
from mtp_jax.model.cache import empty_cache
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.head_specs import BlockHead
from mtp_jax.model.narrow import Bf16
from mtp_jax.model.params import Params
from tests.golden import BLOCKS, expected, model_dir

ON = xla(experts="dense")
SIZE = 16


@cache
def loaded(variant: str) -> Loaded:
    return load(model_dir(variant), model_dir(variant, "draft"), dtype="float32")


@cache
def forward(variant: str) -> dict[str, Any]:
    """A block after the oracle's prompt, drafted greedily."""
    found, want = loaded(variant), expected(variant)
    params, module = found.params, Blocks(found.config)
    ids = jnp.asarray(want["input_ids"])[None]
    traced = trunk.forward_traced(params, found.config, ids, ON, module.head.taps)
    taps = [traced.taps[number] for number in module.head.taps]
    length, newest = jnp.asarray([ids.shape[1]]), jnp.asarray([int(want["block_in_ids"][0])])
    table, cfg = jnp.arange(4)[None], module.head.layers
    layers = range(cfg.num_hidden_layers)
    empty = tuple(empty_cache(5, SIZE, cfg, i, jnp.float32, fp8=False) for i in layers)
    context = module.context(params, ON, taps)
    caches = module.write(params, ON, context, jnp.arange(ids.shape[1])[None], table, empty)
    x = module.run(params, ON, newest, module.seen(length, jnp.asarray([True])), table, caches)
    z, first = module.normed(params, x), 0 if module.head.anchored else 1
    logits, drafts, by, sure = module.logits(params, ON, z), [newest], [], []
    for k in range(module.head.most_drafts):
        row, states = logits[:, first + k], z[:, first + k]
        by.append(module.after(params, states, row, drafts[-1]))
        if module.head.confidence:
            sure.append(float(module.confidence(params, x[:, first + k], drafts[-1])[0]))
        drafts.append(jnp.argmax(by[-1], axis=-1))
    return {
        "aux": jnp.concatenate(taps, axis=-1)[0],
        "context": context[0],
        "prenorm": x[0],
        "hidden": z[0],
        "logits": logits[0],
        "draft_logits": jnp.concatenate(by),
        "drafts": [int(d[0]) for d in drafts[1:]],
        "confidence": sure,
    }


@pytest.mark.parametrize("variant", BLOCKS)
def test_the_head_computes_what_the_oracle_does(variant: str):
    got, want = forward(variant), expected(variant)
    for name in ("aux", "context", "prenorm", "hidden", "logits"):
        np.testing.assert_allclose(got[name], want[f"block_{name}"], rtol=0, atol=2e-4)
    assert got["drafts"] == want["draft_ids"].tolist()
    np.testing.assert_allclose(got["draft_logits"], want["draft_logits"], rtol=0, atol=2e-4)


def test_the_bias_and_the_confidence_of_dspark():
    got, want = forward("dspark"), expected("dspark")
    bias = got["draft_logits"] - got["logits"]
    np.testing.assert_allclose(bias, want["markov_bias"], rtol=0, atol=2e-4)
    np.testing.assert_allclose(got["confidence"], want["confidence"], rtol=0, atol=1e-5)


def test_the_candidates_of_dflash2():
    got, want = np.asarray(forward("dflash2")["draft_logits"]), expected("dflash2")
    for row, ids, scores in zip(got, want["candidate_ids"], want["candidate_scores"], strict=True):
        assert set(np.flatnonzero(np.isfinite(row))) == set(ids.tolist())
        np.testing.assert_allclose(row[ids], scores, rtol=0, atol=2e-4)


def test_rows_see_later_rows_of_their_block(monkeypatch: pytest.MonkeyPatch):
    """A block in which they do not is another one: the oracle's negative control."""

    class Causal(kind.Whole):
        def __init__(self, rows: jax.Array, mask: jax.Array, *rest: Any) -> None:
            width = mask.shape[1]
            own = mask[:, :, -width:] & jnp.tri(width, dtype=bool)
            super().__init__(rows, jnp.concatenate([mask[:, :, :-width], own], axis=2))

    want = expected("dflash")["block_logits"]
    monkeypatch.setattr(kind, "Whole", Causal)
    forward.cache_clear()
    causal = np.asarray(forward("dflash")["logits"])
    forward.cache_clear()
    assert np.abs(causal - want).max() > 1


@pytest.mark.parametrize("variant", ["dflash", "dspark"])
def test_a_part_of_the_vocabulary(variant: str):
    """The whole head's logits of the tokens that a reduced head drafts, each at its id; -inf elsewhere."""
    found, whole, want = loaded(variant), forward(variant), expected(variant)
    own, head = found.params.drafter, Blocks(found.config).head
    assert isinstance(own, BlockHead)
    ids = np.flatnonzero(np.arange(found.config.vocab_size) % 4)
    markov = own.markov and replace(own.markov, following=own.markov.following[ids])
    part = replace(own, head=found.params.table[ids], target_offset=ids - np.arange(len(ids)), markov=markov)
    sizes = replace(head.layers, vocab_size=len(ids))
    module = Blocks(replace(found.config, drafter=replace(head, layers=sizes, maps=True, heads=True)))
    params, first = replace(found.params, drafter=part), 0 if head.anchored else 1
    z = whole["hidden"][first : first + head.most_drafts]
    previous = jnp.asarray([want["block_in_ids"][0], *whole["drafts"][:-1]])
    got = np.asarray(module.after(params, z, module.logits(params, ON, z), previous))
    np.testing.assert_allclose(got[:, ids], want["draft_logits"][:, ids], rtol=0, atol=2e-4)
    assert np.isneginf(np.delete(got, ids, axis=1)).all()


def first_block(params: Params, cfg: ModelConfig, on: Backend) -> jax.Array:
    """Rows of a block before which nothing is cached."""
    layers = Blocks(cfg).head.layers
    caches = tuple(
        empty_cache(5, SIZE, layers, i, jnp.float32, fp8=False) for i in range(layers.num_hidden_layers)
    )
    one = jnp.asarray([3])
    module = Blocks(cfg)
    return module.run(params, on, one, module.seen(0 * one, one > 0), jnp.arange(4)[None], caches)


def test_an_embedding_of_its_own():
    cfg, params = loaded("dflash").config, loaded("dflash").params
    assert isinstance(params.drafter, BlockHead)
    own = replace(params, embed=0 * params.embed, drafter=replace(params.drafter, embed=params.embed))
    np.testing.assert_array_equal(first_block(own, cfg, ON), first_block(params, cfg, ON))


def test_kernels_that_must_attend_refuse_it():
    cfg, params = loaded("dflash").config, loaded("dflash").params
    with pytest.raises(ConfigError, match="grouped-query attention has no kernel; take kernels=auto"):
        first_block(params, cfg, mosaic_gpu(strict=True))
    got = first_block(params, cfg, mosaic_gpu())
    np.testing.assert_allclose(got, first_block(params, cfg, ON), rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", ["dflash2", "dspark"])
def test_tables_that_stay_narrow_choose_the_same_drafts(variant: str):
    """A head stored in bfloat16, on a CPU that computes in float32."""
    found = loaded(variant)
    module, head = Blocks(found.config), found.params.drafter
    assert isinstance(head, BlockHead)
    parts = {"markov": head.markov, "selector": head.selector, "confidence": head.confidence}

    def stored(narrow: bool) -> Params:
        def one(a: jax.Array) -> Any:
            rounded = a.astype(jnp.bfloat16)
            return Bf16(rounded) if narrow and a.ndim == 2 else rounded.astype(jnp.float32)

        return replace(found.params, drafter=replace(head, **jax.tree.map(one, parts)))

    z = jax.random.normal(jax.random.key(0), (3, module.head.layers.hidden_size))
    logits, previous = jax.random.normal(jax.random.key(1), (3, 80)), jnp.asarray([1, 5, 7])
    narrow, wide = (module.after(stored(kept), z, logits, previous) for kept in (True, False))
    np.testing.assert_allclose(narrow, wide, atol=1e-5)
    if module.head.confidence:
        narrow, wide = (module.confidence(stored(kept), z, previous) for kept in (True, False))
        np.testing.assert_allclose(narrow, wide, atol=1e-6)
