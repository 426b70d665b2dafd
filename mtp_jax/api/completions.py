"""Completions of a prompt: the engine's tokens become text, and text becomes outputs for the user."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TypedDict, cast

import numpy as np

from mtp_jax.api.outputs import CompletionOutput, RequestOutput, Timing
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request, Terms
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import RequestError
from mtp_jax.text.stop_strings import StopStrings
from mtp_jax.text.tokenizer import StreamDecoder, Tokenizer

Prompt = str | Sequence[int]


class RequestOptions(TypedDict, total=False):
    """Options of a request besides its prompt and its choice of tokens.

    Keys:
        request_id: the name that ``abort`` takes.
        priority: lower runs first; 0 unless given.
        timeout: seconds after which it ends with the reason "timeout"; None: never.
        cache_salt: only requests of the same salt share cached prefixes, and outputs to draft from.
    """

    request_id: str | None
    priority: int
    timeout: float | None
    cache_salt: str


class CompletionState:
    """One completion: a request and its text so far.

    Attributes:
        request: the engine's request.
        token_texts: text that each token added to the text that the user may see; a stop string that may have
            begun is held back.
        seen: number of tokens of the request's output that are in the text.
        done: whether no further text will come.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request, self.seen, self.done = request, 0, False
        self.token_texts: list[str] = []
        self._texts: list[str] = []  # a text that grew by each token would be copied each time
        self._emitted = (0, 0, 0)  # texts, tokens and steps that outputs have held so far
        p = request.params
        self._tokenizer = tokenizer
        self._decoder = tokenizer and StreamDecoder(tokenizer, p.skip_special_tokens)
        self._stops = StopStrings(p.stop_strings, p.include_stop_str_in_output)
        self._border = None
        if tokenizer and p.stop_strings and not p.stop_in_thoughts:
            inside = tokenizer.thoughts.open_after(request.prompt, tokenizer.decode_all)
            self._border = tokenizer.thoughts.border(inside)

    def advance(self, engine: Engine) -> None:
        """Detokenise new tokens; a stop string cuts the tokens that follow it."""
        request = self.request
        while self.seen < len(request.progress.output):
            self.seen += 1
            self._show(request.progress.output[self.seen - 1])
            if self._stopped(engine):
                return
        if request.finished:
            self.done = True
            rest = self._decoder.flush() if self._decoder else ""
            inside = self._border is not None and self._border.inside
            rest, stopped = self._stops.push(rest, self.seen > request.params.min_tokens, inside)
            rest += "" if stopped else self._stops.flush()
            self._texts.append(rest)
            if self.token_texts:
                self.token_texts[-1] += rest
            self._stopped(engine)

    def _stopped(self, engine: Engine) -> bool:
        """Whether the text has met a stop string, which then ends the request."""
        if self._stops.matched is None:
            return False
        engine.stop(self.request, self.seen, self._stops.matched)
        self.done = True
        return True

    def output(self, index: int) -> CompletionOutput:
        """Everything so far, or the part since the last call."""
        request, params = self.request, self.request.params
        text, start, step = self._emitted
        if params.output_kind == "delta":
            self._emitted = len(self._texts), self.seen, request.progress.speculation.steps
        return CompletionOutput(
            index=index,
            text="".join(self._texts[text:]),
            token_ids=request.progress.output[start : self.seen],
            num_tokens=self.seen,
            finish_reason=request.progress.finish_reason if self.done else None,
            logprobs=None if params.logprobs is None else request.progress.logprobs[start : self.seen],
            token_texts=self.token_texts[start:],
            drafted=request.progress.drafted[start : self.seen],
            speculation=request.progress.speculation.since(step),
            decode_seconds=self._decode_seconds() if self.done else None,
            stop_reason=request.progress.stop_reason if self.done else None,
            routed_experts=self._routed_experts() if self.done else None,
        )

    def _routed_experts(self) -> np.ndarray | None:
        """The experts of the tokens that the output kept, but the last."""
        read, kept = self.request.progress.routed_experts, len(self.request.prompt) + self.seen - 1
        return read and read()[:kept]

    def _decode_seconds(self) -> float | None:
        first, last = self.request.progress.first_token_at, self.request.progress.finished_at
        return None if first is None or last is None else last - first

    def _show(self, token: int) -> None:
        """Add a token's text.

        No stop string is completed within the first ``min_tokens``, as in vLLM, and a stop token has no text
        unless the text is to include it.
        """
        request = self.request
        ends = request.finished and self.seen == len(request.progress.output) and token in request.stops
        if self._decoder is None or (ends and not request.params.include_stop_str_in_output):
            text = ""
        else:
            text = self._decoder.push([token])
        may_stop = self.seen > request.params.min_tokens
        thought, text = self._split(token, text)
        parts = [self._stops.push(thought, may_stop, inside=True)[0]] if thought else []
        visible = "".join([*parts, self._stops.push(text, may_stop)[0]])
        self._texts.append(visible)
        self.token_texts.append(visible)

    def _split(self, token: int, text: str) -> tuple[str, str]:
        """A token's text, split where a thought ends in which no stop string counts."""
        if self._border is None or self._tokenizer is None:
            return "", text
        return self._border.push(self._tokenizer.decode_all([token]), text)


