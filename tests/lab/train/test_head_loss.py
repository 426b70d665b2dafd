"""A head's drafts and objective in training: those of its decoding, and the distance of distributions."""

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from mtp_jax.api.options import LLMOptions
from mtp_jax.checkpoint import Loaded, load
from mtp_jax.decode.drafter.protocol import FINAL
from mtp_jax.errors import ConfigError
from mtp_jax.lab.train.head_loss import Task, compared, drafts_of, objective, split
from mtp_jax.lab.train.learner import Drafted, Teacher, learner_of
from mtp_jax.lab.train.mixed import differentiable
from mtp_jax.lab.train.start import begin
from mtp_jax.lab.train.states import StateWindows
from mtp_jax.lab.train.tune_options import TuneOptions
from mtp_jax.model import trunk
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import make_mesh
from tests import v4
from tests.golden import EAGLES, HEADS, expected, model_dir
from tests.models import TINY, on_mesh, tiny_params
from tests.rounding import near, of_model

ON = differentiable()


@cache
def loaded(variant: str) -> Loaded:
    return load(
        model_dir(variant), model_dir(variant, "draft") if variant in HEADS else None, dtype="float32"
    )


@partial(jax.jit, static_argnums=(1, 3))
def traced(params: Params, cfg: Any, tokens: jax.Array, taps: tuple[int, ...]) -> dict[int, jax.Array]:
    """The hidden states of texts [B, T] that a head reads."""
    found = trunk.forward_traced(params, cfg, tokens, ON, taps)
    return {FINAL: found.hidden, **{k: found.taps[k] for k in taps}}


def windows(params: Params, cfg: Any, task: Task, texts: list[list[int]], anchor: int) -> StateWindows:
    """One window with these texts behind each other, whose hidden states know of no other text."""
    longest = max(map(len, texts))
    states = traced(params, cfg, np.array([ids + [0] * (longest - len(ids)) for ids in texts]), task.taps)
    number = np.concatenate([np.full(len(ids), i, np.int32) for i, ids in enumerate(texts)])[None]
    own = [slice(len(ids)) for ids in texts]
    given: Any = (
        np.concatenate(texts)[None].astype(np.int32),
        number,
        np.ones_like(number, bool),
        {k: np.concatenate([np.asarray(s)[i, each] for i, each in enumerate(own)])[None]
         for k, s in states.items()},
        np.array([[anchor]], np.int32),
    )  # fmt: skip
    return StateWindows(*given)


SLOW = [pytest.param(v, marks=pytest.mark.slow) for v in ("eagle3", "eagle3_mla", "dflash", "dflash2")]
SLOW_HEADS = [pytest.param(v, marks=pytest.mark.slow) for v in ("eagle3_mla", "dflash2")]


@pytest.mark.parametrize("variant", ["rigged", pytest.param("dspark", marks=pytest.mark.rest), *SLOW])
def test_what_is_tuned_is_what_drafts(variant: str) -> None:
    """The oracle's drafts after a prompt, with another text before it in the window."""
    found, want = loaded(variant), expected(variant)
    params, cfg, head = found.params, found.config, learner_of(found.config)
    recursive = variant in EAGLES or variant == "rigged"
    ids = want["draft_rec_ids"] if recursive else want["draft_ids"]
    task = Task(head, ON, len(ids), "kl", 0.6)
    other, prompt = want["greedy_ids"].tolist(), want["input_ids"].tolist()
    text = [*prompt, int(want["greedy_ids"][0]), *map(int, ids)]
    newest = len(other) + len(prompt)
    # Behind the last draft stand tokens of the next text, so that every row has its drafts in the window.
    behind = other[: task.extra]
    given = windows(params, cfg, task, [other, text, behind], newest)
    row = newest - 1 if recursive else 0
    at = newest + np.arange(len(ids))

    @jax.jit
    def made(params: Params, given: StateWindows) -> tuple[Any, jax.Array]:
        drafts = list(drafts_of(task, params, given))
        logits = [task.head.logits(params, task.on, k, drafted) for k, drafted in enumerate(drafts)]
        return (logits, drafts), trunk.logits(params, given.states[FINAL][0, at], ON)

    (logits, drafts), teacher = made(params, given)
    some = head.ids(params)
    tokens = np.arange(cfg.vocab_size) if some is None else np.asarray(some)
    for k, drafted in enumerate(drafts):
        got = np.asarray(logits[k][row])
        assert tokens[got.argmax()] == ids[k]
        assert drafted.teacher.best[row] == teacher[k].argmax()
        assert drafted.counts[row]
        assert drafted.tokens[row] == ids[k]
        near(drafted.teacher.logits[row], teacher[k][tokens], cfg.hidden_size)
        if recursive:
            near(got[np.isfinite(got)], want["draft_rec_logits"][k], of_model(cfg, len(text)))


MOE = replace(TINY, nextn_moe=(True,))


def drawn(task: Task, cfg: ModelConfig = TINY) -> StateWindows:
    """Windows of random tokens and states."""
    rng, shape = np.random.default_rng(3), (2, 12 + task.extra)
    states = {k: rng.normal(size=(*shape, cfg.hidden_size)).astype(np.float32) for k in (FINAL, *task.taps)}
    number = np.repeat([[0], [1]], shape[1], axis=1).astype(np.int32)
    number[:, 7:] += 2
    given: Any = (
        rng.integers(0, cfg.vocab_size, shape).astype(np.int32),
        number,
        rng.random(shape) < 0.8,
        states,
        rng.integers(1, 12, (2, 4)),
    )
    return StateWindows(*given)


