"""Whatever is served together, prepared executables cover every launch, and each writes inside its pages."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from mtp_jax.decode.keys import SamplingMode, StepKey, cheapest
from mtp_jax.decode.launches import ON_CPU, UNROLLED, Traits
from mtp_jax.engine.buckets import Buckets
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.text.rules import Constraints
from tests.engine.device import on_device
from tests.models import finish

ON_GPU, WHOLE_TABLES = (Traits(by_rows=False, any_width=any_width) for any_width in (True, False))
CONFIG = EngineConfig(num_speculative_tokens=3, max_num_seqs=8, max_model_len=512, page_size=16)


@pytest.mark.parametrize(
    ("chunk", "tokens", "sizes"),
    [
        (256, 1, [16]),
        (256, 16, [16]),
        (256, 17, [64]),
        (256, 256, [256]),
        (256, 300, [256, 64]),
        (256, 512, [256, 256]),
        (100, 230, [100, 100, 64]),
        (7, 15, [7, 7, 7]),
        (1, 2, [1, 1]),
    ],
)
def test_chunks(chunk, tokens, sizes):
    assert list(Buckets(replace(CONFIG, prefill_chunk=chunk)).chunks(tokens)) == sizes


@pytest.mark.parametrize(
    ("chunk", "tokens", "sizes"),
    [
        (256, 16, [16]),
        (256, 65, [64, 16]),
        (256, 128, [64, 64]),
        (256, 192, [64, 64, 64]),
        (256, 193, [256]),
        (256, 400, [256, 64, 64, 16]),
        (1024, 500, [256, 256]),
        (100, 90, [100]),
        (64, 20, [64]),
    ],
)
def test_chunks_where_padding_takes_time(chunk, tokens, sizes):
    """No more rows than chunks of 64 tokens give; the longer chunk where it has the same."""
    assert list(Buckets(replace(CONFIG, prefill_chunk=chunk), traits=ON_CPU).chunks(tokens)) == sizes


@pytest.mark.parametrize(
    ("wanted", "drafting", "logprobs"),
    [
        ([{"temperature": 0}], None, None),
        ([{"temperature": 0, "logprobs": 0}], None, 0),
        ([{"temperature": 0, "logprobs": 3}, {"temperature": 0}], None, 5),
        ([{"temperature": 0, "logprobs": 6}], None, 20),
        ([{"temperature": 0}, {"temperature": 0.1}], "sampled", None),
        ([{"temperature": 0, "repetition_penalty": 1.1}], "sampled", None),
        ([{"temperature": 0, "presence_penalty": 0.1}], "sampled", None),
        ([{"temperature": 0, "frequency_penalty": -0.1}], "sampled", None),
        ([{"temperature": 0, "logit_bias": {1: 1.0}}], "sampled", None),
        ([{"temperature": 0, "min_tokens": 1}], "sampled", None),
        ([{"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}], None, None),
    ],
)
def test_mode_is_greedy_only_if_argmax_decides_for_all(wanted, drafting, logprobs):
    requests = [Request(i, (1,), SamplingParams(**w), 0, 1, 3, 2) for i, w in enumerate(wanted)]
    mode = Buckets(CONFIG).mode(requests)
    assert (mode.drafting, mode.logprobs) == (drafting, logprobs)


def all_keys(programs: Buckets) -> list[Any]:
    """Everything that a server compiles."""
    first, rest = programs.server(structured=True)
    return first + rest


def waiting(*lengths: int) -> list[Request]:
    requests = [Request(i, (1,) * n, SamplingParams(), 0, 2, 3, 2) for i, n in enumerate(lengths)]
    for r in requests:
        r.residence.take_up(r.prompt, [])
    return requests


@pytest.mark.parametrize(
    ("lengths", "together"),
    [
        ([[16, 9, 16, 2, 5]], [[16, 9, 16, 2]]),
        ([[16, 9, 16]], [[16, 9, 16]]),
        ([[16, 300, 9, 40, 2, 5]], [[16, 9, 2, 5]]),  # longer ones wait
        ([[64, 9, 50, 40, 60]], [[64, 50, 40, 60]]),  # shorter ones, too
        ([[200, 200, 200, 200]], [[200]]),  # 2 x 256 tokens are more than a chunk
        ([[16, 16, 16, 16], [3]], [[16, 16, 16, 16], [3]]),
        ([[16, 16, 16, 16], []], [[16, 16, 16, 16], []]),
        ([[16, 16, 16, 16], [40]], [[16], [40]]),
    ],
)
def test_short_prompts_are_prefilled_together(lengths, together):
    found = Buckets(CONFIG, len(lengths)).next_prompts([waiting(*n) for n in lengths])
    assert found is not None
    assert [[len(r.prompt) for r in w] for w in found.requests] == together
    assert found.tokens >= max(map(max, filter(None, together)))
    most = max(map(len, together)) + 1
    rows = found.rows(most)
    assert [r for r in rows if r] == [*found]
    assert len(rows) == most * len(lengths)


def test_nobody_waits():
    assert Buckets(CONFIG, 2).next_prompts([[], []]) is None


DEFAULT = EngineConfig(adaptive_depth=True)  # what the server makes of the demo model, which has a tokenizer


def steps_of(keys) -> list[StepKey]:
    """Without a chunk."""
    return [k for k in keys if not k.tokens]


def chunks_of(keys) -> list[StepKey]:
    """With one, beside windows or alone."""
    return [k for k in keys if k.tokens]


def count(keys: list[Any]) -> int:
    """A structured step is two programs."""
    return len(keys) + sum(isinstance(k, StepKey) and k.mode.structured for k in keys)


@pytest.mark.parametrize("sizes", [{}, {"max_model_len": 8192}, {"max_num_seqs": 128, "prefill_chunk": 8192}])
def test_a_server_on_a_gpu_has_4_programs_at_first_and_12_in_all(sizes):
    """Each takes a minute of compilation, and disturbs the others."""
    first, rest = Buckets(replace(DEFAULT, **sizes), 1, ON_GPU).server(structured=True)
    assert count(first) == 4
    assert count(first + rest) == (12 if sizes.get("max_num_seqs") else 11)


@pytest.mark.parametrize(("traits", "most"), [(UNROLLED, 30), (ON_CPU, 8), (ON_GPU, 11)])
def test_a_default_server_compiles_few_programs(traits, most):
    keys: list[Any] = all_keys(Buckets(DEFAULT, 1, traits))
    assert len(set(keys)) == len(keys)
    assert count(keys) <= most
    first, rest = Buckets(DEFAULT, 1, traits).server(structured=True)
    assert keys == first + rest
    assert len(first) < len(rest)


@pytest.mark.parametrize(("traits", "most"), [(UNROLLED, 40), (ON_CPU, 10), (ON_GPU, 12)])
def test_a_server_of_trees_has_chains(traits, most):
    """A step of no more drafts than a tree has steps is a chain, more drafts are a tree."""
    config = replace(DEFAULT, tree="4x3x12", num_speculative_tokens=12, verifier="coupled")
    keys: list[Any] = all_keys(Buckets(config, 1, traits))
    assert len(keys) <= most
    for slots, depth in itertools.product((1, 8), (1, 3, 12)):
        need = StepKey(slots, depth, 1, SamplingMode("sampled", "coupled"))
        found = cheapest(keys, need)
        assert found is not None
        assert (found.room > 3) == (depth > 3)


@pytest.mark.parametrize("traits", [UNROLLED, ON_CPU, ON_GPU, WHOLE_TABLES])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"max_model_len": 8192}, {"max_num_seqs": 3}, {"max_num_seqs": 1}, {"max_num_seqs": 64}],
)
def test_every_program_of_a_server_is_the_cheapest_for_something(sizes, traits):
    keys: list[Any] = all_keys(Buckets(replace(DEFAULT, **sizes), 1, traits))
    for key in keys:
        able = [k for k in keys if k.covers(key)]
        assert [k for k in able if k.cost <= key.cost] == [key]


@pytest.mark.parametrize(
    ("page_size", "longest", "widths"),
    [
        (64, 2045, {32}),
        (16, 4093, {256}),
        (64, 8189, {32, 128}),
        (128, 8189, {16, 64}),
        (64, 32765, {32, 128, 512}),
        (4096, 4093, {1}),
    ],
)
def test_a_server_compiles_steps_and_chunks_of_all_their_widths(page_size, longest, widths):
    config = replace(DEFAULT, max_model_len=longest, page_size=page_size)
    keys = all_keys(Buckets(config))
    sampled = SamplingMode(config.drafting, config.verifier)
    found = {(k.slots, k.pages, k.depth) for k in steps_of(keys) if k.mode == sampled}
    ends = {(b, p, d) for b in (1, 8) for p in widths for d in (0, 1, 3)}
    assert found == ends | {(b, min(widths), d) for b in (2, 4) for d in (0, 1, 3)}
    alone = {(k.tokens, k.pages) for k in chunks_of(keys) if not k.slots and k.mode == SamplingMode()}
    assert alone == {(256, p) for p in widths} | {(t, min(widths)) for t in (16, 64)}
    beside = {(k.tokens, k.prompts, k.depth, k.pages) for k in chunks_of(keys) if k.mode == sampled}
    assert beside == {
        (t, n, d, p)
        for t, n in ((256, 1), (64, 1), (64, 4))
        for d in (0, 3)
        for p in (widths if t == 256 else {min(widths)})
    }


@pytest.mark.parametrize(
    ("lengths", "slots", "shapes"),
    [
        ([40], 0, {(64, 1)}),  # nothing runs beside a single prompt
        ([300], 0, {(256, 1), (64, 1)}),
        ([9, 60, 70], 4, {(16, 1), (64, 1), (256, 1)}),
        ([9, 9, 9, 60], 4, {(16, 1), (16, 4), (64, 1)}),
    ],
)
def test_chunks_that_requests_need(lengths, slots, shapes):
    keys = chunks_of(Buckets(CONFIG).prepare(waiting(*lengths)))
    assert {(k.tokens, k.prompts) for k in keys} == shapes
    assert {k.slots for k in keys} == {slots}


@pytest.mark.parametrize(("traits", "depths"), [(Traits(), {3}), (UNROLLED, {0, 3})])
def test_prompts_go_along_at_the_most_drafts_where_that_serves_every_depth(traits, depths):
    requests = [replace(r, fixed_depth=False) for r in waiting(9, 9)]
    keys = Buckets(CONFIG, traits=traits).prepare(requests)
    assert {k.depth for k in chunks_of(keys)} == depths
    assert {k.depth for k in steps_of(keys)} >= {0, 3}


def test_who_wants_one_token_needs_no_step():
    """It comes with the last chunk of the prompt."""
    several = [replace(r, max_tokens=1) for r in waiting(9, 60)]
    keys = Buckets(CONFIG).prepare(several)
    assert not steps_of(keys)
    assert {(k.slots, k.tokens) for k in chunks_of(keys)} == {(0, 16), (0, 64)}


@pytest.mark.parametrize("every_size", [False, True])
def test_steps_over_data_shards_have_all_slots(every_size):
    """The first few slots are those of one shard; a step of them would be split over all."""
    config = EngineConfig(max_num_seqs=8, max_model_len=4093, adaptive_depth=True)
    keys = all_keys(Buckets(config, 2))
    keys += Buckets(config, 2).prepare(waiting(9, 60), every_size)
    steps: list[Any] = keys
    assert {k.slots for k in steps if k.slots} == {8}


def test_nothing_is_compiled_for_nobody():
    assert Buckets(CONFIG).prepare([]) == []


JOB = st.tuples(
    st.integers(1, 300), st.integers(1, 60), st.sampled_from([None, 0, 1, 3]), st.sampled_from([0.0, 1.0])
)


@pytest.mark.rest
@settings(deadline=None, max_examples=60, phases=[Phase.explicit, Phase.generate])
@example(  # one deep request ends early; only its deep executable is there when the long one fills 256 rows
    jobs=[(254, 24, 0, 0.0), (3, 4, 3, 0.0)],
    page_size=16,
    chunk=16,
    slots=4,
    shards=1,
    seed=0,
    stop=0.0,
    keep=1.0,
    later=0,
    crowded=False,
    adaptive=False,
)
@example(  # a deeper executable than asked for would write past 256 rows, for which its request has pages
    jobs=[(174, 39, None, 0.0), (210, 47, 1, 1.0)],
    page_size=64,
    chunk=50,
    slots=2,
    shards=1,
    seed=0,
    stop=0.0,
    keep=0.0,
    later=0,
    crowded=False,
    adaptive=False,
)
@given(
    jobs=st.lists(JOB, min_size=1, max_size=10),
    page_size=st.sampled_from([1, 7, 16, 64]),
    chunk=st.sampled_from([1, 16, 50, 256]),
    slots=st.sampled_from([2, 6, 8]),
    shards=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
    stop=st.sampled_from([0.0, 0.1]),
    keep=st.sampled_from([0.0, 0.7, 1.0]),
    later=st.integers(0, 12),
    crowded=st.booleans(),
    adaptive=st.booleans(),
)
def test_prepared_executables_cover_everything(
    jobs, page_size, chunk, slots, shards, seed, stop, keep, later, crowded, adaptive
):
    """Half of the requests come ``later``: so many steps after the others, prepared for what runs by then.

    crowded: there are pages for a single long request, so others are preempted. All prompts begin alike.
    """
    engine, _ = on_device(
        seed,
        stop,
        keep,
        shards,
        max_model_len=360,
        page_size=page_size,
        prefill_chunk=chunk,
        max_num_seqs=slots,
        num_pages=-(-364 // page_size) if crowded else None,
        adaptive_depth=adaptive,
    )
    requests = [
        engine.make_request(
            [5] * prompt,
            SamplingParams(temperature=heat, max_tokens=tokens, num_speculative_tokens=depth),
        )
        for prompt, tokens, depth, heat in jobs
    ]
    for group in (requests[::2], requests[1::2]):
        engine.prepare(group)
        for r in group:
            engine.submit(r)
        for _ in range(later):
            if engine.busy:
                engine.step()
    finish(engine)
    assert all(r.progress.finish_reason in ("length", "stop") for r in requests)
    assert all(
        len(r.progress.output) == r.max_tokens for r in requests if r.progress.finish_reason == "length"
    )
    assert crowded or not any(r.residence.preemptions for r in requests)
    assert engine.stats().pages_used == 0


ASKED = st.tuples(
    st.integers(1, 300),
    st.integers(1, 60),
    st.sampled_from([None, 0, 1, 2, 3]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([None, 0, 5, 20]),
    st.sampled_from([None, 0, 20]),
)


@pytest.mark.rest
@settings(deadline=None, max_examples=50, phases=[Phase.explicit, Phase.generate])
@given(
    jobs=st.lists(ASKED, min_size=1, max_size=12),
    page_size=st.sampled_from([16, 64]),
    slots=st.sampled_from([1, 3, 8]),
    depth=st.sampled_from([0, 1, 3]),
    shards=st.sampled_from([1, 2]),
    adaptive=st.booleans(),
    seed=st.integers(0, 1000),
    warm=st.integers(0, 40),
    crowded=st.booleans(),
)
def test_a_server_serves_everything_with_what_it_has_compiled(
    jobs, page_size, slots, depth, shards, adaptive, seed, warm, crowded
):
    """Only its first programs at the start; the others come one by one, after ``warm`` steps each."""
    slots *= shards
    engine, _ = on_device(
        seed,
        stop=0.02,
        keep=0.7,
        shards=shards,
        max_model_len=360,
        page_size=page_size,
        prefill_chunk=64,
        max_num_seqs=slots,
        num_pages=-(-364 // page_size) if crowded else None,
        num_speculative_tokens=depth,
        adaptive_depth=adaptive,
    )
    first, rest = engine.warm_up_keys()
    engine.runner.compile(first)
    requests = []
    for prompt, tokens, most, heat, logprobs, of_prompt in jobs:
        params = SamplingParams(
            temperature=heat,
            max_tokens=tokens,
            num_speculative_tokens=None if most is None else min(most, depth),
            logprobs=logprobs,
            prompt_logprobs=of_prompt,
        )
        requests.append(engine.make_request([5] * prompt, params))
        engine.submit(requests[-1])
        for _ in range(3):
            engine.step()
    for key in rest:
        for _ in range(warm):
            engine.step()
        engine.runner.compile([key])
    finish(engine)
    assert all(r.progress.finish_reason in ("length", "stop") for r in requests)
    whole = [r for r in requests if r.progress.finish_reason == "length"]
    assert all(len(r.progress.output) == r.max_tokens for r in whole)
    assert engine.stats().pages_used == 0


SHAPE = st.tuples(st.integers(1, 2044), st.sampled_from([0, 1, 2, 3]), st.sampled_from([0.0, 0.9]))


@settings(deadline=None, max_examples=200)
@given(
    rows=st.lists(SHAPE, min_size=1, max_size=8),
    logprobs=st.sampled_from([None, 0, 5, 20]),
    structured=st.booleans(),
    prefilled=st.integers(0, 30),
    traits=st.sampled_from([UNROLLED, ON_CPU, ON_GPU, WHOLE_TABLES]),
)
def test_every_piece_of_a_default_engines_work_is_covered(rows, logprobs, structured, prefilled, traits):
    """By the first programs already: at any history, depth, number of rows and way to choose tokens."""
    work = Buckets(DEFAULT, 1, traits)
    first, _ = work.server(structured=True)
    running = []
    for slot, (length, depth, heat) in enumerate(rows):
        params = SamplingParams(temperature=heat, logprobs=logprobs, prompt_logprobs=logprobs)
        constraints = Constraints(None, []) if structured else None
        request = Request(slot, (1,) * length, params, 0, 4, depth, 2, constraints=constraints)
        request.residence.take_up(request.prompt, [])
        request.residence.slot, request.progress.rows_bound = slot, length + 1
        running.append(request)
    for request in running:
        request.residence.prefilled = min(prefilled * 64, (len(request.prompt) - 1) // 64 * 64)
    half = len(running) // 2
    prompts = work.next_prompts([running[half:]])
    assert prompts is not None
    programs = [k for k in first if isinstance(k, StepKey)]

    def covered(need: StepKey) -> bool:
        return any(k.covers(need) for k in programs)

    for need in (work.step(running, depth) for depth in (0, 1, 3)):
        assert covered(need), need
    alone = work.step([], 0, prompts.first(1))
    assert any(k.covers(alone) and not k.slots for k in programs), alone
    for need in (work.step(running[:half], d, prompts.first(1)) for d in ((0, 1, 3) if half else (0,))):
        assert covered(need) or traits.any_depth, need  # else the prompts go first, alone
