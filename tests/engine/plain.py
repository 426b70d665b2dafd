"""The plain loop of the tiny model, its log-probabilities up to rounding, and programs for any request."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mtp_jax.decode.keys import StepKey
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params
from tests.models import TINY, Reference, chosen_logprobs, make_engine, prepare, tiny_params
from tests.rounding import error, largest_logit, near, of_model

WIDEST = SamplingParams(temperature=1.0, logprobs=5, prompt_logprobs=5)


@functools.cache
def reference() -> Reference:
    """One loop for all files, whose texts are mostly of the same prompts."""
    return Reference(tiny_params())


def text(prompt: Sequence[int], tokens: int = 24) -> list[int]:
    """The greedy continuation of a prompt."""
    return reference().speculate(prompt, tokens, 3).ids


def widest(params: Params | None = None, cfg: ModelConfig = TINY, **config: Any) -> Engine:
    """An engine with programs that sample and score: one pair for all tests with the same verifier."""
    engine = make_engine(params, cfg, **{"verifier": "coupled", **config})
    deepest = replace(WIDEST, num_speculative_tokens=engine.config.num_speculative_tokens)
    prepare(engine, [engine.make_request([5], deepest)])
    return engine


def compile_steps(engine: Engine, prompt: Sequence[int], params: SamplingParams, count: int = 1) -> None:
    """Compile a step for ``count`` such requests; programs that are there read their prompts."""
    keys = engine.buckets.prepare([engine.make_request(prompt, params)] * count)
    engine.runner.compile(k for k in keys if isinstance(k, StepKey) and not k.tokens)


def tolerance(tokens: int, cfg: ModelConfig = TINY) -> float:
    """The difference that rounding explains between two logits, or log-probabilities, of a text."""
    return error(of_model(cfg, tokens), largest_logit(tiny_params(cfg), cfg))


def near_logits(
    got: Any, want: Any, tokens: int, cfg: ModelConfig = TINY, params: Params | None = None
) -> None:
    """Assert that logits or log-probabilities of a text of ``tokens`` tokens differ by rounding alone."""
    params = tiny_params(cfg) if params is None else params
    near(got, want, of_model(cfg, tokens), size=largest_logit(params, cfg))


def same_scores(one: Request, other: Request, cfg: ModelConfig = TINY, params: Params | None = None) -> None:
    """Two requests have the same log-probabilities of their tokens."""
    tokens = len(one.prompt) + len(one.progress.output)
    near_logits(chosen_logprobs(one), chosen_logprobs(other), tokens, cfg, params)


def scored_by(plain: Reference, r: Request) -> None:
    """The log-probabilities of emitted tokens, and of a prompt if asked for, are the plain loop's."""
    ids = [*r.prompt, *r.progress.output]
    rows, first = plain.logprobs(ids)[np.arange(len(ids) - 1), ids[1:]], len(r.prompt) - 1
    near_logits(chosen_logprobs(r), rows[first:], len(ids), plain.cfg, plain.params)
    scored = [p[t].logprob for p, t in zip(r.progress.prompt_logprobs, r.prompt, strict=False) if p]
    assert len(scored) == (0 if r.params.prompt_logprobs is None else first)
    near_logits(scored, rows[: len(scored)], len(ids), plain.cfg, plain.params)
