"""Heads that draft blocks against the oracle, without an engine: taps, context, block, choice of drafts."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.checkpoint import Loaded, load
from mtp_jax.errors import ConfigError
from mtp_jax.heads.blocks.declared import BlockHead
from mtp_jax.heads.blocks.drafts import Blocks
from mtp_jax.model import trunk
from mtp_jax.model.attention import place
from mtp_jax.model.backend import Backend, mosaic_gpu, xla
from mtp_jax.model.cache import empty_cache
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.narrow import Bf16
from mtp_jax.model.params import Params
from tests.golden import BLOCKS, expected, model_dir
from tests.rounding import near, of_model

ON = xla(experts="dense")
SIZE = 16


@cache
def loaded(variant: str) -> Loaded:
    return load(model_dir(variant), model_dir(variant, "draft"), dtype="float32")


@partial(jax.jit, static_argnames="cfg")
def streams(params: Params, cfg: ModelConfig, ids: jax.Array) -> trunk.Taps:
    """The trunk's residual streams; trunks of one form share a program."""
    return trunk.forward_traced(params, cfg, ids, ON, range(cfg.num_hidden_layers + 1)).taps


@cache
def forward(variant: str) -> dict[str, Any]:
    """A block after the oracle's prompt, drafted greedily."""
    found, want = loaded(variant), expected(variant)
    module, table, cfg = Blocks(found.config), jnp.arange(4)[None], Blocks(found.config).head.layers
    layers, ids = range(cfg.num_hidden_layers), want["input_ids"][None]
    plain = replace(found.params, drafter=None), replace(found.config, drafter=None)
    found_streams = streams(*plain, ids)

    @jax.jit
    def run(params: Params, taps: list[jax.Array], newest: jax.Array) -> dict[str, Any]:
        length, first = jnp.asarray([ids.shape[1]]), 0 if module.head.anchored else 1
        empty = tuple(empty_cache(5, SIZE, cfg, i, jnp.float32, fp8=False) for i in layers)
        context = module.context(params, ON, taps)
        caches = module.write(params, ON, context, jnp.arange(ids.shape[1])[None], table, empty)
        x = module.run(params, ON, newest, module.seen(length, jnp.asarray([True])), table, caches)
        z = module.normed(params, x)
        logits, drafts, by = module.logits(params, ON, z), [newest], []
        for k in range(module.head.most_drafts):
            row, states = logits[:, first + k], z[:, first + k]
            by.append(module.after(params, states, row, drafts[-1]))
            drafts.append(jnp.argmax(by[-1], axis=-1))
        return {
            "aux": jnp.concatenate(taps, axis=-1)[0],
            "context": context[0],
            "prenorm": x[0],
            "hidden": z[0],
            "logits": logits[0],
            "draft_logits": jnp.concatenate(by),
            "drafts": jnp.concatenate(drafts[1:]),
        }

    taps = [found_streams[number] for number in module.head.taps]
    return jax.device_get(run(found.params, taps, want["block_in_ids"][:1]))


def terms(variant: str) -> int:
    """Roundings of the trunk and its head."""
    return of_model(loaded(variant).config, len(expected(variant)["input_ids"]))


@pytest.mark.parametrize("variant", BLOCKS)
def test_the_head_computes_what_the_oracle_does(variant: str):
    got, want = forward(variant), expected(variant)
    for name in ("aux", "context", "prenorm", "hidden", "logits"):
        near(got[name], want[f"block_{name}"], terms(variant), name=name)
    assert got["drafts"].tolist() == want["draft_ids"].tolist()
    near(got["draft_logits"], want["draft_logits"], terms(variant))


def test_the_bias_of_dspark():
    got, want = forward("dspark"), expected("dspark")
    bias = got["draft_logits"] - got["logits"]
    near(bias, want["markov_bias"], terms("dspark"), size=np.abs(got["draft_logits"]).max())


def test_the_candidates_of_dflash2():
    got, want = forward("dflash2")["draft_logits"], expected("dflash2")
    for row, ids, scores in zip(got, want["candidate_ids"], want["candidate_scores"], strict=True):
        assert set(np.flatnonzero(np.isfinite(row))) == set(ids.tolist())
        near(row[ids], scores, terms("dflash2"))


