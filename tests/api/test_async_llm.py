"""AsyncLLM: what coroutines see of the engine."""

import asyncio
import threading
import time

import pytest

from mtp_jax import (
    LLM,
    AsyncLLM,
    EngineStopped,
    LazyPrompt,
    RequestError,
    RequestOutput,
    SamplingParams,
    Stream,
)
from mtp_jax.engine.request import Request
from tests.api.helpers import GREEDY, PROMPTS, last, serving, simulated, until
from tests.models import slowed


@pytest.fixture(scope="module")
def llm() -> LLM:
    return simulated()


def ids(output: RequestOutput) -> list[list[int]]:
    return [o.token_ids for o in output.outputs]


def test_concurrent_outputs_equal_those_of_llm(llm):
    params = [GREEDY, SamplingParams(temperature=1, seed=3, max_tokens=20, n=2), GREEDY]
    expected = llm.generate(PROMPTS, params)

    async def run() -> list[RequestOutput]:
        async with serving(llm) as allm:
            return await asyncio.gather(
                *(last(allm.generate(p, q)) for p, q in zip(PROMPTS, params, strict=True))
            )

    outputs = asyncio.run(run())
    assert [ids(o) for o in outputs] == [ids(o) for o in expected]
    assert outputs[0].speculation.acceptance_length > 1.5


def test_the_output_grows(llm):
    async def run() -> list[RequestOutput]:
        async with serving(llm) as allm:
            return [output async for output in allm.generate(PROMPTS[0], GREEDY)]

    outputs = asyncio.run(run())
    lengths = [len(o.outputs[0].token_ids) for o in outputs]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 24
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    full = outputs[-1].outputs[0].token_ids
    assert [o.outputs[0].token_ids for o in outputs] == [full[:n] for n in lengths]


def test_a_slow_reader_sees_the_newest_state(llm):
    async def run() -> list[RequestOutput]:
        async with serving(llm) as allm:
            stream = await allm.submit(PROMPTS[0], GREEDY)
            await until(lambda: allm.live == 0)
            return [output async for output in stream]

    (only,) = asyncio.run(run())
    assert len(only.outputs[0].token_ids) == 24


def test_leaving_the_iteration_aborts(llm):
    async def run() -> None:
        async with serving(llm) as allm:
            outputs = allm.generate(
                PROMPTS[0], SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
            )
            async for _ in outputs:
                break
            await outputs.aclose()
            await until(lambda: allm.live == 0)

    aborted = llm.engine.stats().finished.get("abort", 0)
    with slowed(llm.engine):
        asyncio.run(run())
    assert llm.engine.stats().finished["abort"] == aborted + 1


def test_cancelling_aborts_wherever_the_request_is(llm):
    async def run() -> None:
        async with serving(llm) as allm:
            long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
            tasks = [asyncio.create_task(last(allm.generate(PROMPTS[i % 3], long))) for i in range(8)]
            await until(lambda: allm.live == 8)
            for task in tasks[2:]:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(d, asyncio.CancelledError) for d in done[2:])
            kept = [d for d in done if isinstance(d, RequestOutput)]
            assert [o.outputs[0].finish_reason for o in kept] == ["length"] * 2

    aborted = llm.engine.stats().finished.get("abort", 0)
    with slowed(llm.engine):
        asyncio.run(run())
    assert llm.engine.stats().finished["abort"] == aborted + 6


def test_abort_by_name_gives_the_text_so_far(llm):
    async def run() -> RequestOutput:
        async with serving(llm) as allm:
            params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
            stream = await allm.submit(PROMPTS[0], params, request_id="mine")
            with pytest.raises(RequestError, match="in use"):
                await allm.submit(PROMPTS[0], params, request_id="mine")
            await anext(stream)
            allm.abort("mine")
            allm.abort("nobody's")
            return await last(stream)

    output = asyncio.run(run())
    assert output.outputs[0].finish_reason == "abort"
    assert 0 < len(output.outputs[0].token_ids) < 120


def test_drain_ends_what_runs_and_takes_nothing_new(llm):
    async def run() -> None:
        async with serving(llm) as allm:
            task = asyncio.create_task(last(allm.generate(PROMPTS[0], GREEDY)))
            await until(lambda: allm.live == 1)
            assert await allm.drain(60)
            with pytest.raises(EngineStopped, match="shutting down"):
                await allm.submit(PROMPTS[0], GREEDY)
            assert len((await task).outputs[0].token_ids) == 24

    asyncio.run(run())


