"""What a user asks for, SamplingParams, and a request on its way through the engine."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from typing import Literal, get_args

from mtp_jax.errors import RequestError
from mtp_jax.text.grammar import Matcher, StructuredOutput

MAX_LOGPROBS = 20
# A window of 32 tokens: of longer ones a bit per draft (kernels_pallas.mla_decode.visible) has no room.
MAX_DRAFTS = 31
OutputKind = Literal["cumulative", "delta", "final_only"]


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. Names and defaults follow vLLM's.

    Attributes:
        n: completions per prompt.
        temperature: 0 is greedy.
        top_p: smallest set of tokens with at least this mass; 1 is off, 0 leaves the likeliest.
        top_k: most likely tokens to keep; 0 or -1 is off.
        min_p: least probability relative to the most likely token; 0 is off.
        max_tokens: most tokens to emit; None: as many as fit.
        min_tokens: no stop token before this many, and no stop string that ends in their text.
        stop: strings that end the text; not part of it unless ``include_stop_str_in_output``.
        stop_token_ids: tokens that end the output beside the model's own, emitted as ids; they have no text
            unless ``include_stop_str_in_output``.
        ignore_eos: go on after the model's end-of-sequence tokens.
        seed: makes sampling reproducible, whatever shares the batch.
        presence_penalty: subtracted from every token already in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        repetition_penalty: divides (positive) or multiplies logits of tokens in prompt or output; 1 is off.
        logit_bias: added to the logits of these token ids.
        logprobs: log-probabilities of the chosen token and of this many most likely ones, at most 20.
        prompt_logprobs: the same for the tokens of the prompt.
        num_speculative_tokens: most drafts per step for this request; None: the engine's. 0: no speculation.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string, or the text of the stop token, in the text.
        output_kind: what an iterator of outputs gives: all there is so far ("cumulative"), what is new
            ("delta"), or one output at the end ("final_only").
        structured: what the output must be. It ends at an end-of-sequence token once it is complete, or, cut
            short, at a stop string, a stop token or max_tokens.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = "cumulative"
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        for name, none in (("stop", ()), ("stop_token_ids", ()), ("logit_bias", {})):
            if getattr(self, name) is None:  # as vLLM writes it
                object.__setattr__(self, name, none)
        _check_number(self, "temperature", 0, 1e6)
        _check_number(self, "top_p", 0, 1)
        _check_number(self, "min_p", 0, 1)
        _check_number(self, "presence_penalty", -2, 2)
        _check_number(self, "frequency_penalty", -2, 2)
        _check_number(self, "repetition_penalty", 0.01, 100)  # logits stay far from the largest float32
        _check_integer(self, "n", 1, 1024)
        _check_integer(self, "top_k", -1, 2**31 - 1)
        _check_integer(self, "max_tokens", 1, 2**31 - 1, optional=True)
        _check_integer(self, "min_tokens", 0, 2**31 - 1)
        _check_integer(self, "seed", 0, 2**32 - 1, optional=True)
        _check_integer(self, "logprobs", 0, MAX_LOGPROBS, optional=True)
        _check_integer(self, "prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        _check_integer(self, "num_speculative_tokens", 0, MAX_DRAFTS, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens = {self.min_tokens} is above max_tokens = {self.max_tokens}")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} = {getattr(self, name)!r}; expected True or False")
        if not isinstance(self.stop, str) and isinstance(self.stop, Iterable):
            object.__setattr__(self, "stop", tuple(self.stop))  # an iterator can be read once
        many = isinstance(self.stop, Iterable)
        if not many or any(not isinstance(s, str) or not s for s in self.stop_strings):
            raise RequestError(f"stop = {self.stop!r}; expected non-empty strings")
        if self.output_kind not in get_args(OutputKind):
            kinds = ", ".join(map(repr, get_args(OutputKind)))
            raise RequestError(f"output_kind = {self.output_kind!r}; expected one of {kinds}")
        if self.structured is not None:
            if not isinstance(self.structured, StructuredOutput):
                raise RequestError(f"structured = {self.structured!r}; expected a StructuredOutput or None")
            if self.ignore_eos or self.min_tokens:
                raise RequestError(
                    "a structured output ends where its grammar does; leave out ignore_eos and min_tokens"
                )
        if not isinstance(self.stop_token_ids, Iterable):
            raise RequestError(f"stop_token_ids = {self.stop_token_ids!r}; expected integers")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias = {self.logit_bias!r}; expected token ids and numbers")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # whatever becomes of the caller's
        for token in self.stop_token_ids:
            if not isinstance(token, Integral) or isinstance(token, bool):
                raise RequestError(f"stop_token_ids holds {token!r}; expected integers")
        for token, bias in self.logit_bias.items():
            numbers = isinstance(token, int) and isinstance(bias, Real)
            if not numbers or isinstance(token, bool) or isinstance(bias, bool) or not abs(bias) <= 100:
                raise RequestError(
                    f"logit_bias {token!r}: {bias!r}; expected token id: number from -100 to 100"
                )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether argmax of the unadjusted logits decides."""
        penalties = (
            self.presence_penalty,
            self.frequency_penalty,
            self.repetition_penalty - 1,
            self.min_tokens,
        )
        return self.temperature == 0 and not any(penalties) and not self.logit_bias


