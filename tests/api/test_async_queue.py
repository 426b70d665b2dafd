"""AsyncLLM's queue: who gets a place, for how long, and who is refused."""

import asyncio
import threading
from dataclasses import replace

import pytest

from mtp_jax import (
    LLM,
    EngineStopped,
    LazyPrompt,
    Overloaded,
    RequestError,
    SamplingParams,
    Stream,
    StructuredOutput,
)
from tests.api.helpers import GREEDY, PROMPTS, last, serving, simulated


@pytest.fixture(scope="module")
def llm() -> LLM:
    return simulated()


def test_a_full_queue_refuses_before_it_tokenises(llm):
    async def run() -> None:
        async with serving(llm, max_queued_requests=3, max_queued_tokens=64) as allm:
            made = []

            def prompt() -> list[int]:
                made.append(threading.current_thread().name)
                return PROMPTS[0]

            tries = [allm.submit(LazyPrompt(prompt, 8), GREEDY) for _ in range(50)]
            got = await asyncio.gather(*tries, return_exceptions=True)
            refused = [g for g in got if isinstance(g, Overloaded)]
            assert len(made) == 50 - len(refused) == 3
            assert all(name.startswith("tokenise") for name in made)
            assert all(1 <= r.retry_after <= 60 for r in refused)
            for stream in got:
                if isinstance(stream, Stream):
                    assert len((await last(stream)).outputs[0].token_ids) == 24
            with pytest.raises(RequestError, match="n = 4"):
                await allm.submit(PROMPTS[0], SamplingParams(n=4))

    asyncio.run(run())


def test_prompts_with_grammars_are_tokenised_where_all_others_are(llm):
    """Else long prompts would take the threads of all grammars."""

    async def run() -> None:
        async with serving(llm) as allm:
            made = []

            def prompt() -> list[int]:
                made.append(threading.current_thread().name)
                return PROMPTS[0]

            shaped = SamplingParams(max_tokens=3, structured=StructuredOutput(regex="[0-9]{3}"))
            with pytest.raises(RequestError, match="tokenizer"):  # a grammar needs one
                await allm.submit(LazyPrompt(prompt, 8), shaped)
            assert made[0].startswith("tokenise")

    asyncio.run(run())


def test_a_request_that_gets_a_slot_leaves_the_queue(llm):
    """Those of the same prompt that have none yet stay."""

    async def run() -> None:
        async with serving(llm, max_queued_requests=4) as allm:
            slots = llm.engine.config.max_num_seqs
            stream = await allm.submit(PROMPTS[0], replace(GREEDY, n=4, max_tokens=60))
            assert (allm.admission.requests, allm.admission.tokens) == (4, 4 * len(PROMPTS[0]))
            await anext(stream)
            assert allm.admission.requests == 4 - slots
            assert allm.admission.tokens == (4 - slots) * len(PROMPTS[0])
            await last(await allm.submit(PROMPTS[1], replace(GREEDY, n=slots)))
            await last(stream)
            assert (allm.admission.requests, allm.admission.tokens) == (0, 0)

    asyncio.run(run())


def test_prompt_tokens_are_bounded_too(llm):
    async def run() -> None:
        async with serving(llm, max_queued_tokens=64) as allm:
            long = [[5] * 40] * 6
            got = await asyncio.gather(*(allm.submit(p, GREEDY) for p in long), return_exceptions=True)
            assert [type(g) for g in got] == [Stream] + [Overloaded] * 5
            assert isinstance(got[0], Stream)
            await last(got[0])
            alone = await allm.submit([5] * 100, GREEDY)  # more than the limit, but nobody else waits
            assert (await last(alone)).finished

    asyncio.run(run())