@pytest.mark.rest
@pytest.mark.parametrize("variant", ["float32", "bfloat16", *SLOW_HEADS])
def test_all_of_the_head_learns_and_on_a_mesh_the_same(variant: str) -> None:
    """A NextN layer with experts, in products of both kinds, and heads."""
    own = variant in HEADS
    found = loaded(variant) if own else Loaded(MOE, tiny_params(MOE), 0)
    cfg, params, mesh = found.config, found.params, make_mesh(2, 2)
    factors = "bfloat16" if variant == "bfloat16" else "float32"
    task = Task(learner_of(cfg), differentiable(factors), 2, "kl" if own else "tv", 0.6)
    given = drawn(task, cfg)

    def grads(params: Params, task: Task) -> dict[str, np.ndarray]:
        run = jax.jit(jax.grad(objective, has_aux=True), static_argnums=2)
        leaves = jax.tree_util.tree_leaves_with_path(run(*split(params), task, given)[0])
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}

    alone = grads(params, task)
    assert len(alone) == len(jax.tree.leaves(params.drafts)) - (variant == "eagle3_mla")
    for path, gradient in alone.items():
        assert gradient.any() != path.endswith(".bias"), path  # the router's bias only selects
    spread = grads(on_mesh(params, mesh, cfg), replace(task, on=differentiable(factors, mesh)))
    # Forwards and back, and over the rows of all windows.
    terms = 2 * of_model(cfg, given.tokens.shape[1]) + given.tokens.size
    for path, gradient in alone.items():
        near(spread[path], gradient, terms, jnp.dtype(factors), name=path)


def test_the_objective_is_the_distance_of_two_distributions() -> None:
    """From the logits of each draft, and from states whose logits are the trunk's."""
    params, cfg = tiny_params(), TINY
    task = Task(learner_of(cfg), ON, 2, "kl", 0.5)
    given = drawn(task)

    @jax.jit
    def run(params: Params, given: StateWindows) -> tuple[Any, dict[str, Any]]:
        drafts = list(drafts_of(task, params, given))
        both = [(task.head.logits(params, task.on, k, drafted), drafted) for k, drafted in enumerate(drafts)]
        kinds = [replace(task, objective=kind) for kind in ("kl", "tv", "text")]
        return both, {own.objective: objective(*split(params), own, given) for own in kinds}

    both, found = run(params, given)
    losses: dict[str, list[float]] = {kind: [] for kind in found}
    size = 0.0
    for logits, drafted in both:
        rows = np.flatnonzero(np.asarray(drafted.counts))
        assert 0 < len(rows) < len(logits)
        q, p = (softmax(np.asarray(a, np.float64)[rows], axis=-1) for a in (logits, drafted.teacher.logits))
        losses["kl"].append((p * np.log(p / q)).sum(-1).mean())
        losses["tv"].append(abs(p - q).sum(-1).mean() / 2)
        losses["text"].append(-np.log(q[range(len(rows)), drafted.tokens[rows]]).mean())
        size = max(size, *(float(jnp.abs(a).max()) for a in (logits, drafted.teacher.logits)))
    # Errors of logits are those of log-probabilities, and of probabilities at most.
    close = partial(near, terms=of_model(cfg, given.tokens.shape[1]) + cfg.vocab_size, size=size)
    for kind, each in losses.items():
        total, aux = found[kind]
        close(aux.losses, each)
        close(total, (each[0] + 0.5 * each[1]) / 1.5)
        close(aux.overlap, 1 - np.array(losses["tv"]))


def test_drafters_of_v4_are_not_tuned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(v4.v4_config()))
    with pytest.raises(ConfigError, match="fresh = 'eagle3': no head is made for DeepSeek-V4 here"):
        begin(LLMOptions(model=str(tmp_path)), TuneOptions(fresh="eagle3"))
    for cfg in (v4.model(), v4.staged()):
        with pytest.raises(ConfigError, match="MTP layers and DSpark stages are not tuned here"):
            learner_of(cfg)


def test_a_head_of_some_tokens_is_compared_over_them(rng: np.random.Generator) -> None:
    """The divergence is from the trunk's distribution of these tokens, the overlap is with that of all."""
    ids, tokens = np.array([7, 2, 5]), np.array([2, 3, 7, 5])
    whole, own = rng.normal(size=(4, 9)).astype(np.float32), rng.normal(size=(4, 3)).astype(np.float32)
    whole[0, 2] = whole[1, 3] = 9
    own[:2, 1] = 9
    p, some, q = softmax(whole, axis=-1)[:, ids], softmax(whole[:, ids], axis=-1), softmax(own, axis=-1)
    text = -np.log(q)[range(4), [1, 0, 0, 2]]
    text[1] = 0  # token 3 is never drafted
    wanted = {"kl": (some * np.log(some / q)).sum(-1), "tv": 1 - np.minimum(p, q).sum(-1), "text": text}
    teacher = Teacher.of(jnp.asarray(whole), jnp.asarray(ids))
    given: Any = own, teacher, tokens, tokens, np.ones(4, bool)
    for kind, losses in wanted.items():
        task: Any = SimpleNamespace(objective=kind)
        loss, same, overlap = compared(task, jnp.asarray(own), Drafted(*given), jnp.asarray(ids))
        near(loss, losses, 9, size=9)
        near(overlap, 1 - wanted["tv"], 9)
        assert same[:2].tolist() == [True, False]
