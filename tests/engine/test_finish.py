"""Finished rows switch themselves off on the device, inside a window too; penalties and min_tokens."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.engine.sampling_params import SamplingParams
from tests.engine.plain import reference, scored_by, text, tolerance, widest
from tests.models import GREEDY, TINY, accepted, prompts, serve

PROMPTS = prompts(8)
VARIED = PROMPTS[3]  # its text has many different tokens
EOS = TINY.eos_token_ids[0]


def adjusted_greedy(prompt: Sequence[int], p: SamplingParams, stops: Sequence[int] = ()) -> list[int]:
    """Greedy decoding with penalties, bias and min_tokens, one token at a time in plain numpy."""
    out: list[int] = []
    while len(out) < (p.max_tokens or 0):
        x = reference().logits([*prompt, *out])[-1].astype(np.float64)
        for token, bias in p.logit_bias.items():
            x[token] += bias
        if len(out) < p.min_tokens:
            x[list(stops)] = -np.inf
        seen = np.bincount(out, minlength=len(x))
        repeated = (seen > 0) | np.isin(np.arange(len(x)), prompt)
        x = np.where(repeated, np.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty), x)
        x -= p.frequency_penalty * seen + p.presence_penalty * (seen > 0)
        best, second = np.sort(x)[::-1][:2]
        assert best - second > 2 * tolerance(len(prompt) + len(out)), "almost a tie: choose another prompt"
        out.append(int(x.argmax()))
        if out[-1] in stops:
            break
    return out


def test_a_stop_token_cuts_inside_the_window():
    """Every token of a text in turn as the stop token: the output ends with its first occurrence."""
    whole = text(VARIED)
    stops = sorted(set(whole), key=whole.index)
    jobs = [(VARIED, replace(GREEDY, stop_token_ids=[t])) for t in stops]
    requests = serve(widest(), jobs, compiled=True)
    inside = 0
    for token, r in zip(stops, requests, strict=True):
        assert r.progress.output == whole[: whole.index(token) + 1]
        assert r.progress.finish_reason == "stop"
        assert len(r.progress.logprobs) == len(r.progress.output)
        # Tokens that a step would have emitted without the cut: it fell inside an accepted window.
        inside += 1 + sum(a + 1 for a in accepted(r)) > len(r.progress.output)
    assert inside >= 3


def test_max_tokens_cuts_inside_the_window():
    whole = text(VARIED)
    requests = serve(widest(), [(VARIED, replace(GREEDY, max_tokens=n)) for n in range(1, 13)], compiled=True)
    inside = 0
    for n, r in enumerate(requests, start=1):
        assert (r.progress.output, r.progress.finish_reason) == (whole[:n], "length")
        inside += 1 + sum(a + 1 for a in accepted(r)) > n
    assert inside >= 3


def test_a_stop_token_at_max_tokens_counts_as_a_stop():
    whole = text(VARIED)
    n = next(i for i, t in enumerate(whole) if i > 3 and t not in whole[:i]) + 1
    (r,) = serve(
        widest(), [(VARIED, replace(GREEDY, max_tokens=n, stop_token_ids=whole[n - 1 : n]))], compiled=True
    )
    assert (r.progress.output, r.progress.finish_reason) == (whole[:n], "stop")


def test_end_of_sequence_and_ignore_eos():
    found = [p for p in PROMPTS if EOS in text(p)[1:]]
    assert found, "no text holds the end-of-sequence token: choose other prompts"
    whole = text(found[0])
    jobs = [(found[0], GREEDY), (found[0], replace(GREEDY, ignore_eos=False))]
    ignoring, stopping = serve(widest(), jobs, compiled=True)
    assert (ignoring.progress.output, ignoring.progress.finish_reason) == (whole, "length")
    assert (stopping.progress.output, stopping.progress.finish_reason) == (
        whole[: whole.index(EOS) + 1],
        "stop",
    )


def test_the_first_token_may_be_the_last():
    whole = text(VARIED)
    jobs = [(VARIED, replace(GREEDY, stop_token_ids=whole[:1])), (VARIED, replace(GREEDY, max_tokens=1))]
    engine = widest()
    stopped, short = serve(engine, jobs, compiled=True)
    assert (stopped.progress.output, stopped.progress.finish_reason) == (whole[:1], "stop")
    assert (short.progress.output, short.progress.finish_reason) == (whole[:1], "length")
    assert not np.asarray(local_runner(engine).state.slots.active).any()


PENALTIES = {
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 1.2},
    "presence": {"presence_penalty": 2.0},
    "negative": {"presence_penalty": -1.0, "frequency_penalty": -0.2, "repetition_penalty": 0.9},
    "bias": {"logit_bias": {7: 6.0, 21: -100.0}},
    "all": {
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.4,
        "logit_bias": {3: 2.0},
    },
}


@pytest.mark.parametrize(
    ("drafting", "verifier"),
    [
        ("sampled", "coupled"),
        pytest.param("sampled", "block", marks=pytest.mark.rest),
        pytest.param("greedy", "block", marks=pytest.mark.slow),
    ],
)
def test_penalties_evolve_inside_the_window(drafting, verifier):
    """At depth 3 as at depth 0 as in the plain loop; drafts see penalties too, or few would pass."""
    jobs = [
        (prompt, replace(GREEDY, num_speculative_tokens=depth, **options))
        for options in PENALTIES.values()
        for prompt in PROMPTS[:2]
        for depth in (3, 0)
    ]
    requests = serve(widest(drafting=drafting, verifier=verifier), jobs, compiled=True)
    for r in requests:
        assert r.progress.output == adjusted_greedy(r.prompt, r.params)
        scored_by(reference(), r)  # scores are the model's own, before penalties
    changed = [r for r in requests if r.progress.output != text(r.prompt)]
    assert len(changed) > len(requests) / 2
    deep = [r for r in requests if r.depth]
    assert sum(r.progress.speculation.accepted for r in deep) > len(deep)


def test_min_tokens():
    """Stop tokens are impossible before, and end the text as usual after, wherever the window begins."""
    whole = text(VARIED)
    stops = [whole[1], whole[8]]
    jobs = [
        (VARIED, replace(GREEDY, stop_token_ids=stops, min_tokens=n, num_speculative_tokens=depth))
        for n in range(10)
        for depth in (3, 0)
    ]
    requests = serve(widest(), jobs, compiled=True)
    for r in requests:
        assert r.progress.output == adjusted_greedy(r.prompt, r.params, stops)
        assert len(r.progress.output) >= r.params.min_tokens
        assert r.progress.finish_reason == ("stop" if r.progress.output[-1] in stops else "length")
    assert len({len(r.progress.output) for r in requests}) > 3
    assert sum(r.progress.speculation.accepted for r in requests) > 0


def test_min_tokens_holds_back_end_of_sequence():
    prompt = next(p for p in PROMPTS if EOS in text(p)[:12])
    params = replace(GREEDY, ignore_eos=False, min_tokens=20)
    (r,) = serve(widest(), [(prompt, params)], compiled=True)
    assert r.progress.output == adjusted_greedy(prompt, params, [EOS])
    assert len(r.progress.output) >= 20