def test_prompts_that_are_still_to_be_made_count_as_long_as_they_will_be(llm):
    async def run() -> None:
        async with serving(llm, max_queued_tokens=64) as allm:
            go, made = threading.Event(), []

            def prompt() -> list[int]:
                made.append(1)
                go.wait(60)
                return PROMPTS[0]

            lazy = LazyPrompt(prompt, 30 * 4)
            first = asyncio.create_task(allm.submit(lazy, GREEDY))
            await asyncio.sleep(0)
            assert allm.admission.tokens == 31
            with pytest.raises(Overloaded, match="31 prompt tokens wait and 62 more came; at most 64 may"):
                await allm.submit(lazy, replace(GREEDY, n=2))
            go.set()
            stream = await first
            assert made == [1]
            assert (await last(stream)).finished

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "params", "options"),
    [
        ({"prompt": "a"}, GREEDY, {}),
        (None, GREEDY, {}),
        (lambda: PROMPTS[0], GREEDY, {}),
        (LazyPrompt(lambda: [], 0), GREEDY, {}),
        (PROMPTS[0], {"temperature": 0}, {}),
        (PROMPTS[0], GREEDY, {"timeout": "1"}),
        (PROMPTS[0], GREEDY, {"timeout": 10**400}),
        (PROMPTS[0], GREEDY, {"request_id": ["a"]}),
    ],
)
def test_what_is_no_request_at_all_is_refused(llm, prompt, params, options):
    async def run() -> None:
        async with serving(llm) as allm:
            with pytest.raises(RequestError):
                await allm.submit(prompt, params, **options)
            assert len((await last(await allm.submit(PROMPTS[0], GREEDY))).outputs[0].token_ids) == 24

    asyncio.run(run())


def prompt_in_the_making() -> tuple[LazyPrompt, threading.Event, threading.Event]:
    """A prompt; an event that is set once a thread makes it; an event that the thread waits for."""
    begun, go = threading.Event(), threading.Event()

    def make() -> list[int]:
        begun.set()
        go.wait(60)
        return PROMPTS[0]

    return LazyPrompt(make, 8), begun, go


def test_a_request_can_be_aborted_while_it_is_submitted(llm):
    """Its prompt is being tokenised, or its grammar compiled."""

    async def run() -> None:
        async with serving(llm) as allm:
            prompt, begun, go = prompt_in_the_making()
            submitting = asyncio.create_task(allm.submit(prompt, GREEDY, request_id="mine"))
            await asyncio.to_thread(begun.wait, 60)
            with pytest.raises(RequestError, match="'mine' is in use"):
                await allm.submit(PROMPTS[0], GREEDY, request_id="mine")
            allm.abort("mine")
            go.set()
            output = await last(await submitting)
            assert output.outputs[0].finish_reason == "abort"
            again = await last(await allm.submit(PROMPTS[0], GREEDY, request_id="mine"))
            assert again.outputs[0].finish_reason == "length"

    asyncio.run(run())


def test_a_drain_waits_for_prompts_that_are_being_made(llm):
    async def run() -> None:
        async with serving(llm) as allm:
            prompt, begun, go = prompt_in_the_making()
            submitting = asyncio.create_task(allm.submit(prompt, GREEDY))
            await asyncio.to_thread(begun.wait, 60)
            assert (allm.live, await allm.drain(0)) == (1, False)
            go.set()
            with pytest.raises(EngineStopped, match="shutting down"):
                await submitting
            assert (allm.live, await allm.drain(60)) == (0, True)
            assert (allm.admission.requests, allm.admission.tokens) == (0, 0)

    asyncio.run(run())


def test_made_up_names_are_nobodys(llm):
    async def run() -> None:
        async with serving(llm) as allm:
            names = [None, "request-1", "request-2", None, None]
            streams = [await allm.submit(PROMPTS[0], GREEDY, request_id=name) for name in names]
            assert [s.request_id for s in streams] == [
                "request-0",
                "request-1",
                "request-2",
                "request-3",
                "request-4",
            ]
            for stream in streams:
                await last(stream)

    asyncio.run(run())


def test_what_a_caller_does_to_its_parameters_later_harms_nobody(llm):
    async def run() -> None:
        async with serving(llm) as allm:
            bias = {5: 1.0}
            params = replace(GREEDY, logit_bias=bias)
            streams = [await allm.submit(PROMPTS[0], params) for _ in range(4)]  # two of them wait for a slot
            bias[10**6] = 1.0
            outputs = [await last(stream) for stream in streams]
            assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 4

    asyncio.run(run())


def test_what_cannot_be_served_leaves_no_trace(llm):
    async def run() -> None:
        async with serving(llm) as allm:
            for prompt in ([], [10**6], [5] * 1000):
                with pytest.raises(RequestError):
                    await allm.submit(prompt, GREEDY)

    asyncio.run(run())
