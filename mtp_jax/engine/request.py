"""A request on its way through the engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.speculation import Speculation, TokenLogprobs
from mtp_jax.text.rules import Constraints


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One completion on its way through the engine. Only the engine changes it.

    Attributes:
        seed: None until it is queued, if it has none of its own.
        capacity: tokens its pages may have to hold.
        fixed_depth: whether every step must offer it ``depth`` drafts, or adaptive depth decides.
        suffix_drafts: whether its drafts may come from suffix matches.
        spare: further tokens its pages hold from the start.
        stops: tokens that end the output.
        constraints: a grammar, and other rules that depend on the output so far; None: there are none.
        priority: lower numbers are served first.
        deadline: ``time.perf_counter()`` at which it is ended, finished or not.
        salt: only requests of the same salt share cached pages.
        tokens: to prefill: the prompt, and once preempted all it had emitted but the newest token.
        follows: that newest token; -1 before the first.
        drafted: of each token of the output whether it was a draft.
        prefilled: how many of ``tokens`` are in the cache or on their way into it.
        restored: how many of them the host's memory gave back when it was last admitted.
        registered: full pages the prefix cache knows of.
        digests: of its full pages.
        inflight: launches that have not been read.
        unread: those among them that will hold at least one token.
        rows_bound: the most tokens that the sequence can have once all launches are read.
        cached_tokens: prompt tokens found in the prefix cache at its first admission.
        weight_version: of the weights that it runs with; None before its first admission.
        stop_reason: the stop string or stop token that ended it; None: the model itself, or no stop.
        siblings: the completions of its prompt, which all run with the same weights.
        holdable: whether the scheduler's ``held`` keeps it in the queue.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int | None
    max_tokens: int
    depth: int
    capacity: int
    suffix_drafts: bool = False
    spare: int = 0
    stops: Sequence[int] = ()
    constraints: Constraints | None = None
    fixed_depth: bool = True
    priority: int = 0
    deadline: float | None = None
    salt: str = ""
    status: Status = Status.WAITING
    output: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    speculation: Speculation = field(default_factory=Speculation)
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    tokens: Sequence[int] = ()
    follows: int = -1
    prefilled: int = 0
    restored: int = 0
    registered: int = 0
    digests: list[bytes] = field(default_factory=list)
    inflight: int = 0
    unread: int = 0
    rows_bound: int = 0
    cached_tokens: int = 0
    weight_version: str | None = None
    siblings: Sequence["Request"] = ()
    holdable: bool = True
    preemptions: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None

    @property
    def finished(self) -> bool:
        """Whether no further token will come."""
        return self.status is Status.FINISHED

    @property
    def begun(self) -> bool:
        """Whether it has run, or a completion of the same prompt."""
        return any(r.admitted_at is not None for r in (self, *self.siblings))

    @property
    def useful_depth(self) -> int:
        """Drafts of its next step that it may have room for: its last token needs none."""
        return min(self.depth, self.max_tokens - len(self.output) - self.unread - 1)

    def take_up(self) -> None:
        """Prepare for admission: everything known so far is to be prefilled."""
        self.tokens, self.follows = self.prompt, -1
        if self.output:
            self.tokens, self.follows = (*self.prompt, *self.output[:-1]), self.output[-1]

    def emit(self, tokens: list[int], accepted: int = 0) -> float | None:
        """Take tokens that a launch produced, of which the first ``accepted`` were drafted.

        Returns the seconds since the tokens before; None if there are none, now or before.
        """
        if not tokens:
            return None
        self.output += tokens
        self.drafted += [i < accepted for i in range(len(tokens))]
        now, before = time.perf_counter(), self.last_token_at
        self.last_token_at = now
        if before is None:
            self.first_token_at = now
            return None
        return now - before

    def cut(self, tokens: int) -> None:
        """Keep the first ``tokens`` of the output."""
        del self.output[tokens:], self.drafted[tokens:], self.logprobs[tokens:]

    def end(self, reason: str) -> None:
        """No more tokens: "stop", "length", "abort", "timeout" or "error"."""
        self.status, self.finish_reason, self.finished_at = Status.FINISHED, reason, time.perf_counter()
