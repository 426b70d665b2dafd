"""The objective of training: what it is made of, its gradient, and drafts as inference makes them."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.special import log_softmax

from mtp_jax.lab.train import step
from mtp_jax.lab.train.loss import LossFigures, loss
from mtp_jax.lab.train.mixed import Factors, differentiable
from mtp_jax.lab.train.optimizer import make_optimizer
from mtp_jax.lab.train.recipe import Recipe, Stage
from mtp_jax.model import nextn, trunk
from mtp_jax.model.params import Params
from tests.lab.train.tiny import CONFIG, params
from tests.rounding import error, near, of_model

# Tokens that the trunk reads, and the drafts that it is followed by.
LENGTH, DEPTH = 12, 3
TOKENS = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (2, LENGTH + 1 + DEPTH))
RECIPE = Recipe(model_config=Path(), tokenizer=Path(), stages=(Stage(2, LENGTH, 2, mtp_depth=0),))
# Tokens of a loss of two drafts.
FEWER = TOKENS[:, :-1]
TERMS = of_model(CONFIG, LENGTH)


@functools.cache
def trained(products: Factors = "float32") -> tuple[float, LossFigures, dict[str, np.ndarray]]:
    """(The loss, its figures, the gradient by name)."""
    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=(1, 3, 4, 5, 6))
    (total, aux), grads = run(params(), CONFIG, FEWER, 0.3, 2, "data", products)
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return float(total), aux, {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


class States(NamedTuple):
    """The trunk's states, its states in training, and the states of drafts in training."""

    hidden: jax.Array
    ours: jax.Array
    drafts: list[jax.Array]


@functools.cache
def states() -> tuple[States, Any]:
    """(States, their logits)."""

    @jax.jit
    def run(params: Params, tokens: jax.Array) -> tuple[States, Any]:
        known = tokens[:, :LENGTH]
        hidden, ours = (trunk.forward(params, CONFIG, known, *on) for on in ((), (differentiable(),)))
        drafts = nextn.drafts_forced(params, CONFIG, tokens, hidden, DEPTH, differentiable())
        found = States(hidden, ours, [d.hidden for d in drafts])
        return found, jax.tree.map(lambda x: trunk.logits(params, x), found)

    return run(params(), TOKENS)


def test_what_is_trained_is_what_is_run() -> None:
    (hidden, _, drafts), logits = states()
    near(logits.ours, logits.hidden, TERMS)
    teacher_forced = jax.jit(nextn.teacher_forced, static_argnums=(1, 2))
    first = teacher_forced(params(), CONFIG, 0, TOKENS[:, 1 : LENGTH + 1], hidden)
    near(drafts[0], first, TERMS)
    # Inference drafts from row i: rows 0..i hold the trunk's states, then the layer's own output is appended.
    i = 4
    rows = np.zeros_like(hidden)
    rows[:, : i + 1] = hidden[:, : i + 1]
    z = first[:, i]
    for k in (1, 2):
        rows[:, i + k] = z
        z = teacher_forced(params(), CONFIG, 0, TOKENS[:, 1 : LENGTH + 1], rows)[:, i + k]
        near(drafts[k][:, i], z, TERMS)


@pytest.mark.rest
def test_products_of_bfloat16_factors_train_the_same_model() -> None:
    (exact, _, wanted), (narrow, _, got) = trained(), trained("bfloat16")
    assert narrow != exact, "nothing was rounded"
    # Eight products of a layer follow each other, two layers and two drafts, a merge each, and a head; both
    # factors are rounded.
    roundings = 2 * (8 * 4 + 2 + 1)
    largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(states()[1]))
    near(narrow, exact, roundings, jnp.bfloat16, size=largest)
    for path, want in wanted.items():  # forwards and back
        most = error(2 * roundings, np.linalg.norm(want), jnp.bfloat16)
        assert np.linalg.norm(got[path] - want) <= most, path


