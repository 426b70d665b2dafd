"""EAGLE-3 heads against the oracle, without an engine: taps, their fusion, the layer, recursion."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.heads.eagle3.declared import Eagle3, Eagle3Config
from mtp_jax.heads.eagle3.drafts import Eagle3Head
from mtp_jax.model import draft_module, trunk
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params, Spec, param_specs
from tests.eagle3 import DRAFTS, ON, loaded, of_head
from tests.golden import EAGLES, expected
from tests.models import apart
from tests.rounding import near, of_model


@partial(jax.jit, static_argnames="cfg")
def streams(params: Params, cfg: ModelConfig, ids: jax.Array) -> trunk.Taps:
    """The trunk's residual streams."""
    return trunk.forward_traced(params, cfg, ids, ON, range(cfg.num_hidden_layers + 1)).taps


@partial(jax.jit, static_argnames=("cfg", "drafts"))
def drafted(
    params: Params, cfg: ModelConfig, taps: list[jax.Array], following: jax.Array, drafts: int
) -> Any:
    """What the head makes of a text's streams, with the token that follows each of its tokens."""
    module = Eagle3Head(cfg)
    tokens, rows = following, module.fuse(params, ON, taps)
    out: dict[str, Any] = {"aux": jnp.concatenate(taps, axis=-1)[0], "fc": rows[0]}
    ids, logits = [], []
    for number in range(drafts):
        z = draft_module.teacher_forced(module, params, ON, 0, tokens, rows)
        found = module.logits(params, 0, z, ON)
        if number == 0:
            out |= {"fed_back": z[0], "logits": found[0]}
        logits.append(found[0, -1])
        ids.append(jnp.argmax(found[:, -1], axis=-1))
        tokens = jnp.concatenate([tokens, ids[-1][:, None]], axis=1)
        rows = jnp.concatenate([rows, z[:, -1:]], axis=1)
    return out | {"draft_ids": jnp.concatenate(ids), "draft_logits": jnp.stack(logits)}


def forward(variant: str, cfg: ModelConfig) -> dict[str, np.ndarray]:
    """The oracle's text, drafted on by a head of this configuration."""
    found, want = loaded(variant), expected(variant)
    plain = replace(found.params, drafter=None), replace(cfg, drafter=None)
    taps = streams(*plain, want["input_ids"][None])
    mine = [taps[number] for number in Eagle3Head(cfg).features]
    return jax.device_get(drafted(found.params, cfg, mine, want["eagle_in_ids"][None], DRAFTS))


def close(variant: str, got: Any, want: np.ndarray, drafts: int = 1) -> None:
    near(got, want, drafts * of_model(loaded(variant).config, len(expected(variant)["input_ids"])))


@pytest.mark.parametrize("variant", apart(EAGLES, "eagle3"))
def test_the_head_computes_what_the_oracle_does(variant: str):
    found, want = loaded(variant), expected(variant)
    head, params = found.config.drafter, found.params
    assert isinstance(head, Eagle3Config)
    assert head.taps == tuple(want["eagle_capture"])
    got = forward(variant, found.config)
    close(variant, got["aux"], want["eagle_aux"])
    close(variant, got["fc"], want["eagle_fc"])
    close(variant, got["fed_back"], want["eagle_hidden" if head.normed_output else "eagle_prenorm"])
    close(variant, of_head(params, got["logits"]), want["eagle_logits"])
    assert got["draft_ids"].tolist() == want["draft_rec_ids"].tolist()
    close(variant, of_head(params, got["draft_logits"]), want["draft_rec_logits"], DRAFTS)


