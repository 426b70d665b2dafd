"""Launches whose results have not been read, and the reading of results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mtp_jax.decode.arrays import Chunk, Result, TopLogprobs
from mtp_jax.decode.keys import COUNT, Finish, StepKey
from mtp_jax.decode.launches import Pending, ReadRouted, Runner
from mtp_jax.engine.dead_end import NO_TOKEN, look_ahead
from mtp_jax.engine.request import Request, Status
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.engine.speculation import Logprob, TokenLogprobs
from mtp_jax.model.config import ModelConfig
from mtp_jax.text.grammar import Grammars

# The reasons of ends that the device tells.
REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.NAN: "error"}


@dataclass
class Launched:
    """A launched step whose result is still on its way.

    Attributes:
        rows: the slot of each request, which is the row of its window.
        prompts: the row of the chunk of each request.
        pending: the result, on its way to the host.
        key: the program.
        chunk: the tokens of prompts that the step took along.
    """

    rows: list[tuple[int, Request]]
    prompts: list[tuple[int, Request]]
    pending: Pending[Result]
    key: StepKey
    chunk: Chunk | None = None

    @property
    def everyone(self) -> list[tuple[int, Request]]:
        """The row of the result of each request."""
        return [*self.rows, *((self.key.slots + g, r) for g, r in self.prompts)]

    @property
    def width(self) -> int:
        """Most tokens that one of its windows emits."""
        return self.key.depth + 1

    @property
    def columns(self) -> int:
        """Number of token columns of the result."""
        return self.key.room + 1

    def tokens(self, result: Result) -> int:
        """Number of tokens of prompts that it read, and of tokens that it emitted."""
        emitted = sum(int(result.packed[row, self.columns + COUNT]) for row, _ in self.everyone)
        return emitted + (0 if self.chunk is None else int(self.chunk.count.sum()))

    def complete_rows(self, row: int, request: Request) -> int:
        """Cache rows complete once this launch is read: after a step all rows but the newest token's."""
        if self.chunk is None or row < self.key.slots:
            return len(request.prompt) + len(request.progress.output) - 1
        g = row - self.key.slots
        return int(self.chunk.start[g] + self.chunk.count[g])


def _read(top: TopLogprobs, row: int, i: int, token: int, width: int) -> TokenLogprobs:
    """Read a token's log-probabilities: the chosen token first, then the ``width`` most likely tokens."""
    best = zip(top.ids[row, i, :width].tolist(), top.values[row, i, :width].tolist(), strict=True)
    chosen = Logprob(float(top.chosen[row, i]), int(top.rank[row, i]))
    others = {t: Logprob(v, rank) for rank, (t, v) in enumerate(best, start=1) if t != token}
    return {token: chosen} | others


def logprobs(result: Result, row: int, tokens: list[int], width: int | None) -> list[TokenLogprobs]:
    """The scores of the tokens that a row emits. width: ``SamplingParams.logprobs``."""
    top = result.logprobs
    if top is None or width is None:
        return []
    return [_read(top, row, i, token, width) for i, token in enumerate(tokens)]


def prompt_logprobs(
    launch: Launched, result: Result, row: int, request: Request
) -> list[TokenLogprobs | None]:
    """The scores of a prompt's next tokens that a row adds, if they are wanted; its first token has none."""
    top, chunk, width, row = (
        result.prompt,
        launch.chunk,
        request.params.prompt_logprobs,
        row - launch.key.slots,
    )
    if row < 0 or chunk is None or top is None or width is None:
        return []
    known = len(request.progress.prompt_logprobs)
    new: list[TokenLogprobs | None] = [] if known else [None]
    for i in range(int(chunk.count[row])):
        position = int(chunk.start[row]) + i + 1
        # A preempted request is scored from the start again.
        if position == known + len(new) and position < len(request.prompt):
            new.append(_read(top, row, i, request.prompt[position], width))
    return new


def stop_token(request: Request, cfg: ModelConfig) -> int | None:
    """The stop token that ended a request; None for the model's own end-of-sequence token."""
    own = () if request.params.ignore_eos else cfg.eos_token_ids
    return None if request.progress.output[-1] in own else request.progress.output[-1]


def routed_experts(request: Request, scheduler: Scheduler, runner: Runner) -> Callable[[], np.ndarray] | None:
    """Launch the read of the experts of a request that is about to give its pages back, if it wants them.

    Rows past its newest token have no meaning: a preempted request may end by a result that is still on its
    way, so that the length is not known yet.
    """
    if not request.params.routed_experts:
        return None
    own, size = request.residence, scheduler.config.page_size
    reading = request.status is Status.PREFILL
    rows = min(own.prefilled if reading else request.progress.rows_bound, len(own.pages) * size)
    pages = tuple(own.pages[: max(1, -(-rows // size))])
    return runner.do(ReadRouted(scheduler.shard_of(own.slot), pages, rows)).read


def end_reason(
    request: Request, finish: Finish, tokens: Sequence[int], grammars: Grammars | None, vocab: int
) -> str:
    """The reason of an end. A row without a distribution may be one whose tokens are all masked."""
    own = request.constraints
    if finish is not Finish.NAN or own is None:
        return REASONS.get(finish, "")
    own.advance(tokens)
    found = look_ahead(grammars, own, request.params, request.stops, vocab, len(request.progress.output))
    ends = {"complete": REASONS[Finish.STOP], "no token": NO_TOKEN}
    return REASONS[finish] if own.failed else ends.get(found, REASONS[finish])