def test_drain_aborts_what_takes_too_long(llm):
    async def run() -> None:
        async with serving(llm) as allm:
            step, go = llm.engine.step, threading.Event()
            llm.engine.step = lambda: go.wait(60) and step()  # type: ignore[method-assign]
            try:
                stream = await allm.submit(PROMPTS[0], GREEDY)
                drained = await allm.drain(0.05)
                go.set()
                assert not drained
                assert (await last(stream)).outputs[0].finish_reason == "abort"
            finally:
                go.set()
                del llm.engine.step

    asyncio.run(run())


def test_a_stuck_step_shows_in_its_age(llm):
    async def run() -> None:
        async with serving(llm) as allm:
            await until(lambda: allm.step_age == 0)  # programs may be rehearsed at the start
            step, go = llm.engine.step, threading.Event()
            llm.engine.step = lambda: go.wait(60) and step()  # type: ignore[method-assign]
            try:
                stream = await allm.submit(PROMPTS[0], GREEDY)
                await until(lambda: allm.step_age > 0.2)
            finally:
                go.set()
                del llm.engine.step
            await last(stream)
            await until(lambda: allm.step_age == 0)

    asyncio.run(run())


def test_time_runs_from_arrival_whatever_makes_the_prompt_takes(llm):
    def slow() -> list[int]:
        time.sleep(0.3)
        return PROMPTS[0]

    async def run() -> None:
        async with serving(llm) as allm:
            output = await last(allm.generate(LazyPrompt(slow, 8), GREEDY))
            assert output.timing.first_token is not None
            assert output.timing.first_token > 0.3
            late = await last(allm.generate(LazyPrompt(slow, 8), GREEDY, timeout=0.2))
            assert (late.outputs[0].finish_reason, late.outputs[0].token_ids) == ("timeout", [])

    asyncio.run(run())


def test_prompts_do_not_wait_for_work_that_goes_nowhere_near_the_engine(llm):
    async def run() -> None:
        async with serving(llm) as allm:
            go = threading.Event()
            beside = [asyncio.create_task(allm.off_loop(go.wait)) for _ in range(8)]
            try:
                async with asyncio.timeout(60):
                    output = await last(allm.generate(LazyPrompt(lambda: PROMPTS[0], 8), GREEDY))
                assert len(output.outputs[0].token_ids) == 24
            finally:
                go.set()
                assert all(await asyncio.gather(*beside))

    asyncio.run(run())


def test_an_idle_engine_does_not_step(llm, monkeypatch):
    calls = []
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: calls.append(1) or step())

    async def run() -> None:
        async with serving(llm) as allm:
            await last(allm.generate(PROMPTS[0], GREEDY))
            await until(lambda: allm.step_age == 0)
            before = len(calls)
            for key in llm.engine.runner.keys:
                allm._thread.warm_up(key)
            await asyncio.sleep(0.1)
            assert len(calls) == before > 0
            assert await allm.on_engine(lambda: threading.current_thread().name) == "engine"

    asyncio.run(run())


def test_a_failure_of_one_text_fails_that_request_alone(llm, monkeypatch):
    async def run() -> None:
        async with serving(llm) as allm:
            bad = await allm.submit(PROMPTS[0], GREEDY)
            (state,) = allm._submissions._by_prompt
            monkeypatch.setattr(state.completions[0], "advance", lambda engine: 1 / 0)
            good = await last(allm.generate(PROMPTS[1], GREEDY))
            assert (await last(bad)).outputs[0].finish_reason == "error"
            assert good.outputs[0].finish_reason == "length"

    asyncio.run(run())


def test_a_failed_engine_fails_everybody_and_says_so(caplog):
    llm = simulated()

    async def run() -> None:
        async with AsyncLLM(llm) as allm:
            llm.engine.step = lambda: 1 / 0  # type: ignore[method-assign, return-value]
            streams = [await allm.submit(p, GREEDY) for p in PROMPTS]
            for stream in streams:
                with pytest.raises(EngineStopped, match="ZeroDivisionError"):
                    await last(stream)
            assert isinstance(allm.error, ZeroDivisionError)
            with pytest.raises(EngineStopped, match="has failed"):
                await allm.submit(PROMPTS[0], GREEDY)
            with pytest.raises(EngineStopped, match="has failed"):
                await allm.on_engine(lambda: None)
            assert (allm.live, allm.admission.requests) == (0, 0)

    asyncio.run(run())
    assert "the engine failed" in caplog.text


