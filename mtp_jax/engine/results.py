"""Launches whose results have not been read, and the reading of results."""

from dataclasses import dataclass

from mtp_jax.decode.arrays import Chunk, Result, TopLogprobs
from mtp_jax.decode.keys import StepKey
from mtp_jax.decode.launches import Pending
from mtp_jax.engine.request import Request
from mtp_jax.engine.speculation import Logprob, TokenLogprobs


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
