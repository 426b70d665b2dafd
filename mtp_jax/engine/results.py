"""What comes back from the device: launches on their way, and how their results are read."""

from dataclasses import dataclass
from typing import Any

from mtp_jax.decode.keys import Key, StepKey
from mtp_jax.decode.prefill import Chunk
from mtp_jax.decode.result import StepResult
from mtp_jax.engine.request import Logprob, Request, TokenLogprobs


@dataclass
class Launch:
    """A launched program whose result is still on its way.

    Attributes:
        rows: which row of the result belongs to which request.
        result: tokens and counts.
        width: token columns of the result.
        at: when its launch began.
        key: the executable.
        prompt: log-probabilities of prompt tokens, from a prefill.
        chunk: what a prefill took.
    """

    rows: list[tuple[int, Request]]
    result: StepResult
    width: int
    at: float
    key: Key
    prompt: Any = None
    chunk: Chunk | None = None

    @property
    def step(self) -> StepKey | None:
        """The executable, if it is a step."""
        return self.key if isinstance(self.key, StepKey) else None

    def complete_rows(self, row: int, request: Request) -> int:
        """Cache rows that are complete once this is read: after a step all but the newest token's."""
        if self.chunk is None:
            return len(request.prompt) + len(request.output) - 1
        return int(self.chunk.start[row] + self.chunk.count[row])


def read_logprobs(top: Any, row: int, i: int, token: int, width: int) -> TokenLogprobs:
    """The chosen token first, then the ``width`` most likely ones."""
    best = zip(top.ids[row, i, :width].tolist(), top.values[row, i, :width].tolist(), strict=True)
    chosen = Logprob(float(top.chosen[row, i]), int(top.rank[row, i]))
    others = {t: Logprob(v, rank) for rank, (t, v) in enumerate(best, start=1) if t != token}
    return {token: chosen} | others


def read_prompt_logprobs(request: Request, top: Any, row: int, chunk: Chunk) -> None:
    """Position i of a chunk scores the prompt's next token; the first token of a prompt has no score."""
    if not request.prompt_logprobs:
        request.prompt_logprobs.append(None)
    for i in range(int(chunk.count[row])):
        position = int(chunk.start[row]) + i + 1
        # A preempted request is scored from the start again.
        if position == len(request.prompt_logprobs) and position < len(request.prompt):
            width = request.params.prompt_logprobs or 0
            request.prompt_logprobs.append(read_logprobs(top, row, i, request.prompt[position], width))
