"""Log-probabilities of emitted and of prompt tokens are those of a cache-free pass over the finished text."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.speculation import TokenLogprobs
from tests.models import GREEDY, Reference, make_engine, prepare, prompts, serve, tiny_params

PROMPTS = prompts(8)
WIDE = replace(GREEDY, logprobs=3, prompt_logprobs=2)
SAMPLED = SamplingParams(
    temperature=1.3,
    top_k=8,
    repetition_penalty=1.2,
    seed=5,
    max_tokens=24,
    ignore_eos=True,
    logprobs=5,
    prompt_logprobs=0,
)


def ready() -> Engine:
    """An engine with programs that sample, which serve greedy requests, too."""
    engine = make_engine()
    prepare(engine, [engine.make_request(PROMPTS[0], replace(SAMPLED, prompt_logprobs=2))])
    return engine


@functools.cache
def reference() -> Reference:
    return Reference(tiny_params())


def check(got: TokenLogprobs, row: np.ndarray, token: int, width: int) -> None:
    """The chosen token first, then the most likely ones, each with its rank."""
    assert next(iter(got)) == token
    best = np.argsort(-row, kind="stable")[:width].tolist()
    assert [t for t in got if t != token] == [t for t in best if t != token]
    for t, entry in got.items():
        assert entry.logprob == pytest.approx(row[t], abs=1e-3)
        assert entry.rank == 1 + (row > row[t]).sum()


@pytest.mark.parametrize("params", [WIDE, SAMPLED], ids=["greedy", "sampled"])
def test_every_token(params):
    """The model's own: before temperature and penalties. Some prompts take several chunks."""
    requests = serve(ready(), [(p, params) for p in PROMPTS], compiled=True)
    assert sum(r.progress.speculation.accepted for r in requests) > 0
    for r in requests:
        rows = reference().logprobs([*r.prompt, *r.progress.output])
        assert len(r.progress.logprobs) == len(r.progress.output) == 24
        for i, token in enumerate(r.progress.output):
            check(r.progress.logprobs[i], rows[len(r.prompt) + i - 1], token, params.logprobs)
        assert len(r.progress.prompt_logprobs) == len(r.prompt)
        assert r.progress.prompt_logprobs[0] is None
        for i, token in enumerate(r.prompt[1:]):
            entry = r.progress.prompt_logprobs[i + 1]
            assert entry is not None
            check(entry, rows[i], token, params.prompt_logprobs)


def test_only_those_who_ask_get_them():
    asks, silent = WIDE, replace(GREEDY, logprobs=None)
    zero = replace(GREEDY, logprobs=0, prompt_logprobs=None)
    jobs = list(zip(PROMPTS, (asks, silent, zero), strict=False))
    requests = serve(ready(), jobs, compiled=True)
    assert [len(r.progress.logprobs) for r in requests] == [24, 0, 24]
    assert [len(r.progress.prompt_logprobs) for r in requests] == [len(PROMPTS[0]), 0, 0]
    assert all(len(entry) == 1 for entry in requests[2].progress.logprobs)
    assert [r.progress.output for r in requests] == [reference().speculate(p, 24).ids for p in PROMPTS[:3]]