def _check_number(p: SamplingParams, name: str, low: float, high: float) -> None:
    value = getattr(p, name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} = {value!r}; expected a number from {low} to {high}")


def _check_integer(p: SamplingParams, name: str, low: int, high: int, optional: bool = False) -> None:
    value = getattr(p, name)
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        none = " or None" if optional else ""
        raise RequestError(f"{name} = {value!r}; expected an integer from {low} to {high}{none}")


@dataclass(frozen=True)
class Logprob:
    """Natural log of a token's probability under the model, before any transform; rank 1 is the best."""

    logprob: float
    rank: int


@dataclass
class Speculation:
    """What drafting achieved for one request. Drafts verified after its last token are counted too."""

    accepted_per_step: list[int] = field(default_factory=list)
    drafted_per_step: list[int] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Draft-and-verify steps."""
        return len(self.accepted_per_step)

    @property
    def drafted(self) -> int:
        """Drafts verified."""
        return sum(self.drafted_per_step)

    @property
    def accepted(self) -> int:
        """Drafts accepted."""
        return sum(self.accepted_per_step)

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """How often the draft at each position was accepted."""
        deepest = max(self.drafted_per_step, default=0)
        return tuple(sum(a > i for a in self.accepted_per_step) for i in range(deepest))

    @property
    def acceptance_length(self) -> float:
        """Tokens per step: accepted drafts + 1, on average; 0.0 before the first step."""
        return (self.accepted + self.steps) / self.steps if self.steps else 0.0

    def since(self, step: int) -> "Speculation":
        """Of all steps but the first ``step``."""
        return Speculation(self.accepted_per_step[step:], self.drafted_per_step[step:])

    def __add__(self, other: "Speculation") -> "Speculation":
        return Speculation(
            self.accepted_per_step + other.accepted_per_step, self.drafted_per_step + other.drafted_per_step
        )

    def __iadd__(self, other: "Speculation") -> "Speculation":
        self.accepted_per_step += other.accepted_per_step
        self.drafted_per_step += other.drafted_per_step
        return self


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    FINISHED = "finished"


TokenLogprobs = dict[int, Logprob]


@dataclass(eq=False)
class Request:
    """One completion on its way through the engine. Only the engine changes it.

    Attributes:
        seed: None until it is queued, if it has none of its own.
        capacity: tokens its pages may have to hold.
        fixed_depth: whether every step must offer it ``depth`` drafts, or adaptive depth decides.
        spare: further tokens its pages hold from the start.
        stops: tokens that end the output.
        priority: lower numbers are served first.
        deadline: ``time.perf_counter()`` at which it is ended, finished or not.
        salt: only requests of the same salt share cached pages.
        tokens: to prefill: the prompt, and once preempted all it had emitted but the newest token.
        follows: that newest token; -1 before the first.
        drafted: of each token of the output whether it was a draft.
        prefilled: how many of ``tokens`` are in the cache or on their way into it.
        begun: whether a chunk of them has been launched.
        registered: full pages the prefix cache knows of.
        digests: of its full pages.
        inflight: launches that have not been read.
        unread: those among them that will hold at least one token.
        rows_bound: the most tokens that the sequence can have once all launches are read.
        cached_tokens: prompt tokens found in the prefix cache at its first admission.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int | None
    max_tokens: int
    depth: int
    capacity: int
    spare: int = 0
    stops: Sequence[int] = ()
    matcher: Matcher | None = None
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
    speculation: Speculation = field(default_factory=Speculation)
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    tokens: Sequence[int] = ()
    follows: int = -1
    prefilled: int = 0
    begun: bool = False
    registered: int = 0
    digests: list[bytes] = field(default_factory=list)
    inflight: int = 0
    unread: int = 0
    rows_bound: int = 0
    cached_tokens: int = 0
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