class PromptState:
    """One prompt and its n completions. Raises RequestError for a prompt that cannot be served.

    ``terms``: the argument of ``Engine.make_requests``.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        prompt: Prompt,
        params: SamplingParams,
        terms: Terms | None = None,
    ) -> None:
        self.prompt = prompt if isinstance(prompt, str) else None
        check(prompt, params)
        if tokenizer is None and (isinstance(prompt, str) or params.stop_strings):
            raise RequestError("the model directory has no tokenizer; give token ids and no stop strings")
        ids = _ids(prompt, tokenizer, engine.config.longest - 1)
        self.params = params
        requests = engine.make_requests(ids, params, **(terms or {}))
        self.completions = [CompletionState(request, tokenizer) for request in requests]
        self._ids = list(requests[0].prompt)
        self._scored = False  # whether an output has held the prompt's log-probabilities

    @property
    def done(self) -> bool:
        """Whether every completion has ended."""
        return all(c.done for c in self.completions)

    def poll(self) -> RequestOutput | None:
        """The output, unless only the final one is wanted and it is not there yet."""
        return self.output() if self.done or self.params.output_kind != "final_only" else None

    def output(self) -> RequestOutput:
        """The output so far, or the new part of it."""
        first = self.completions[0].request
        outputs = [c.output(i) for i, c in enumerate(self.completions)]
        finished = [c.request.progress.finished_at or 0.0 for c in self.completions]

        scored = self.params.prompt_logprobs is not None and not self._scored
        # All completions find the same; the first one to prefill has them first.
        scores = max((c.request.progress.prompt_logprobs for c in self.completions), key=len)
        self._scored |= scored and self.params.output_kind == "delta" and bool(scores)

        def since(at: float | None) -> float | None:
            return None if at is None else at - first.progress.arrived

        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=self._ids,
            outputs=outputs,
            prompt_logprobs=list(scores) if scored else None,
            timing=Timing(
                since(first.progress.admitted_at),
                since(first.progress.first_token_at),
                since(max(finished) if self.done else None),
            ),
            cached_tokens=first.progress.cached_tokens,
            weight_version=first.progress.weight_version,
        )


def check(prompt: Prompt, params: SamplingParams) -> None:
    """Raises RequestError for an argument that is neither a prompt nor sampling parameters at all."""
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, str | Sequence | np.ndarray):
        raise RequestError(f"the prompt is {prompt!r:.80}; {_instead_of(prompt)}")
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params = {params!r:.80}; expected SamplingParams")


def _instead_of(prompt: object) -> str:
    given = prompt if isinstance(prompt, Mapping) else {}
    if "role" in given:
        return "chat takes messages"
    for key in ("prompt_token_ids", "prompt"):
        if key in given:
            return f"give the value of {key!r} alone"
    return "expected a string or a list of token ids"


def _ids(prompt: Prompt, tokenizer: Tokenizer | None, most: int) -> list[int]:
    if isinstance(prompt, str):
        assert tokenizer is not None
        return tokenizer.encode(prompt, most=most)
    ids = list(prompt)
    wrong = next((t for t in ids if not isinstance(t, Integral) or isinstance(t, bool)), None)
    if wrong is not None:
        raise RequestError(f"the prompt holds {wrong!r}; expected a string or a list of token ids")
    return ids


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many as a list."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]  # one prompt, or no prompt at all, which ``check`` refuses
    items = list(prompts)
    if items and isinstance(items[0], Integral):
        return [cast(list[int], items)]
    return cast(list[Prompt], items)
