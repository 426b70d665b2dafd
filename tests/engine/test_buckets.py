"""Whatever is served together, prepared executables cover every launch, and each writes inside its pages."""

from dataclasses import replace

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from mtp_jax.decode.keys import PrefillKey, SamplingMode, StepKey
from mtp_jax.engine.buckets import chunks, keys_for, mode_of, prefill_together, warm_up_keys
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.request import Request, SamplingParams
from tests.engine.device import on_device
from tests.models import finish

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
    assert list(chunks(replace(CONFIG, prefill_chunk=chunk), tokens)) == sizes


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
    mode = mode_of(CONFIG, requests)
    assert (mode.drafting, mode.logprobs) == (drafting, logprobs)


def waiting(*lengths: int) -> list[Request]:
    requests = [Request(i, (1,) * n, SamplingParams(), 0, 1, 3, 2) for i, n in enumerate(lengths)]
    for r in requests:
        r.take_up()
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
    found = prefill_together(CONFIG, [waiting(*n) for n in lengths])
    assert [[len(r.prompt) for r in w] for w in found] == together


def test_short_prompts_are_prefilled_over_few_pages():
    """And no server compiles a chunk that is longer than what its page table holds."""
    config = EngineConfig(
        num_speculative_tokens=3, max_num_seqs=8, max_model_len=4093, page_size=64, prefill_chunk=1024
    )
    keys = [k for some in warm_up_keys(config, 1, structured=False) for k in some]
    found = {(k.tokens, k.pages) for k in keys if isinstance(k, PrefillKey)}
    shorter = {(16, 1), (64, 1), (16, 4), (64, 4), (256, 4), (16, 16), (64, 16), (256, 16), (1024, 16)}
    assert found == shorter | {(size, 64) for size in (16, 64, 256, 1024)}
    requests = [r for n in (9, 60, 70) for r in waiting(n)]
    found = [k for k in keys_for(config, requests, 1, slots=0, pages=64) if isinstance(k, PrefillKey)]
    assert {(k.tokens, k.pages) for k in found if k.prompts == 1} == {(16, 1), (64, 1), (256, 4)}


@pytest.mark.parametrize(
    ("page_size", "steps", "prefills"),
    [
        (16, {16, 64, 256}, {4, 16, 64, 256}),
        (64, {4, 16, 64}, {1, 4, 16, 64}),
        (128, {2, 8, 32}, {1, 4, 16, 32}),
        (4096, {1}, {1}),
    ],
)
def test_a_server_compiles_steps_and_prefills_of_all_their_widths(page_size, steps, prefills):
    config = EngineConfig(
        num_speculative_tokens=3, max_num_seqs=8, max_model_len=4093, page_size=page_size, adaptive_depth=True
    )
    keys = [k for some in warm_up_keys(config, 1, structured=False) for k in some]
    assert {k.pages for k in keys if isinstance(k, StepKey)} == steps
    assert {k.pages for k in keys if isinstance(k, PrefillKey)} == prefills
    for mode in (SamplingMode(), SamplingMode(config.drafting, config.verifier)):
        found = {(k.slots, k.pages, k.depth) for k in keys if isinstance(k, StepKey) and k.mode == mode}
        assert {(b, p, d) for b in (1, 8) for p in steps for d in (0, 1, 3)} <= found


@pytest.mark.parametrize("every_size", [False, True])
def test_steps_over_data_shards_have_all_slots(every_size):
    """The first few slots are those of one shard; a step of them would be split over all."""
    config = EngineConfig(max_num_seqs=8, max_model_len=4093, adaptive_depth=True)
    keys = [k for some in warm_up_keys(config, 2, structured=True) for k in some]
    keys += keys_for(config, waiting(9, 60), 2, slots=1, pages=64, every_size=every_size)
    assert {k.slots for k in keys if isinstance(k, StepKey)} == {8}


def test_nothing_is_compiled_for_nobody():
    assert keys_for(CONFIG, [], 1, slots=0, pages=9) == []


JOB = st.tuples(
    st.integers(1, 300), st.integers(1, 60), st.sampled_from([None, 0, 1, 3]), st.sampled_from([0.0, 1.0])
)


@settings(deadline=None, max_examples=120, phases=[Phase.explicit, Phase.generate])
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
    assert all(r.finish_reason in ("length", "stop") for r in requests)
    assert all(len(r.output) == r.max_tokens for r in requests if r.finish_reason == "length")
    assert crowded or not any(r.preemptions for r in requests)
    assert engine.stats().pages_used == 0
