"""The next actions of an engine: the one place where launches are decided. No jax here.

A turn of the engine is a few actions. Each is decided when the one before it has been done, because it
depends on that: masks of a grammar depend on tokens that were just read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mtp_jax.decode.keys import StepKey
from mtp_jax.decode.launches import Runner
from mtp_jax.engine.buckets import Buckets, ChunkPrompts
from mtp_jax.engine.depth import DepthController
from mtp_jax.engine.depth_policy import adaptive_depths
from mtp_jax.engine.request import Request
from mtp_jax.engine.results import Launched
from mtp_jax.engine.scheduler import Scheduler


@dataclass(frozen=True)
class AdmitWaiting:
    """Update the device's slots and pages, and admit waiting requests."""


@dataclass(frozen=True)
class LaunchStep:
    """Draft and verify for some requests, prefill the next chunk of prompts, or both.

    Attributes:
        key: key of the program.
        requests: the requests that draft and verify.
        prompts: the prompts of the chunk.
    """

    key: StepKey
    requests: Sequence[Request]
    prompts: ChunkPrompts | None


@dataclass(frozen=True)
class ReadOldest:
    """Read the ``count`` oldest launches."""

    count: int


Action = AdmitWaiting | LaunchStep | ReadOldest


class Turns:
    """Decides the launches of one engine."""

    def __init__(
        self, buckets: Buckets, scheduler: Scheduler, runner: Runner, depth: DepthController
    ) -> None:
        self._buckets, self._scheduler, self._runner, self._depth = buckets, scheduler, runner, depth

    def next(self, inflight: Sequence[Launched]) -> Iterator[Action]:
        """Decide the actions of one turn. inflight: launches that have not been read, the oldest first.

        The launch of the previous turn is read after this turn's launch, so that the device never waits for
        the host.
        """
        yield AdmitWaiting()
        before = len(inflight)
        if any(r.constraints for r in self._scheduler.running()):
            # Masks of constraints depend on the newest tokens, so every launch must have been read.
            yield ReadOldest(before)
            before = 0
        if step := self._step():
            yield step
        # Without a launch, the next request that ends may make room.
        yield ReadOldest(before if len(inflight) > before else min(before, 1))

    def _step(self) -> LaunchStep | None:
        """The next step, whose requests have pages now; other requests may be preempted for it."""
        running, prompts = self._work()
        if not running and not prompts:
            return None
        key = self._choose(running, prompts)
        if self._scheduler.grow(running, key.depth):
            running, prompts = self._work()
            if not running and not prompts:
                return None
            same = self._ranked(running, key.depth, key.kept) if running and key.kept is not None else None
            key = same or self._cover(running, prompts, key.depth if running else 0)
        return LaunchStep(key, running, prompts)

    def _work(self) -> tuple[list[Request], ChunkPrompts | None]:
        """Requests that draft and verify, and the chunk to take along.

        There are none if every request may already have ended in an unread launch, as a useless step costs
        more than waiting; with a chunk a step is useful. As many prompts go along as a program takes.
        """
        running = self._scheduler.running()
        prompts = self._buckets.next_prompts(self._scheduler.prefilling())
        if prompts is None:
            ended = all(r.progress.unread and r.most_output >= r.max_tokens for r in running)
            return [] if ended else running, None
        most = max(map(len, prompts.requests))
        while most > 1 and not self._runner.find(self._buckets.step(running, 0, prompts.first(most))):
            most //= 2
        prompts = self._filled(running, prompts.first(most))
        if not running or self._runner.find(self._buckets.step(running, 0, prompts)):
            return running, prompts
        # No program takes such windows beside a chunk: the prompts go first, by a program without windows, as
        # windows would advance other requests.
        alone = self._runner.find(self._buckets.step([], 0, prompts))
        return ([], prompts) if alone and not alone.slots else (running, None)

    def _filled(self, running: list[Request], prompts: ChunkPrompts) -> ChunkPrompts:
        """The chunk with all tokens that its program has room for: padding would take the same time."""
        found = self._runner.find(self._buckets.step(running, 0, prompts))
        if found is None or found.tokens <= prompts.tokens:
            return prompts
        filled = replace(prompts, tokens=found.tokens)
        return filled if self._runner.find(self._buckets.step(running, 0, filled)) == found else prompts

    def _choose(self, running: list[Request], prompts: ChunkPrompts | None) -> StepKey:
        """The key for a step over these requests: the deepest, or with adaptive depth the fastest."""
        if not running:
            return self._cover(running, prompts, 0)
        fixed = max((r.depth for r in running if r.fixed_depth), default=0)
        depths = self._depths(running, fixed)
        keys = [self._cover(running, prompts, d) for d in depths]
        if not fixed and not prompts:  # a request with a depth of its own keeps it
            deepest = max(depths)
            some = (self._ranked(running, deepest, kept) for kept in self._buckets.ranked(deepest))
            keys += [key for key in some if key]
        rows, price = [r.depth for r in running], None
        if prompts:
            # The chunk takes time at any depth; steps without a chunk give the worth of a second.
            price = self._depth.rate([self._cover(running, None, d) for d in depths], rows)
        return self._depth.choose(keys, rows, price)

    def _depths(self, running: list[Request], fixed: int) -> list[int]:
        """The depths that steps over these requests may have. fixed: the least."""
        deepest, steps = max(fixed, *(r.useful_depth for r in running)), self._depth.steps
        if steps is not None and deepest > steps:  # all nodes of a tree may be of use
            deepest = max(r.depth for r in running)
        return [d for d in adaptive_depths(deepest, steps) if d >= fixed]

    def _cover(self, running: list[Request], prompts: ChunkPrompts | None, depth: int) -> StepKey:
        """The cheapest compiled key for this step."""
        return self._runner.cover(self._buckets.step(running, depth, prompts))

    def _ranked(self, running: list[Request], depth: int, kept: int) -> StepKey | None:
        """The cheapest compiled key for a step that verifies ``kept`` drafts per slot, if there is one."""
        return self._runner.find(self._buckets.step(running, depth, kept=kept))
