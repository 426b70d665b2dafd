"""EAGLE-3 heads against the oracle, without an engine: taps, their fusion, the layer, recursion."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.model.config import ModelConfig
from mtp_jax.model.head_config import Eagle3Config
from mtp_jax.model.head_specs import Eagle3
from mtp_jax.model.params import Params, init_params
from tests.eagle3 import forward, loaded, of_head
from tests.golden import EAGLES, expected


def close(got: Any, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("variant", EAGLES)
def test_the_head_computes_what_the_oracle_does(variant: str):
    found, want = loaded(variant), expected(variant)
    head, params = found.config.drafter, found.params
    assert isinstance(head, Eagle3Config)
    assert head.taps == tuple(want["eagle_capture"])
    got = forward(params, found.config, want["input_ids"], want["eagle_in_ids"])
    close(got["aux"], want["eagle_aux"])
    close(got["fc"], want["eagle_fc"])
    close(got["fed_back"], want["eagle_hidden" if head.normed_output else "eagle_prenorm"])
    close(of_head(params, got["logits"]), want["eagle_logits"])
    assert got["draft_ids"].tolist() == want["draft_rec_ids"].tolist()
    close(of_head(params, got["draft_logits"]), want["draft_rec_logits"])


@pytest.mark.parametrize("variant", EAGLES)
def test_the_other_state_fed_back_gives_other_drafts(variant: str):
    """The oracle's negative control: before the norm instead of after it, and the other way about."""
    found, want = loaded(variant), expected(variant)
    head = found.config.drafter
    assert isinstance(head, Eagle3Config)
    other = replace(found.config, drafter=replace(head, normed_output=not head.normed_output))
    got = forward(found.params, other, want["input_ids"], want["eagle_in_ids"])
    close(got["fed_back"], want["eagle_prenorm" if head.normed_output else "eagle_hidden"])
    close(of_head(found.params, got["logits"]), want["eagle_logits"])
    assert got["draft_ids"].tolist() == want["draft_rec_wrong_recycle_ids"].tolist()
    close(of_head(found.params, got["draft_logits"]), want["draft_rec_wrong_recycle_logits"])
    assert got["draft_ids"].tolist() != want["draft_rec_ids"].tolist()


def options(**changes: Any) -> tuple[ModelConfig, Params]:
    """A random head of another width than its trunk's, with its own embedding, whose layer adds nothing."""
    cfg, params = loaded("eagle3").config, loaded("eagle3").params
    assert isinstance(cfg.drafter, Eagle3Config)
    layer = replace(cfg.drafter.layer, hidden_size=32, vocab_size=cfg.vocab_size)
    cfg = replace(cfg, drafter=replace(cfg.drafter, layer=layer, maps=False, embeds=True, **changes))
    own = init_params(cfg, jax.random.key(0)).drafter
    assert isinstance(own, Eagle3)
    scaled = jax.tree.map(lambda w: 1 + 0.1 * jnp.arange(len(w)) / len(w), (own.tap_norms, own.hidden_norm))
    block = replace(own.layer, attention=replace(own.layer.attention, o=0 * own.layer.attention.o))
    block = replace(block, mlp=replace(block.mlp, down=0 * block.mlp.down))
    return cfg, replace(params, drafter=replace(own, tap_norms=scaled[0], hidden_norm=scaled[1], layer=block))


def normed(x: np.ndarray, weight: jax.Array) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * np.asarray(weight)


@pytest.mark.parametrize("tap_norms", [0, 1])
@pytest.mark.parametrize("normed_residual", [False, True])
def test_options_that_the_oracles_heads_do_not_have(tap_norms: int, normed_residual: bool):
    cfg, params = options(tap_norms=tap_norms, normed_residual=normed_residual, logit_scale=0.25)
    p, want = params.drafter, expected("eagle3")
    assert isinstance(p, Eagle3)
    got = forward(params, cfg, want["input_ids"], want["eagle_in_ids"])
    taps = normed(want["eagle_aux"], p.tap_norms[0]) if tap_norms else want["eagle_aux"]
    fused = taps @ np.asarray(p.fuse).T
    close(got["fc"], fused)
    # The layer adds nothing, so the residual is what is fed back.
    fed_back = normed(fused, p.hidden_norm) if normed_residual else fused
    close(got["fed_back"], fed_back)
    close(got["logits"], 0.25 * normed(fed_back, p.norm) @ np.asarray(p.head).T)
