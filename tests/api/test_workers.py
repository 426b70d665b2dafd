"""The threads that tokenise: what waits for what."""

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest

from mtp_jax import LLM, LazyPrompt, Overloaded
from mtp_jax.api.workers import SHORT_TOKENS, Tokenise, Workers
from tests.api.helpers import GREEDY, PROMPTS, last, serving, simulated

LONG = 16 * SHORT_TOKENS


class Held:
    """Functions that say when they begin, and end when they are told to."""

    def __init__(self, queue: Tokenise) -> None:
        self.begun: list[str] = []
        self._queue, self._changed = queue, threading.Condition()
        self._gates: dict[str, threading.Event] = {}

    def submit(self, name: str, size: int) -> Future[str]:
        gate = self._gates[name] = threading.Event()

        def work() -> str:
            with self._changed:
                self.begun.append(name)
                self._changed.notify_all()
            assert gate.wait(60)
            return name

        return self._queue.submit(size, work)

    def end(self, *names: str) -> None:
        for name in names:
            self._gates[name].set()

    def wait(self, count: int) -> list[str]:
        """Names of the functions that have begun, once there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, 60)
            return [*self.begun]


@pytest.fixture
def held():
    queue = Tokenise()
    held = Held(queue)
    yield held
    held.end(*held._gates)
    for pool in queue.pools:
        pool.shutdown()


def test_a_short_prompt_waits_for_no_long_one(held: Held):
    for i in range(40):
        held.submit(f"long {i}", LONG)
    assert held.wait(1) == ["long 0"]
    held.submit("chat", 2)
    assert held.wait(2) == ["long 0", "chat"]
    held.end("chat")
    held.submit("another", SHORT_TOKENS)
    assert held.wait(3) == ["long 0", "chat", "another"]
    held.end(*(f"long {i}" for i in range(40)), "another")
    assert [f"long {i}" for i in range(40)] == [name for name in held.wait(42) if name.startswith("long")]


def test_of_short_prompts_the_shortest_comes_first(held: Held):
    held.submit("long", LONG)
    held.wait(1)
    held.submit("first", 9)
    held.wait(2)
    for size in (7, 3, 5):
        held.submit(str(size), size)
    held.end("first", "3", "5", "7")
    assert held.wait(5) == ["long", "first", "3", "5", "7"]


def test_a_longer_prompt_waits_for_two_at_most_and_none_for_ever(held: Held):
    for i in range(4):
        held.submit(f"count {i}", LONG)
    held.wait(1)
    held.submit("agent", LONG // 2)
    for name in ("count 0", "agent", "count 1", "count 2", "count 3"):
        held.end(name)
    assert held.wait(5) == ["count 0", "agent", "count 1", "count 2", "count 3"]


def test_the_oldest_comes_in_its_turn_however_many_shorter_ones_come(held: Held):
    held.submit("running", SHORT_TOKENS)
    held.wait(1)
    held.submit("other", SHORT_TOKENS)
    held.wait(2)
    held.submit("old", LONG)
    for i in range(20):
        held.submit(f"new {i}", SHORT_TOKENS + 1)  # which the thread of long prompts alone takes
    held.end("running", "other", *(f"new {i}" for i in range(20)))
    assert "old" in held.wait(4)[2:]


def test_results_errors_and_cancellations_reach_who_waits():
    def fail() -> None:
        raise ValueError("so")

    async def run() -> None:
        workers, gate = Workers(), threading.Event()
        running = [asyncio.create_task(workers.tokenise(1, lambda: gate.wait(60))) for _ in range(2)]
        ran: list[int] = []
        cancelled = asyncio.create_task(workers.tokenise(1, lambda: ran.append(1)))
        failing = asyncio.create_task(workers.tokenise(1, fail))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        gate.set()
        assert await asyncio.gather(*running) == [True, True]
        with pytest.raises(ValueError, match="so"):
            await failing
        assert await workers.tokenise(LONG, lambda: 5) == 5
        assert ran == []
        workers.close()

    asyncio.run(run())


@pytest.fixture(scope="module")
def llm() -> LLM:
    return simulated()


def counting(allm, characters: int, gate: threading.Event) -> "asyncio.Task[int]":
    prompt = LazyPrompt(lambda: pytest.fail("nobody asks for it"), characters)

    def count() -> int:
        assert gate.wait(60)
        return 3

    return asyncio.create_task(allm.in_queue(prompt, count))


@pytest.mark.parametrize("characters", [399, 4000, 4_000_000])
def test_counts_leave_half_of_the_queue_to_chats(llm, characters):
    """Also one that is larger than the whole queue, which is taken where nobody else waits."""

    async def run() -> None:
        async with serving(llm, max_queued_tokens=400, max_queued_requests=4) as allm:
            gate = threading.Event()
            counts = [counting(allm, characters, gate) for _ in range(9)]
            await asyncio.sleep(0)
            assert allm.admission.tokens <= 200
            assert allm.admission.requests <= 2
            lazy = LazyPrompt(lambda: PROMPTS[0], 200 * 4 - 4)
            chat = asyncio.create_task(allm.submit(lazy, GREEDY))
            await asyncio.sleep(0)
            gate.set()
            assert (await last(await chat)).finished
            found = await asyncio.gather(*counts, return_exceptions=True)
            assert found[0] == 3
            assert isinstance(found[-1], Overloaded)
            assert allm.admission.tokens == allm._counted.tokens == 0

    asyncio.run(run())


def test_a_prompt_that_is_too_long_keeps_no_more_of_the_queue_than_the_longest(llm):
    async def run() -> None:
        async with serving(llm, max_queued_tokens=10_000) as allm:
            gate, longest = threading.Event(), llm.engine.config.longest

            def make() -> list[int]:
                assert gate.wait(60)
                return PROMPTS[0]

            first = asyncio.create_task(allm.submit(LazyPrompt(make, 4_000_000), replace(GREEDY, n=2)))
            await asyncio.sleep(0)
            assert allm.admission.tokens == 2 * longest
            assert (await last(await allm.submit(PROMPTS[1], GREEDY))).finished
            gate.set()
            assert (await last(await first)).finished

    asyncio.run(run())
