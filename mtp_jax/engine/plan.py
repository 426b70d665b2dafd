"""What an engine does next: the one place where launches are decided. No jax here.

A turn of the engine is a few actions. Each is decided when the one before it has been done, because it
depends on that: a chunk moves its prompt on, and what a grammar allows depends on tokens that were just read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from mtp_jax.decode.host import Runner
from mtp_jax.decode.keys import PrefillKey, StepKey
from mtp_jax.engine.buckets import (
    TOGETHER,
    prefill_key,
    prefill_together,
    prompt_bucket,
    step_key,
    step_keys,
)
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.depth import DepthController, adaptive_depths
from mtp_jax.engine.request import Request, Status
from mtp_jax.engine.results import Launch
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.engine.timings import Timings

# Chunks between two steps while more slots wait for their prompt than run: few rows make a step dear.
_FILLING = 4
# An end further away than so many steps is not waited for.
_LATER = 8
# Share of the work that the device still has for which the next launch waits for more requests.
_PATIENCE = 0.5


@dataclass(frozen=True)
class Admit:
    """Tell the device which slots and pages changed hands, and give waiting requests theirs."""


@dataclass(frozen=True)
class Prefill:
    """Prefill the next chunk of some prompts.

    Attributes:
        key: the program.
        tokens: of each prompt, at most; the program's chunk may be longer.
        requests: by row of the chunk; None for an idle row.
    """

    key: PrefillKey
    tokens: int
    requests: Sequence[Request | None]


@dataclass(frozen=True)
class Step:
    """Draft and verify for these requests."""

    key: StepKey
    requests: Sequence[Request]


@dataclass(frozen=True)
class Read:
    """Read so many of the oldest launches."""

    count: int


Action = Admit | Prefill | Step | Read


class Planner:
    """Decides the launches of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: Runner,
        depth: DepthController,
        timings: Timings,
    ) -> None:
        self._config, self._scheduler, self._runner = config, scheduler, runner
        self._depth, self._timings = depth, timings
        self._idle = 0  # slot-steps spent idle waiting to batch a prefill

    def turn(self, inflight: Sequence[Launch]) -> Iterator[Action]:
        """The actions of one turn. inflight: launches that have not been read, the oldest first.

        What was launched in the turn before is read after the launches of this one, so that the device never
        waits for the host. First tokens are read, and handed on, while the step behind their prefill runs.
        """
        if first_tokens_next(inflight):
            yield Read(1)
            return
        yield Admit()
        before = len(inflight)
        if not self.holds_prefill():
            yield from self._prefills()
        if any(r.matcher for r in self._steppable()):
            # What a grammar allows depends on the newest tokens: nothing may be in flight.
            yield Read(len(inflight))
            before = 0
        if step := self._step():
            yield step
        # If nothing was launched, what ends next may make room.
        yield Read(before if len(inflight) > before else min(before, 1))

    def patience(self, inflight: Sequence[Launch]) -> float:
        """Seconds for which the next turn may wait for more requests, while there are free slots.

        Requests that it misses wait for a step more, and are prefilled alone.
        """
        return 0.0 if first_tokens_next(inflight) else _PATIENCE * self.work_ahead(inflight)

    def work_ahead(self, inflight: Sequence[Launch]) -> float:
        """Seconds until the device has done what was launched, as far as can be foretold."""
        if not inflight:
            return 0.0
        return self._timings.ahead(inflight[0].began, chain.from_iterable(x.keys for x in inflight))

    # Prefill

    def holds_prefill(self) -> bool:
        """Whether new prompts wait a step for requests about to end, to be prefilled with what follows them.

        Every row waits for a prefill longer than for a step, so the slots of these prompts may idle for as
        much as one step of all rows, though no longer than ``_LATER`` steps; call once a turn.
        """
        live = [r for r in self._scheduler.slots if r]
        prompts = [r for r in live if r.status is Status.PREFILL]
        rows = [r for r in live if r.status is Status.RUNNING]
        # The next end that is sure, in steps: each emits a token at least.
        steps = max(1, min((r.max_tokens - len(r.output) - r.unread for r in rows), default=_LATER + 1))
        begun = any(r.begun for r in prompts)
        idle, most = self._idle + len(prompts) * steps, min(len(rows), len(prompts) * _LATER)
        hold = 0 < len(prompts) < TOGETHER and not begun and steps <= _LATER and idle <= most
        self._idle = self._idle + len(prompts) if hold else 0
        return hold

    def prefill_chunks(self) -> int:
        """Full chunks that may be prefilled before the next step."""
        status = [r.status for r in self._scheduler.slots if r]
        return _FILLING if status.count(Status.PREFILL) > status.count(Status.RUNNING) else 1

    def _prefills(self) -> Iterator[Prefill]:
        """Chunks of waiting prompts, as far as the budget of tokens goes."""
        budget = self._config.prefill_chunk * self.prefill_chunks()
        while any(waiting := self._scheduler.prefilling()):
            need, chosen = self._next_prefill(waiting)
            budget -= need.tokens * need.prompts
            if budget < 0:
                return
            yield Prefill(self._runner.cover(need), need.tokens, chosen)

    def _next_prefill(self, waiting: list[list[Request]]) -> tuple[PrefillKey, list[Request | None]]:
        """What to launch next, and whose prompt is in which row: as many per shard as a program takes."""
        together = prefill_together(self._config, waiting)
        prompts = prompt_bucket(max(map(len, together)))
        while True:
            together = [w[:prompts] for w in together]
            need = prefill_key(self._config, list(chain(*together)), prompts)
            if prompts == 1 or self._runner.find(need):
                return need, [r for w in together for r in (*w, *[None] * (prompts - len(w)))]
            prompts //= 2

    # Steps

    def _step(self) -> Step | None:
        """The next step, once its requests have the pages for it; others may lose theirs."""
        running = self._steppable()
        if not running:
            return None
        key, depth = self._choose(running), -1
        while depth < key.depth:
            depth = key.depth
            if self._scheduler.grow(running, depth):
                running = self._steppable()
                if not running:
                    return None
                # With fewer requests the cheapest program may be a deeper one, whose drafts need pages, too.
                key = self._cover(running, step_key(self._config, running, depth))
        return Step(key, running)

    def _steppable(self) -> list[Request]:
        """Requests to step; none if every one may already have ended in an unread launch.

        A useless step costs more than waiting.
        """
        live = self._scheduler.running()
        if all(r.unread and r.rows_bound - len(r.prompt) >= r.max_tokens for r in live):
            return []
        return live

    def _choose(self, running: list[Request]) -> StepKey:
        """The program for a step over these requests: the deepest, or adaptively the fastest."""
        fixed = max((r.depth for r in running if r.fixed_depth), default=0)
        deepest = max(fixed, *(r.useful_depth for r in running))
        depths = {d for d in adaptive_depths(deepest) if d >= fixed}
        keys = [self._cover(running, need) for need in step_keys(self._config, running, depths)]
        return self._depth.choose(keys, [r.depth for r in running])

    def _cover(self, running: list[Request], need: StepKey) -> StepKey:
        """The cheapest program for it, with pages for all rows that it writes: a deeper one has more."""
        key = self._runner.cover(need)
        if key.depth == need.depth:
            return key
        return self._cover(running, step_key(self._config, running, key.depth))


def first_tokens_next(inflight: Sequence[Launch]) -> bool:
    """Whether the oldest unread launch is a prefill with a step queued behind it."""
    return len(inflight) > 1 and inflight[0].chunk is not None