def test_loss_is_the_weighted_sum_of_its_terms() -> None:
    total, aux, _ = trained()
    assert aux.losses.shape == aux.accuracy.shape == (3,)
    near(total, aux.losses[0] + 0.3 * aux.losses[1:].mean(), 4)
    assert float(aux.loads[0].sum()) == 2 * LENGTH * CONFIG.num_experts_per_tok
    log = log_softmax(np.asarray(states()[1].hidden, np.float64), axis=-1)
    expected = -np.take_along_axis(log, TOKENS[:, 1 : LENGTH + 1, None], -1).mean()
    near(aux.losses[0], expected, TERMS + CONFIG.vocab_size)


def test_drafts_learn_the_text_or_what_the_trunk_says() -> None:
    assert params().head is None  # tied
    logits = states()[1]
    trunk_log = log_softmax(np.asarray(logits.hidden, np.float64), axis=-1)
    text = trained()[1]
    _, taught = jax.jit(loss, static_argnums=(1, 4, 5))(params(), CONFIG, FEWER, 0.3, 2, "trunk")
    terms = TERMS + CONFIG.vocab_size
    for k, own in enumerate(logits.drafts[:2], start=1):
        log = log_softmax(np.asarray(own, np.float64), axis=-1)
        right = TOKENS[:, k + 1 : k + 1 + LENGTH]
        near(text.losses[k], -np.take_along_axis(log, right[..., None], -1).mean(), terms)
        assert float(text.accuracy[k]) == pytest.approx((log.argmax(-1) == right).mean())
        teacher, pupil = trunk_log[:, k:], log[:, :-k]  # the same token, k positions later in the trunk
        near(taught.losses[k], -(np.exp(teacher) * pupil).sum(-1).mean(), terms)
        same = (teacher.argmax(-1) == pupil.argmax(-1)).mean()
        assert float(taught.accuracy[k]) == pytest.approx(same)
    near(text.losses[0], taught.losses[0], terms)


@pytest.mark.rest
def test_micro_batches_are_one_batch(rng: np.random.Generator) -> None:
    recipe, optimizer = replace(RECIPE, balance_rate=0.0), optax.sgd(0.1)
    tokens = rng.integers(0, CONFIG.vocab_size, (4, 14))
    found = []
    for stage in (Stage(1, 12, 4, 1, 1), Stage(1, 12, 2, 2, 1)):
        own = jax.tree.map(np.array, params())
        state = step.TrainState(own, optimizer.init(cast(Any, own)))
        advance = step.make_step(recipe, stage, CONFIG, optimizer)
        found.append(advance(state, jnp.asarray(tokens.reshape(stage.micro_batches, stage.batch, -1))))
    whole, parts = found
    near(whole.aux.losses, parts.aux.losses, TERMS + CONFIG.vocab_size)
    near(whole.grad_norm, parts.grad_norm, 2 * (TERMS + CONFIG.vocab_size))  # forwards and back
    for a, b in zip(whole.aux.loads, parts.aux.loads, strict=True):
        np.testing.assert_array_equal(a, b)


def test_bias_gets_no_gradient_and_every_other_parameter_does() -> None:
    for path, gradient in trained()[2].items():
        assert gradient.any() != path.endswith(".bias"), path


@pytest.mark.rest
def test_steps_of_muon_lower_the_loss() -> None:
    cfg = replace(CONFIG, num_hidden_layers=1)
    optimizer = make_optimizer(RECIPE, RECIPE.total_steps)
    advance = step.make_step(RECIPE, RECIPE.stages[0], cfg, optimizer)
    own: Any = params(cfg)
    state, losses = step.TrainState(own, jax.jit(optimizer.init)(own)), []
    for _ in range(2):
        state, aux, _ = advance(state, jnp.asarray(TOKENS[None, :, : LENGTH + 1]))
        losses.append(float(aux.losses[0]))
    assert losses[1] < losses[0]
