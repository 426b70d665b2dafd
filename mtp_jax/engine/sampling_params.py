"""Options of a request: its choice of tokens, its end, its output."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

from mtp_jax.decode.keys import MAX_DRAFTS
from mtp_jax.errors import RequestError
from mtp_jax.json_object import JsonObject
from mtp_jax.options import check, documented, named, option
from mtp_jax.text.grammar import StructuredOutput

MAX_LOGPROBS = 20
_MOST = 2**31 - 1
_GREEDY = {"temperature": 0}
OutputKind = Literal["cumulative", "delta", "final_only"]


@documented
@named(RequestError)
@dataclass(frozen=True)
class SamplingParams:
    """Options for the choice of tokens. Names and defaults follow vLLM's. Raises RequestError."""

    n: int = option(1, "completions per prompt", low=1, high=1024, metavar="N")
    temperature: float = option(1.0, "0 takes the most likely token", low=0, high=1e6, metavar="T")
    top_p: float = option(
        1.0,
        "sample from the likeliest tokens of at least this total probability; 1 is off, 0 leaves one",
        low=0,
        high=1,
        metavar="P",
        idle=_GREEDY,
    )
    top_k: int = option(
        0,
        "sample from the K likeliest tokens; 0 or -1 is off",
        low=-1,
        high=_MOST,
        metavar="K",
        idle=_GREEDY,
    )
    min_p: float = option(
        0.0,
        "leave out tokens below this fraction of the likeliest; 0 is off",
        low=0,
        high=1,
        metavar="P",
        idle=_GREEDY,
    )
    max_tokens: int | None = option(
        16, "most tokens to generate", low=1, high=_MOST, unset="as many as fit", metavar="N"
    )
    min_tokens: int = option(
        0,
        "no stop token before this many, and no stop string that ends in their text",
        low=0,
        high=_MOST,
        metavar="N",
    )
    stop: str | Sequence[str] = option(
        (), "end before this text", kind=str, unset="none", repeated=True, metavar="TEXT"
    )
    stop_token_ids: Sequence[int] = option(
        (),
        "end after one of these tokens, beside the model's own; they have no text unless "
        "include_stop_str_in_output",
        kind=object,
        unset="none",
        metavar="ID,...",
    )
    stop_in_thoughts: bool = option(
        True,
        "stop strings end a thought, too; otherwise only a stop string that holds </think> does",
        off=("--no-stop-in-thoughts", "stop strings end the answer alone, not a thought before it"),
    )
    ignore_eos: bool = option(False, "go on after the model's end-of-sequence tokens")
    seed: int | None = option(
        None,
        "makes sampling reproducible, independent of the rest of the batch",
        kind=int,
        low=0,
        high=2**32 - 1,
        unset="drawn",
        metavar="N",
        idle=_GREEDY,
    )
    presence_penalty: float = option(
        0.0, "subtracted from every token already in the output", low=-2, high=2, metavar="X"
    )
    frequency_penalty: float = option(
        0.0, "subtracted once per occurrence in the output", low=-2, high=2, metavar="X"
    )
    repetition_penalty: float = option(  # within bounds in which logits stay far from the largest float32
        1.0,
        "divides (positive) or multiplies logits of tokens in prompt or output; 1 is off",
        low=0.01,
        high=100,
        metavar="X",
    )
    logit_bias: dict[int, float] = option(
        {},
        "added to the logits of these tokens",
        kind=object,
        unset="none",
        metavar="ID:BIAS,...",
    )
    logprobs: int | None = option(
        None,
        "log-probabilities of the chosen token and of this many most likely tokens",
        kind=int,
        low=0,
        high=MAX_LOGPROBS,
        unset="none",
        metavar="N",
    )
    prompt_logprobs: int | None = option(
        None,
        "log-probabilities of the tokens of the prompt and of this many most likely tokens",
        kind=int,
        low=0,
        high=MAX_LOGPROBS,
        unset="none",
        metavar="N",
    )
    routed_experts: bool = option(
        False,
        "return the experts that each token of prompt and output chose in each MoE layer; True needs an "
        "engine with return_routed_experts",
        flag=None,
    )
    num_speculative_tokens: int | None = option(
        None,
        "most drafts per step for this request; 0: no speculation",
        kind=int,
        low=0,
        high=MAX_DRAFTS,
        unset="the engine's",
        flag=None,
    )
    suffix_drafts: bool | None = option(
        None,
        "draft the tokens after an earlier occurrence of the last tokens; True needs an engine that does",
        kind=bool,
        unset="the engine's when greedy or without NextN layers, else False",
        flag=None,
    )
    skip_special_tokens: bool = option(
        True,
        "leave special tokens out of the text",
        off=("--no-skip-special-tokens", "show special tokens in the text"),
    )
    include_stop_str_in_output: bool = option(
        False, "keep the stop string, or the text of the stop token, in the text", idle={"stop": ()}
    )
    output_kind: OutputKind = option(
        "cumulative",
        "outputs of an iterator: everything so far (cumulative), the new part (delta), or one "
        "output at the end (final_only)",
        choices=get_args(OutputKind),
        flag=None,
    )
    structured: StructuredOutput | None = option(
        None,
        "the form that the output must have; it ends at an end-of-sequence token once it is complete, or, "
        "cut short, at a stop string, a stop token or max_tokens",
        kind=object,
        unset="anything",
        flag=None,
    )
    allowed_token_ids: Sequence[int] | None = option(
        None,
        "the output consists of these tokens alone",
        kind=object,
        unset="any",
        metavar="ID,...",
    )
    bad_words: Sequence[str] = option(
        (),
        "the output never holds the tokens of this word, as it is spelt at the beginning of a text or after "
        "a space",
        kind=str,
        unset="none",
        repeated=True,
        flag="--bad-word",
        metavar="WORD",
    )
    max_thinking_tokens: int | None = option(
        None,
        "most tokens of a thought, whose end is then forced; for models whose tag </think> is a token",
        kind=int,
        low=0,
        high=_MOST,
        unset="no bound",
        metavar="N",
    )

    def __post_init__(self) -> None:
        none_as: JsonObject = {"stop": (), "stop_token_ids": (), "logit_bias": {}, "bad_words": ()}
        for name, none in none_as.items():
            if getattr(self, name) is None:  # as vLLM writes it
                object.__setattr__(self, name, none)
        check(self, RequestError)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens = {self.min_tokens} is above max_tokens = {self.max_tokens}")
        self._check_end()
        self._check_tokens()

    def _check_end(self) -> None:
        if not isinstance(self.stop, str) and isinstance(self.stop, Iterable):
            object.__setattr__(self, "stop", tuple(self.stop))  # an iterator can be read only once
        many = isinstance(self.stop, Iterable)
        if not many or any(not isinstance(s, str) or not s for s in self.stop_strings):
            raise RequestError(f"stop = {self.stop!r}; expected non-empty strings")
        if self.structured is not None:
            if not isinstance(self.structured, StructuredOutput):
                raise RequestError(f"structured = {self.structured!r}; expected a StructuredOutput or None")
            if self.ignore_eos or self.min_tokens:
                raise RequestError(
                    "a structured output ends where its grammar does; leave out ignore_eos and min_tokens"
                )

    def _check_tokens(self) -> None:
        self._freeze("stop_token_ids", Integral, "integers")
        if self.allowed_token_ids is not None:
            self._freeze("allowed_token_ids", Integral, "integers")
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty; name at least one token, or leave it out")
        self._freeze("bad_words", str, "strings")
        halves = range(0xD800, 0xE000)  # of characters: no token holds a lone one
        if wrong := [w for w in self.bad_words if not w.strip() or any(ord(c) in halves for c in w)]:
            raise RequestError(f"bad_words holds {wrong[0]!a:.80}; expected words")
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias = {self.logit_bias!r}; expected token ids and numbers")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller may change the original
        for token, bias in self.logit_bias.items():
            numbers = isinstance(token, int) and isinstance(bias, Real)
            if not numbers or bool in (type(token), type(bias)) or not abs(bias) <= 100:
                raise RequestError(
                    f"logit_bias {token!r}: {bias!r}; expected token id: number from -100 to 100"
                )

    def _freeze(self, name: str, kind: type, expected: str) -> None:
        """Make a field a tuple, of elements of one kind."""
        value = getattr(self, name)
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise RequestError(f"{name} = {value!r}; expected {expected}")
        object.__setattr__(self, name, tuple(value))
        for element in getattr(self, name):
            if not isinstance(element, kind) or isinstance(element, bool):
                raise RequestError(f"{name} holds {element!r}; expected {expected}")

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
        biases = self.logit_bias or self.allowed_token_ids is not None
        return self.temperature == 0 and not any(penalties) and not biases
