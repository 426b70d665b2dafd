"""A long prompt goes along with the steps of running requests: they emit in every launch, drafts included."""

from dataclasses import replace

import pytest

from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from tests.engine.device import on_device
from tests.engine.plain import widest
from tests.models import GREEDY, accepted, prompts, serve

LONG, CHUNK, OTHERS = 52, 16, 3
SAMPLED = replace(GREEDY, temperature=1.0, seed=3)


def along(engine: Engine, params: SamplingParams, long: list[int]) -> tuple[list[Request], Request, int]:
    """Run others until they all emit, then one more prompt: everyone, that one, and its launches.

    Every running request must emit in each launch that takes a chunk of it.
    """
    others = [engine.make_request(p, params) for p in prompts(OTHERS)]
    (late,) = [engine.make_request(long, replace(params, max_tokens=8))]
    for r in others:
        engine.submit(r)
    while not all(r.progress.output for r in others):
        engine.step()
    engine.submit(late)
    launches, run = 0, engine._collect

    def counted(launch):
        nonlocal launches
        before = [len(r.progress.output) for r in others]
        advanced = run(launch)
        if any(r is late for _, r in launch.prompts):
            launches += 1
            assert not any(r.finished for r in others), "they end too early to show anything"
            assert [r for _, r in launch.rows] == others
            assert launch.key.depth == 3, "drafts included"
            assert all(len(r.progress.output) > n for r, n in zip(others, before, strict=True))
        return advanced

    engine._collect = counted  # type: ignore[method-assign]
    while engine.busy:
        engine.step()
    return others, late, launches


@pytest.mark.parametrize(
    "params", [GREEDY, pytest.param(SAMPLED, marks=pytest.mark.slow)], ids=["greedy", "sampled"]
)
def test_every_request_emits_in_every_launch_while_a_long_prompt_is_read(params):
    params = replace(params, max_tokens=40)
    (long,) = prompts(1, shortest=LONG)
    others, late, launches = along(widest(prefill_chunk=CHUNK), params, long)
    assert launches == -(-LONG // CHUNK)
    alone = widest(prefill_chunk=CHUNK)
    for r in (*others, late):
        (same,) = serve(alone, [(r.prompt, replace(params, max_tokens=r.max_tokens))], compiled=True)
        assert (r.progress.output, accepted(r)) == (same.progress.output, accepted(same))
    assert sum(r.progress.speculation.accepted for r in others) > launches * OTHERS / 2


def test_rows_whose_prompt_ends_in_a_launch_say_nothing_of_drafts():
    engine, _ = on_device(keep=1.0, num_speculative_tokens=3, adaptive_depth=True, max_num_seqs=2)
    requests = [engine.make_request(p, replace(GREEDY, max_tokens=20, logprobs=None)) for p in prompts(2)]
    engine.prepare(requests)
    learned, learn = [], engine.depth.learn

    def recorded(key, seconds, depths, rows, offered=None):
        learned.append((key, rows))
        learn(key, seconds, depths, rows, offered)

    engine.depth.learn = recorded  # type: ignore[method-assign]
    for r in requests:
        engine.submit(r)
    while engine.busy:
        engine.step()
    mixed = [rows for key, rows in learned if key.tokens]
    assert [len(rows) for rows in mixed] == [1], (
        "the first launch had a chunk alone, the second one row beside"
    )
    assert all(emitted > 0 for rows in mixed for _, _, emitted in rows)
