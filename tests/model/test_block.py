"""Heads that draft blocks against the oracle, without an engine: taps, context, block, choice of drafts."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.checkpoint import Loaded, load
from mtp_jax.model import block, trunk
from mtp_jax.model.backend import xla
from mtp_jax.model.block import Blocks
from mtp_jax.model.cache import empty_cache
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
    x = module.run(params, ON, newest, length, jnp.asarray([True]), table, caches)
    z, first = module.normed(params, x), 0 if module.head.anchored else 1
    logits, drafts, by, sure = module.logits(params, ON, z), [newest], [], []
    for k in range(module.head.most_drafts):
        row, states = logits[:, first + k], z[:, first + k]
        by.append(module.after(params, states, row, drafts[-1]))
        if module.head.confidence:
            sure.append(float(module.confidence(params, states, drafts[-1])[0]))
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

    class Causal(block.Whole):
        def __init__(self, rows: jax.Array, mask: jax.Array) -> None:
            width = mask.shape[1]
            own = mask[:, :, -width:] & jnp.tri(width, dtype=bool)
            super().__init__(rows, jnp.concatenate([mask[:, :, :-width], own], axis=2))

    want = expected("dflash")["block_logits"]
    monkeypatch.setattr(block, "Whole", Causal)
    forward.cache_clear()
    causal = np.asarray(forward("dflash")["logits"])
    forward.cache_clear()
    assert np.abs(causal - want).max() > 1
