"""A request in the engine, in three parts, each of which one owner writes.

``Request`` is frozen. The engine writes its ``Progress``, the scheduler its ``Residence``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypedDict

import numpy as np

from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.speculation import Speculation, TokenLogprobs
from mtp_jax.store.file_tier import Fetch
from mtp_jax.text.rules import Constraints


class Terms(TypedDict, total=False):
    """Choices for a request besides its prompt and its sampling parameters.

    Keys:
        seed: takes the place of ``SamplingParams.seed``; does not fix the depth.
        priority: lower numbers are served first; 0 unless given.
        timeout: seconds from its arrival after which it ends with the tokens it has; None: never.
        cache_salt: only requests of the same salt share cached pages, and outputs to draft from.
        spare: number of further tokens its pages hold from the start.
        arrived: seconds of the runner's clock at its arrival; None: the time when it is queued.
        holdable: whether ``Engine.hold`` keeps it in the queue; True unless given.
    """

    seed: int | None
    priority: int
    timeout: float | None
    cache_salt: str
    spare: int
    arrived: float | None
    holdable: bool


class Status(Enum):
    """The stage that a request has reached."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Progress:
    """The output of a request so far, and its launches. The engine alone writes these fields.

    Attributes:
        seed: the request's own seed, or a seed that the engine has drawn.
        output: tokens emitted.
        drafted: whether each token of the output was a draft.
        stop_reason: the stop string or stop token that ended it; None: the model itself, or no stop.
        inflight: number of launches that have not been read.
        unread: number of unread launches that will hold at least one token.
        rows_bound: number of tokens that the sequence can have at most once all launches are read.
        cached_tokens: number of prompt tokens found in the prefix cache at its first admission.
        weight_version: name of the weights that it ran with last; None before its first admission.
        routed_experts: waits for the experts that its tokens chose (``ReadRouted``) when it last gave a slot
            back; None before that, and where it does not ask for them.
        arrived: seconds of the runner's clock when the request came; 0 until it is queued.
    """

    seed: int = 0
    output: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    speculation: Speculation = field(default_factory=Speculation)
    inflight: int = 0
    unread: int = 0
    rows_bound: int = 0
    cached_tokens: int = 0
    weight_version: str | None = None
    routed_experts: Callable[[], np.ndarray] | None = None
    arrived: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None

    def emit(self, tokens: list[int], now: float, accepted: int = 0) -> float | None:
        """Append the tokens of a launch that was read ``now``; the first ``accepted`` were drafted.

        Returns the seconds since the previous tokens; None if there are no new or no previous tokens.
        """
        if not tokens:
            return None
        self.output += tokens
        self.drafted += [i < accepted for i in range(len(tokens))]
        before, self.last_token_at = self.last_token_at, now
        if before is None:
            self.first_token_at = now
            return None
        return now - before

    def cut(self, tokens: int) -> None:
        """Keep the first ``tokens`` of the output."""
        del self.output[tokens:], self.drafted[tokens:], self.logprobs[tokens:]

    def end(self, reason: str, now: float) -> None:
        """End the output with a reason: "stop", "length", "abort", "timeout", "no_token" or "error"."""
        self.finish_reason, self.finished_at = reason, now


@dataclass(eq=False)
class Residence:
    """A request's slot and pages, and the tokens in them. The scheduler alone writes these fields.

    Attributes:
        slot: -1 while it waits for one; once it has ended, the slot that it had.
        pages: the numbers of its pages.
        tokens: tokens to prefill: the prompt, and after a preemption all emitted tokens but the newest.
        follows: the newest emitted token after a preemption; -1 without one.
        prefilled: number of ``tokens`` that are in the cache or in a launch that writes them there.
        restored: number of these that came from the host tier at its last admission.
        fetch: pages that are fetched for it from files; None: none were asked for since it lost its pages.
        fetched: number of tokens whose pages came to the host's memory so.
        registered: number of full pages that the prefix cache holds.
        digests: the digest of each full page.
        preemptions: number of times that it lost its pages to another request.
    """

    slot: int = -1
    pages: list[int] = field(default_factory=list)
    tokens: Sequence[int] = ()
    follows: int = -1
    prefilled: int = 0
    restored: int = 0
    fetch: Fetch | None = None
    fetched: int = 0
    registered: int = 0
    digests: list[bytes] = field(default_factory=list)
    preemptions: int = 0

    def take_up(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Prepare for admission: the prompt and all output so far are to be prefilled."""
        self.tokens, self.follows = prompt, -1
        if output:
            self.tokens, self.follows = (*prompt, *output[:-1]), output[-1]

    @property
    def fetching(self) -> bool:
        """Whether it waits for pages from files."""
        return self.fetch is not None and self.fetch.under_way

    def prefilled_after(self, chunk: int) -> int:
        """``prefilled`` after a chunk of ``chunk`` tokens."""
        return min(self.prefilled + chunk, len(self.tokens))


@dataclass(frozen=True, eq=False)
class Request:
    """One completion: its prompt and options.

    Attributes:
        seed: seed of its random numbers; None: the engine draws one.
        capacity: most tokens that its pages may have to hold.
        fixed_depth: whether every step must have ``depth`` drafts for it; else adaptive depth decides.
        suffix_drafts: whether its drafts may come from suffix matches.
        other_texts: whether these may lie in outputs of other requests.
        stops: tokens that end the output.
        constraints: a grammar, and other rules that depend on the output so far; None: there are none.
        deadline: seconds of the runner's clock at which the engine ends it, finished or not.
        salt: see ``Terms.cache_salt``.
        spare, priority, arrived, holdable: see ``Terms``.
        siblings: the completions of its prompt, itself among them, which all run with the same weights.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int | None
    max_tokens: int
    depth: int
    capacity: int
    suffix_drafts: bool = False
    other_texts: bool = False
    spare: int = 0
    stops: Sequence[int] = ()
    constraints: Constraints | None = None
    fixed_depth: bool = True
    priority: int = 0
    deadline: float | None = None
    salt: str = ""
    arrived: float | None = None
    holdable: bool = True
    siblings: Sequence["Request"] = ()
    progress: Progress = field(default_factory=Progress)
    residence: Residence = field(default_factory=Residence)

    @property
    def status(self) -> Status:
        """The stage that the request has reached."""
        if self.finished:
            return Status.FINISHED
        if self.residence.slot < 0:
            return Status.WAITING
        through = self.residence.prefilled == len(self.residence.tokens)
        return Status.RUNNING if through else Status.PREFILL

    @property
    def finished(self) -> bool:
        """Whether no further token will come."""
        return self.progress.finish_reason is not None

    @property
    def begun(self) -> bool:
        """Whether it, or another completion of the same prompt, has run."""
        return any(r.progress.admitted_at is not None for r in (self, *self.siblings))

    @property
    def most_output(self) -> int:
        """The most tokens that it can have emitted once all launches are read."""
        return self.progress.rows_bound - len(self.prompt)

    @property
    def useful_depth(self) -> int:
        """Drafts of its next step that it may have room for: its last token needs none."""
        done = len(self.progress.output) + self.progress.unread
        return min(self.depth, self.max_tokens - done - 1)
