"""Log-probabilities of emitted and of prompt tokens are those of a cache-free pass over the finished text."""

from dataclasses import replace

import numpy as np
import pytest

from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.speculation import TokenLogprobs
from tests.engine.plain import near_logits, reference, text, tolerance, widest
from tests.models import GREEDY, prompts, serve

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


def check(got: TokenLogprobs, row: np.ndarray, token: int, width: int, tokens: int) -> None:
    """The chosen token first, then the most likely ones, each with its rank. tokens: length of the text."""
    assert next(iter(got)) == token
    best = np.argsort(-row, kind="stable")[:width]
    gaps = np.abs(row[[*best, token]][:, None] - row)
    gaps = gaps[gaps > 0]
    assert gaps.min() > 2 * tolerance(tokens), "almost a tie: choose another prompt"
    assert [t for t in got if t != token] == [t for t in best if t != token]
    near_logits([entry.logprob for entry in got.values()], row[[*got]], tokens)
    assert [entry.rank for entry in got.values()] == [1 + (row > row[t]).sum() for t in got]


@pytest.mark.parametrize("params", [WIDE, SAMPLED], ids=["greedy", "sampled"])
def test_every_token(params):
    """The model's own: before temperature and penalties. Some prompts take several chunks."""
    requests = serve(widest(), [(p, params) for p in PROMPTS], compiled=True)
    assert sum(r.progress.speculation.accepted for r in requests) > 0
    for r in requests:
        rows = reference().logprobs([*r.prompt, *r.progress.output])
        tokens = len(rows)
        assert len(r.progress.logprobs) == len(r.progress.output) == 24
        for i, token in enumerate(r.progress.output):
            check(r.progress.logprobs[i], rows[len(r.prompt) + i - 1], token, params.logprobs, tokens)
        assert len(r.progress.prompt_logprobs) == len(r.prompt)
        assert r.progress.prompt_logprobs[0] is None
        for i, token in enumerate(r.prompt[1:]):
            entry = r.progress.prompt_logprobs[i + 1]
            assert entry is not None
            check(entry, rows[i], token, params.prompt_logprobs, tokens)


def test_only_those_who_ask_get_them():
    asks, silent = WIDE, replace(GREEDY, logprobs=None)
    zero = replace(GREEDY, logprobs=0, prompt_logprobs=None)
    jobs = list(zip(PROMPTS, (asks, silent, zero), strict=False))
    requests = serve(widest(), jobs, compiled=True)
    assert [len(r.progress.logprobs) for r in requests] == [24, 0, 24]
    assert [len(r.progress.prompt_logprobs) for r in requests] == [len(PROMPTS[0]), 0, 0]
    assert all(len(entry) == 1 for entry in requests[2].progress.logprobs)
    assert [r.progress.output for r in requests] == [text(p) for p in PROMPTS[:3]]