def test_calls_that_a_failed_engine_did_not_get_to_fail():
    broken = simulated()
    begun, go = threading.Event(), threading.Event()

    def step() -> list[Request]:
        begun.set()
        go.wait(60)
        raise ArithmeticError

    broken.engine.step = step

    async def run() -> None:
        async with AsyncLLM(broken) as allm:
            await allm.submit(PROMPTS[0], GREEDY)
            await until(begun.is_set)
            call = asyncio.create_task(allm.on_engine(lambda: None))
            await asyncio.sleep(0)
            go.set()
            with pytest.raises(EngineStopped, match="the engine failed: ArithmeticError"):
                await asyncio.wait_for(call, 60)

    asyncio.run(run())


def test_a_closed_engine_says_so(llm):
    async def run() -> None:
        async with serving(llm) as allm:
            assert await allm.on_engine(lambda: 3) == 3
        with pytest.raises(EngineStopped, match="has been closed"):
            await asyncio.wait_for(allm.on_engine(lambda: 3), 60)

    asyncio.run(run())


def test_who_does_not_wait_for_a_call_does_no_harm(llm, monkeypatch):
    step, begun, go, ran = llm.engine.step, threading.Event(), threading.Event(), []
    monkeypatch.setattr(llm.engine, "step", lambda: begun.set() or (go.wait(60) and step()))

    async def run() -> None:
        async with serving(llm) as allm:
            stream = await allm.submit(PROMPTS[0], GREEDY)
            await until(begun.is_set)
            call = asyncio.create_task(allm.on_engine(lambda: ran.append(1)))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            go.set()
            await last(stream)
            assert await allm.on_engine(lambda: len(ran)) == 0

    asyncio.run(run())


def test_nobody_waits_for_the_compiler_after_ctrl_c(llm, monkeypatch):
    """asyncio cancels the main task then, and ends its loop."""
    compiling, compiled = threading.Event(), threading.Event()

    def compile(keys: object, progress: object) -> None:
        compiling.set()
        compiled.wait(60)

    monkeypatch.setattr(llm.engine.runner, "compile", compile)

    async def main() -> None:
        async with AsyncLLM(llm):
            pass

    async def interrupted() -> None:
        task = asyncio.create_task(main())
        await asyncio.to_thread(compiling.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    ended = threading.Thread(target=lambda: asyncio.run(interrupted()))
    ended.start()
    ended.join(30)
    waited = ended.is_alive()
    compiled.set()
    ended.join(60)
    assert compiling.is_set()
    assert not waited


def test_an_engine_that_was_not_started_takes_nothing(llm):
    async def run() -> None:
        with pytest.raises(EngineStopped, match="not been started"):
            await AsyncLLM(llm).submit(PROMPTS[0])

    asyncio.run(run())


def test_another_event_loop_than_the_one_it_was_started_in_gets_an_error(llm):
    allm = AsyncLLM(llm)
    asyncio.run(allm.start())

    async def use() -> None:
        for call in (allm.submit([3, 4]), allm.on_engine(lambda: None)):
            with pytest.raises(EngineStopped, match="another event loop"):
                await asyncio.wait_for(call, 10)
        await allm.close()

    asyncio.run(use())


def test_texts_and_origins_of_tokens(llm):
    output = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    accepted = output.speculation.accepted_per_step
    assert output.drafted[0] is False
    assert len(output.drafted) == len(output.token_ids) == len(output.token_texts)
    assert 0 < sum(output.drafted) <= sum(accepted)
    # Every step ends with a token of the model itself.
    assert output.drafted[1 : accepted[0] + 2] == [True] * accepted[0] + [False]


def test_a_name_that_is_taken_while_a_prompt_is_made(llm):
    async def run() -> None:
        async with serving(llm) as allm:
            prompt = LazyPrompt(lambda: PROMPTS[0], 8)
            both = (allm.submit(prompt, GREEDY, request_id="same") for _ in range(2))
            first, second = await asyncio.gather(*both, return_exceptions=True)
            assert isinstance(first, Stream) != isinstance(second, Stream)
            refused, stream = (first, second) if isinstance(second, Stream) else (second, first)
            assert isinstance(refused, RequestError)
            assert isinstance(stream, Stream)
            assert len((await last(stream)).outputs[0].token_ids) == 24

    asyncio.run(run())
