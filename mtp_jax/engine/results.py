"""Launches on their way, and how their results are read."""

from dataclasses import dataclass

from mtp_jax.decode.host import Chunk, Pending, TopLogprobs
from mtp_jax.decode.keys import PrefillKey, StepKey
from mtp_jax.engine.request import Logprob, Request, TokenLogprobs
from mtp_jax.engine.timings import FLUSH


@dataclass
class Launch:
    """A launched program whose result is still on its way.

    Attributes:
        rows: which row of the result belongs to which request.
        pending: the result.
        key: the program.
        chunk: what a prefill took.
    """

    rows: list[tuple[int, Request]]
    pending: Pending
    key: StepKey | PrefillKey
    chunk: Chunk | None = None

    @property
    def step(self) -> StepKey | None:
        """The program, if it is a step."""
        return self.key if isinstance(self.key, StepKey) else None

    @property
    def width(self) -> int:
        """Token columns of the result."""
        return self.key.depth + 1 if isinstance(self.key, StepKey) else 1

    @property
    def began(self) -> float:
        """``time.perf_counter()`` when it was launched, or the flush before it."""
        return (self.pending.flush or self.pending).at

    @property
    def keys(self) -> list[object]:
        """What runs, as it is booked in ``Timings``."""
        return [self.key] if self.pending.flush is None else [FLUSH, self.key]

    def complete_rows(self, row: int, request: Request) -> int:
        """Cache rows that are complete once this is read: after a step all but the newest token's."""
        if self.chunk is None:
            return len(request.prompt) + len(request.output) - 1
        return int(self.chunk.start[row] + self.chunk.count[row])


def read_logprobs(top: TopLogprobs, row: int, i: int, token: int, width: int) -> TokenLogprobs:
    """The chosen token first, then the ``width`` most likely ones."""
    best = zip(top.ids[row, i, :width].tolist(), top.values[row, i, :width].tolist(), strict=True)
    chosen = Logprob(float(top.chosen[row, i]), int(top.rank[row, i]))
    others = {t: Logprob(v, rank) for rank, (t, v) in enumerate(best, start=1) if t != token}
    return {token: chosen} | others


def read_prompt_logprobs(request: Request, top: TopLogprobs, row: int, chunk: Chunk) -> None:
    """Position i of a chunk scores the prompt's next token; the first token of a prompt has no score."""
    if not request.prompt_logprobs:
        request.prompt_logprobs.append(None)
    for i in range(int(chunk.count[row])):
        position = int(chunk.start[row]) + i + 1
        # A preempted request is scored from the start again.
        if position == len(request.prompt_logprobs) and position < len(request.prompt):
            width = request.params.prompt_logprobs or 0
            request.prompt_logprobs.append(read_logprobs(top, row, i, request.prompt[position], width))
