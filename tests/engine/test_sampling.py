"""Sampled requests: reproducible by their seed alone, whatever shares the batch."""

import functools
from dataclasses import replace

import pytest

from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from tests.engine.plain import compile_steps, reference, same_scores, widest
from tests.models import GREEDY, accepted, prompts, serve

pytestmark = pytest.mark.rest  # coupled verification promises more, and is tested in every run
PROMPTS = prompts(8)
HOT = SamplingParams(temperature=1.0, seed=1, max_tokens=24, ignore_eos=True, logprobs=0)
OPTIONS = [
    {},
    {"temperature": 2.0, "top_k": 6},
    {"top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"temperature": 0.0},
    {"temperature": 1.5, "min_p": 0.05, "logit_bias": {3: 4.0}},
    {"temperature": 3.0, "min_tokens": 9, "ignore_eos": False},
    {"num_speculative_tokens": 1},
]
JOBS = [(p, replace(HOT, seed=i, **o)) for i, (p, o) in enumerate(zip(PROMPTS, OPTIONS, strict=True))]


@functools.cache
def alone(i: int, drafting: str, verifier: str) -> Request:
    return serve(widest(drafting=drafting, verifier=verifier), JOBS[i : i + 1], compiled=True)[0]


def same(one: Request, other: Request) -> None:
    assert one.progress.output == other.progress.output
    assert accepted(one) == accepted(other)
    assert one.progress.finish_reason == other.progress.finish_reason
    same_scores(one, other)


@pytest.mark.parametrize(
    ("drafting", "verifier"),
    [("sampled", "block"), pytest.param("greedy", "block", marks=pytest.mark.slow)],
)
def test_same_seed_same_output_in_any_company(drafting, verifier):
    """Different options side by side, in both orders, more than there are slots, and each alone."""
    for order in (range(8), range(7, -1, -1)):
        engine = widest(drafting=drafting, verifier=verifier)
        requests = serve(engine, [JOBS[i] for i in order], compiled=True)
        for i, r in zip(order, requests, strict=True):
            same(r, alone(i, drafting, verifier))
        assert len({r.residence.slot for r in requests}) == 4
        assert sum(r.progress.speculation.accepted for r in requests) > len(requests)


def test_same_seed_same_output_in_a_smaller_executable():
    want = alone(0, "sampled", "block")  # before there is a program of one slot
    engine = widest(verifier="block")
    compile_steps(engine, *JOBS[0])
    (small,) = serve(engine, JOBS[:1], compiled=True)
    same(small, want)


def test_other_seeds_other_outputs():
    jobs = [(PROMPTS[0], replace(HOT, temperature=1.5, seed=seed)) for seed in range(8)]
    requests = serve(widest(verifier="block"), jobs, compiled=True)
    assert len({tuple(r.progress.output) for r in requests}) == 8
    # The very first token, from prefill, is drawn too.
    assert len({r.progress.output[0] for r in requests}) > 1


def test_greedy_rows_of_a_sampling_step_are_greedy():
    jobs = [(p, GREEDY if i % 2 else replace(HOT, seed=i)) for i, p in enumerate(PROMPTS)]
    requests = serve(widest(verifier="block"), jobs, compiled=True)
    for r in requests[1::2]:
        told = reference().speculate(r.prompt, 24, 3)
        assert (r.progress.output, accepted(r)) == (told.ids, told.accepted)
    assert any(r.progress.output != reference().speculate(r.prompt, 24, 3).ids for r in requests[::2])


def test_requests_without_a_seed_follow_the_engines():
    def outputs(seed: int) -> list[list[int]]:
        jobs = [(PROMPTS[0], replace(HOT, seed=None, temperature=2.0))] * 4
        return [r.progress.output for r in serve(widest(verifier="block", seed=seed), jobs, compiled=True)]

    first = outputs(0)
    assert outputs(0) == first
    assert outputs(1) != first
    assert len({tuple(o) for o in first}) == 4


def test_requests_that_are_never_queued_take_no_seed():
    engine, unseeded = widest(verifier="block"), replace(HOT, seed=None, temperature=2.0)
    (first,) = serve(engine, [(PROMPTS[0], unseeded)], compiled=True)
    other = widest(verifier="block")
    other.make_request(PROMPTS[0], unseeded)
    (second,) = serve(other, [(PROMPTS[0], unseeded)], compiled=True)
    assert first.progress.output == second.progress.output