@pytest.mark.rest
@pytest.mark.parametrize("variant", EAGLES)
def test_the_other_state_fed_back_gives_other_drafts(variant: str):
    """The oracle's negative control: before the norm instead of after it, and the other way about."""
    found, want = loaded(variant), expected(variant)
    head = found.config.drafter
    assert isinstance(head, Eagle3Config)
    other = replace(found.config, drafter=replace(head, normed_output=not head.normed_output))
    got = forward(variant, other)
    close(variant, got["fed_back"], want["eagle_prenorm" if head.normed_output else "eagle_hidden"])
    close(variant, of_head(found.params, got["logits"]), want["eagle_logits"])
    assert got["draft_ids"].tolist() == want["draft_rec_wrong_recycle_ids"].tolist()
    close(variant, of_head(found.params, got["draft_logits"]), want["draft_rec_wrong_recycle_logits"], DRAFTS)
    assert got["draft_ids"].tolist() != want["draft_rec_ids"].tolist()


def options(rng: np.random.Generator, **changes: Any) -> tuple[ModelConfig, Params]:
    """A random head of another width than its trunk's, with its own embedding, whose layer adds nothing."""
    cfg, params = loaded("eagle3").config, loaded("eagle3").params
    assert isinstance(cfg.drafter, Eagle3Config)
    layer = replace(cfg.drafter.layer, hidden_size=32, vocab_size=cfg.vocab_size)
    cfg = replace(cfg, drafter=replace(cfg.drafter, layer=layer, maps=False, embeds=True, **changes))

    def draw(spec: Spec) -> jax.Array:
        x = rng.normal(size=spec.shape) / np.sqrt(spec.tensor_shape[-1])
        return jnp.asarray((1 + x if spec.init == "ones" else x).astype(np.float32))

    own = jax.tree.map(draw, param_specs(cfg).drafter)
    assert isinstance(own, Eagle3)
    block = replace(own.layer, attention=replace(own.layer.attention, o=0 * own.layer.attention.o))
    block = replace(block, mlp=replace(block.mlp, down=0 * block.mlp.down))
    return cfg, replace(params, drafter=replace(own, layer=block))


def normed(x: np.ndarray, weight: jax.Array) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * np.asarray(weight)


OPTIONS = [(0, False), (0, True), (1, False), (1, True)]


@pytest.mark.parametrize(("tap_norms", "normed_residual"), apart(OPTIONS, (1, True)))
def test_options_that_the_oracles_heads_do_not_have(
    tap_norms: int, normed_residual: bool, rng: np.random.Generator
):
    cfg, params = options(rng, tap_norms=tap_norms, normed_residual=normed_residual, logit_scale=0.25)
    p, want = params.drafter, expected("eagle3")
    assert isinstance(p, Eagle3)
    given = jnp.split(jnp.asarray(want["eagle_aux"])[None], 3, axis=-1)
    got = jax.device_get(drafted(params, cfg, given, want["eagle_in_ids"][None], 1))
    taps = normed(want["eagle_aux"], p.tap_norms[0]) if tap_norms else want["eagle_aux"]
    fused = taps @ np.asarray(p.fuse).T
    close("eagle3", got["fc"], fused)
    # The layer adds nothing, so the residual is what is fed back.
    fed_back = normed(fused, p.hidden_norm) if normed_residual else fused
    close("eagle3", got["fed_back"], fed_back)
    close("eagle3", got["logits"], 0.25 * normed(fed_back, p.norm) @ np.asarray(p.head).T)


def test_a_head_without_a_table_reads_the_trunks(rng: np.random.Generator):
    found = loaded("eagle3")
    cfg, params, head = found.config, found.params, found.config.drafter
    assert isinstance(head, Eagle3Config)
    assert isinstance(params.drafter, Eagle3)
    layer = replace(head.layer, vocab_size=cfg.vocab_size)
    cfg = replace(cfg, drafter=replace(head, layer=layer, maps=False, heads=False, logit_scale=0.5))
    bare = replace(params, drafter=replace(params.drafter, head=None, target_offset=None))
    specs = param_specs(cfg).drafter
    assert isinstance(specs, Eagle3)
    assert specs.head is specs.target_offset is None
    z = rng.normal(size=(1, 5, 40)).astype(np.float32)
    got = jax.jit(lambda p: Eagle3Head(cfg).logits(p, 0, jnp.asarray(z), ON))(bare)
    want = 0.5 * normed(z, params.drafter.norm) @ np.asarray(params.table).T
    close("eagle3", got, want)