@pytest.mark.rest
def test_rows_see_later_rows_of_their_block(monkeypatch: pytest.MonkeyPatch):
    """A block in which they do not is another one: the oracle's negative control."""

    class Causal(place.Whole):
        def __init__(self, rows: jax.Array, mask: jax.Array, *rest: Any) -> None:
            width = mask.shape[1]
            own = mask[:, :, -width:] & jnp.tri(width, dtype=bool)
            super().__init__(rows, jnp.concatenate([mask[:, :, :-width], own], axis=2))

    want = expected("dflash")["block_logits"]
    monkeypatch.setattr(place, "Whole", Causal)
    forward.cache_clear()
    causal = forward("dflash")["logits"]
    forward.cache_clear()
    assert np.abs(causal - want).max() > 1


@pytest.mark.parametrize("variant", ["dflash", pytest.param("dspark", marks=pytest.mark.rest)])
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
    z = jnp.asarray(whole["hidden"][first : first + head.most_drafts])
    previous = jnp.asarray([want["block_in_ids"][0], *whole["drafts"][:-1]])
    got = np.asarray(jax.jit(lambda p: module.after(p, z, module.logits(p, ON, z), previous))(params))
    near(got[:, ids], want["draft_logits"][:, ids], terms(variant))
    assert np.isneginf(np.delete(got, ids, axis=1)).all()


@partial(jax.jit, static_argnames=("cfg", "on"))
def first_block(params: Params, cfg: ModelConfig, on: Backend) -> jax.Array:
    """Rows of a block before which nothing is cached."""
    layers = Blocks(cfg).head.layers
    caches = tuple(
        empty_cache(5, SIZE, layers, i, jnp.float32, fp8=False) for i in range(layers.num_hidden_layers)
    )
    one = jnp.asarray([3])
    module = Blocks(cfg)
    return module.run(params, on, one, module.seen(0 * one, one > 0), jnp.arange(4)[None], caches)


@pytest.mark.rest
def test_an_embedding_of_its_own():
    cfg, params = loaded("dflash").config, loaded("dflash").params
    assert isinstance(params.drafter, BlockHead)
    own = replace(params, embed=0 * params.embed, drafter=replace(params.drafter, embed=params.embed))
    np.testing.assert_array_equal(first_block(own, cfg, ON), first_block(params, cfg, ON))


@pytest.mark.rest
def test_kernels_that_must_attend_refuse_it():
    cfg, params = loaded("dflash").config, loaded("dflash").params
    with pytest.raises(ConfigError, match="grouped-query attention has no kernel; take kernels=auto"):
        first_block(params, cfg, mosaic_gpu(strict=True))
    got = first_block(params, cfg, mosaic_gpu())
    near(got, first_block(params, cfg, ON), of_model(cfg, SIZE))


@pytest.mark.rest
@pytest.mark.parametrize("variant", ["dflash2", "dspark"])
def test_tables_that_stay_narrow_choose_the_same_drafts(variant: str, rng: np.random.Generator):
    """A head stored in bfloat16, on a CPU that computes in float32."""
    found = loaded(variant)
    module, head = Blocks(found.config), found.params.drafter
    assert isinstance(head, BlockHead)
    parts = {"markov": head.markov, "selector": head.selector}

    def stored(narrow: bool) -> Params:
        def one(a: jax.Array) -> Any:
            rounded = np.asarray(a).astype(jnp.bfloat16)
            return Bf16(jnp.asarray(rounded)) if narrow and a.ndim == 2 else rounded.astype(np.float32)

        return replace(found.params, drafter=replace(head, **jax.tree.map(one, parts)))

    width = module.head.layers.hidden_size
    z, logits = (jnp.asarray(rng.normal(size=(3, n)).astype(np.float32)) for n in (width, 80))
    previous = jnp.asarray([1, 5, 7])

    choose = jax.jit(module.after)
    narrow, wide = (choose(stored(kept), z, logits, previous) for kept in (True, False))
    # Sums over the hidden states, at most, and over the rank of what is added.
    near(narrow, wide, 2 * width)
