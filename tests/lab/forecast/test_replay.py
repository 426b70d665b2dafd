"""Loads whose times can be computed by hand; the same launches as on the device that has text."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from mtp_jax.api.admission import QueueLimits
from mtp_jax.api.options import LLMOptions
from mtp_jax.decode.launches import Traits
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError
from mtp_jax.lab.forecast.load import Arrival
from mtp_jax.lab.forecast.replay import Outcome, Service, fitted, replay
from mtp_jax.lab.planning.deployment import Deployment, tokens_per_step
from mtp_jax.lab.planning.hardware import GPUS
from mtp_jax.lab.planning.launch_time import LaunchTimes, LaunchWork
from mtp_jax.lab.planning.memory import memory
from mtp_jax.lab.planning.releases import DEEPSEEK_V3
from mtp_jax.lab.planning.weights import Storage
from mtp_jax.simulate.device import Simulated
from mtp_jax.simulate.language import Language
from mtp_jax.simulate.memory import SlotMemory
from tests.models import TINY, engine_config

CHUNK, STEP, DRAFT = 1.0, 0.1, 0.02


class Fixed:
    """Times that a hand can add."""

    def __init__(self, draft: float = DRAFT, flush: float = 0.0) -> None:
        self.draft, self._flush = draft, flush
        self.flushed: list[int] = []

    def launch(self, work: LaunchWork) -> float:
        return CHUNK * bool(work.prompts) + (STEP + self.draft * work.depth) * bool(work.slots)

    def flush(self, slots: int, steps: int) -> float:
        self.flushed.append(steps)
        return self._flush


def serve(
    load: list[Arrival], times: Any = None, rates: tuple[float, ...] = (0.8,), seed: int = 0, **config: Any
) -> Outcome:
    return replay(service(times, rates, seed, **config), load)


def service(times: Any = None, rates: tuple[float, ...] = (0.8,), seed: int = 0, **config: Any) -> Service:
    sizes = engine_config(**{"num_speculative_tokens": 0, "max_num_seqs": 1, **config})
    limits = QueueLimits(max_queued_requests=2)
    return Service(TINY, sizes, times or Fixed(), rates, limits=limits, seed=seed)


def test_one_request_takes_its_chunks_and_its_steps():
    (one,) = serve([Arrival(1, 0, 40, 9)]).served
    assert (one.waited, one.first) == (0, pytest.approx(3 * CHUNK))  # 16 + 16 + 8 tokens
    assert one.per_token == pytest.approx(STEP)
    assert one.whole == pytest.approx(3 * CHUNK + 8 * STEP)


def test_accepted_drafts_divide_the_time_of_a_step():
    """Every draft is accepted: each step emits four tokens."""
    outcome = serve([Arrival(1, 0, 16, 17)], rates=(1.0,), num_speculative_tokens=3)
    (one,) = outcome.served
    assert (outcome.speculation.acceptance_length, outcome.depth) == (4, 3)
    assert one.per_token == pytest.approx((STEP + 3 * DRAFT) / 4)
    assert outcome.stats.generation_tokens == 17


def test_the_second_request_waits_for_the_slot_of_the_first():
    first, second = serve([Arrival(1, 0, 16, 5), Arrival(2, 0.5, 16, 5)]).served
    whole = CHUNK + 4 * STEP
    assert first.whole == pytest.approx(whole)
    assert second.waited == pytest.approx(whole - 0.5)
    assert second.first == pytest.approx(whole - 0.5 + CHUNK)
    assert second.whole == pytest.approx(2 * whole - 0.5)


def test_a_request_arrives_as_another_ends():
    """Two at a time, one slot: from the third on each waits for the rest of the request before it."""
    load = [Arrival(i, 100 * i, 16, 5) for i in range(4)]
    outcome = replay(replace(service(), concurrency=2), load)
    whole = CHUNK + 4 * STEP
    assert [s.at for s in outcome.served] == pytest.approx([0, 0, whole, 2 * whole])
    assert [s.waited for s in outcome.served] == pytest.approx([0, whole, whole, whole])
    assert (outcome.seconds, outcome.idle) == (pytest.approx(4 * whole), pytest.approx(0))


def test_time_passes_without_requests():
    outcome = serve([Arrival(1, 0, 16, 1), Arrival(2, 100, 16, 1)])
    assert [s.whole for s in outcome.served] == pytest.approx([CHUNK, CHUNK])
    assert [s.per_token for s in outcome.served] == [None, None]
    assert (outcome.seconds, outcome.idle) == (pytest.approx(100 + CHUNK), pytest.approx(100 - CHUNK))


def test_a_full_queue_refuses():
    outcome = serve([Arrival(i, 0, 16, 2) for i in range(4)])
    assert (len(outcome.served), outcome.refused) == (2, 2)


def test_a_slot_is_taken_from_the_queue_before_the_next_arrival():
    outcome = serve([Arrival(i, 1.5 * CHUNK * i, 16, 2) for i in range(8)])
    assert (len(outcome.served), outcome.refused) == (8, 0)


def test_an_output_ends_where_the_engine_has_no_more_room():
    outcome = serve([Arrival(1, 0, 60, 9), Arrival(2, 0, 60, 4)])
    assert (outcome.stats.generation_tokens, outcome.cut) == (8, 1)
    with pytest.raises(
        ConfigError, match="line 2 of the load: the prompt has 64 tokens, a request at most 64"
    ):
        serve([Arrival(1, 0, 63, 9), Arrival(2, 0, 64, 1)])


def test_who_has_no_pages_is_preempted_and_served_nevertheless():
    outcome = serve([Arrival(i, 0, 16, 40) for i in (1, 2)], max_num_seqs=2, num_pages=5, page_size=16)
    assert outcome.stats.preemptions > 0
    assert outcome.stats.generation_tokens == 80


def test_prompts_that_begin_alike_share_pages():
    alike = [Arrival(i, 10 * i, 48, 2, None, (7,)) for i in (0, 1)]
    outcome = serve(alike)
    # Two of three pages are found: the last token is computed.
    assert [s.first for s in outcome.served] == pytest.approx([3 * CHUNK, CHUNK])
    assert outcome.stats.prefix_hits == 32
    assert serve([replace(a, blocks=(a.line,)) for a in alike]).stats.prefix_hits == 0
    assert serve(alike, prefix_cache=False).stats.prefix_hits == 0


def test_acceptance_is_that_of_the_rates():
    rates = (0.9, 0.6, 0.3)
    load = [Arrival(i, 0, 16, 48) for i in range(400)]
    config = engine_config(num_speculative_tokens=3, max_num_seqs=64)
    service = Service(TINY, config, Fixed(), rates, limits=QueueLimits(max_queued_requests=400))
    outcome = replay(service, load)
    own = outcome.speculation
    assert own.acceptance_length == pytest.approx(tokens_per_step(rates, 3), rel=0.02)
    kept = [own.steps, *own.accepted_per_position]
    assert [b / a for a, b in pairwise(kept)] == pytest.approx(rates, abs=0.03)


def test_a_request_may_have_rates_of_its_own():
    own = [Arrival(1, 0, 16, 17, (1.0,)), Arrival(2, 50, 16, 17, (0.0,))]
    outcome = serve(own, num_speculative_tokens=3)
    assert [s.per_token for s in outcome.served] == pytest.approx(
        [(STEP + 3 * DRAFT) / 4, (16 * STEP + 13 * 3 * DRAFT + 3 * DRAFT) / 16], rel=0.05
    )


def test_a_seed_is_one_outcome():
    load = [Arrival(i, 0.3 * i, 10 + i, 20 + i % 7) for i in range(12)]
    config: dict[str, Any] = {"num_speculative_tokens": 3, "max_num_seqs": 4, "adaptive_depth": True}
    config["rates"] = (0.7, 0.5)
    one, again, other = (serve(load, seed=seed, **config) for seed in (0, 0, 1))
    assert one == again
    assert one.served != other.served


@pytest.mark.parametrize(("draft", "rates", "deep"), [(0.01, (0.9,), True), (1.0, (0.9,), False)])
def test_depth_is_0_where_drafts_cost_more_than_they_gain(draft, rates, deep):
    load = [Arrival(i, 0, 16, 40) for i in range(2)] + [Arrival(i, 20 * i, 16, 40) for i in range(2, 20)]
    times = Fixed(draft)
    adaptive = serve(load, times, rates, num_speculative_tokens=3, adaptive_depth=True)
    without = serve(load, times, rates)
    speed = [sum(s.per_token or 0 for s in o.served) for o in (without, adaptive)]
    if deep:
        assert adaptive.depth > 2.5
        assert speed[1] < speed[0] / 2.5
    else:
        assert adaptive.stats.depth_steps[0] > 0.95 * adaptive.stats.steps
        assert speed[1] < 1.1 * speed[0]


def test_deferred_work_takes_its_time():
    load = [Arrival(1, 0, 16, 34)]
    config = {"num_speculative_tokens": 1, "adaptive_depth": True}
    times = Fixed(draft=5.0, flush=0.5)
    outcome = serve(load, times, (0.0,), **config)
    assert set(outcome.stats.depth_steps) == {0}
    assert outcome.served[0].whole == pytest.approx(CHUNK + 33 * STEP + 2 * 0.5)
    assert times.flushed[-2:] == [16, 16]


BASE = Deployment(DEEPSEEK_V3, Storage.of(DEEPSEEK_V3), GPUS["h200"], 1, 8)
PAGE = 64


def of_v3(load: list[Arrival], drafts: int, slots: int = 1) -> Outcome:
    config = EngineConfig(
        num_speculative_tokens=drafts,
        max_num_seqs=slots,
        adaptive_depth=True,
        prefill_chunk=1024,
        page_size=PAGE,
        dtype="bfloat16",
    )
    return replay(
        Service(DEEPSEEK_V3, fitted(config, BASE, config), LaunchTimes(BASE), (0.86, 0.7, 0.55)), load
    )


def test_one_request_of_deepseek_v3_takes_the_predicted_seconds():
    times, (one,) = LaunchTimes(BASE), of_v3([Arrival(1, 0, 1500, 41)], 0).served

    def chunk(begins: int, tokens: int) -> float:
        return times.launch(LaunchWork(0, 0, 0, tokens, -(-(begins + tokens // 2) // PAGE) * PAGE))

    assert one.first == pytest.approx(chunk(0, 1024) + chunk(1024, 1024))
    steps = [times.launch(LaunchWork(1, 0, -(-rows // PAGE) * PAGE)) for rows in range(1500, 1540)]
    assert one.per_token == pytest.approx(sum(steps) / 40)


def test_drafts_pay_for_one_user_of_deepseek_v3():
    load = [Arrival(i, 0, 256, 200) for i in range(2)]
    without, drafting = (of_v3(load, drafts) for drafts in (0, 3))
    assert drafting.seconds < 0.6 * without.seconds
    assert drafting.depth > 2.5
    length = drafting.speculation.acceptance_length
    assert length == pytest.approx(tokens_per_step((0.86, 0.7, 0.55), 3), rel=0.05)
    step = LaunchTimes(BASE).launch(LaunchWork(1, 3, 384))
    for one in drafting.served:
        assert one.per_token == pytest.approx(step / length, rel=0.1)


def test_what_does_not_fit_is_refused():
    small = replace(BASE, gpu=GPUS["h100"])
    with pytest.raises(ConfigError, match="without drafts 8 x H100: needs 88"):
        fitted(EngineConfig(num_speculative_tokens=0), small, EngineConfig())
    with pytest.raises(ConfigError, match="max_num_seqs = 4 does not divide over a data axis of 8"):
        fitted(EngineConfig(max_num_seqs=4), replace(BASE, data=8, model=1), EngineConfig())


def test_what_is_not_given_fits_the_memory():
    given = EngineConfig(max_num_seqs=4, max_model_len=8192)
    kept = fitted(given, BASE, given)
    pages = memory(replace(BASE, depth=3)).beside(0) // PAGE
    assert kept == replace(given, num_pages=pages)
    found = fitted(replace(given, prefill_chunk=8192, max_model_len=163840), BASE, LLMOptions())
    assert found == replace(kept, prefill_chunk=8192, max_model_len=163840, max_num_seqs=64)
    assert 64 * 8192 <= pages * PAGE < 128 * 8192
    # The longest request is one that the memory holds.
    small = replace(BASE, memory_fraction=0.65)
    least = fitted(replace(given, max_model_len=163840), small, LLMOptions())
    assert least.num_pages is not None
    assert 2 < least.max_model_len == least.held(least.num_pages) < 163840


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("keep", [1.0, 0.0])
def test_the_launches_are_those_of_the_device_with_text(shards, keep):
    """Where luck plays no part: every draft is accepted, or none."""
    config = engine_config(num_speculative_tokens=3, max_num_seqs=2 * shards, num_pages=6)
    load = [Arrival(i, 0, 5 + 3 * i, 30 - i) for i in range(12)]
    service = Service(TINY, config, Fixed(), (keep,), shards)
    counted = replay(service, load)
    language = Language(TINY.vocab_size, (keep,) * 3)
    device = Simulated(language, SlotMemory(2 * shards, 6, config.page_size, shards))
    device.traits = Traits(any_depth=False, by_rows=False)
    engine = Engine(TINY, config, device)
    first, rest = engine.warm_up_keys()
    device.compile([*first, *rest])
    for arrival in load:
        params = SamplingParams(temperature=0, max_tokens=arrival.output, ignore_eos=True)
        engine.submit(engine.make_request(arrival.tokens(TINY.vocab_size, 0), params))
    while engine.busy:
        engine.step()
    told, found = engine.stats(), counted.stats
    facts: list[Callable[[Any], Any]] = [
        *(lambda s: s.depth_steps, lambda s: s.accepted_per_position, lambda s: s.preemptions),
        *(lambda s: s.generation_tokens, lambda s: s.draft_tokens, lambda s: s.pages_used),
    ]
    for fact in facts:
        assert fact(found) == fact(told)
    assert told.preemptions > 0
    assert counted.speculation.acceptance_length == 1 + 3 * keep
