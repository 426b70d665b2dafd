"""A prompt on its way to its completions: tokens come out of the engine, text and outputs go to the user."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request, SamplingParams, Speculation
from mtp_jax.errors import RequestError
from mtp_jax.outputs import CompletionOutput, RequestOutput, Timing
from mtp_jax.tokenizer import StopStrings, StreamDecoder, Tokenizer

Prompt = str | Sequence[int]


class Part:
    """One completion: a request and its text so far.

    Attributes:
        request: on its way through the engine.
        text: what may be shown.
        token_texts: what each token added to it.
        seen: tokens of the request's output that are in the text.
        done: whether nothing more will come.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request, self.text, self.seen, self.done = request, "", 0, False
        self.token_texts: list[str] = []
        p = request.params
        self._decoder = tokenizer and StreamDecoder(tokenizer, p.skip_special_tokens)
        self._stops = StopStrings(p.stop_strings, p.include_stop_str_in_output)

    def advance(self, engine: Engine) -> None:
        """Detokenise what is new; a stop string cuts the tokens that follow it."""
        request = self.request
        while self.seen < len(request.output):
            self.seen += 1
            if self._show(request.output[self.seen - 1]):
                del request.output[self.seen :], request.logprobs[self.seen :]
                engine.abort(request, "stop")
                request.finish_reason = "stop"
                self.done = True
                return
        if request.finished:
            self.done = True
            rest, stopped = self._stops.push(self._decoder.flush() if self._decoder else "")
            rest += "" if stopped else self._stops.flush()
            self.text += rest
            if self.token_texts:
                self.token_texts[-1] += rest

    def _show(self, token: int) -> bool:
        """Add a token's text; returns whether it completed a stop string."""
        visible, stopped = self._stops.push(self._decoder.push([token]) if self._decoder else "")
        self.text += visible
        self.token_texts.append(visible)
        return stopped


class Job:
    """One prompt and its n completions. Raises RequestError for what cannot be served.

    ``options``: keyword arguments of ``Engine.make_request``.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        prompt: Prompt,
        params: SamplingParams,
        **options: Any,
    ) -> None:
        if tokenizer is None and (isinstance(prompt, str) or params.stop_strings):
            raise RequestError(
                "the model directory has no tokenizer.json; give token ids and no stop strings"
            )
        self.prompt = prompt if isinstance(prompt, str) else None
        ids = _ids(prompt, tokenizer)
        self.params = params
        seeds = [None if params.seed is None else (params.seed + i) % 2**32 for i in range(params.n)]
        self.parts = [Part(engine.make_request(ids, params, seed, **options), tokenizer) for seed in seeds]
        self._ids = list(self.parts[0].request.prompt)

    def output(self) -> RequestOutput:
        """The output so far."""
        first = self.parts[0].request
        outputs = [
            CompletionOutput(
                index=i,
                text=part.text,
                token_ids=part.request.output[: part.seen],
                finish_reason=part.request.finish_reason if part.done else None,
                logprobs=part.request.logprobs[: part.seen] if self.params.logprobs is not None else None,
                token_texts=list(part.token_texts),
                speculation=part.request.speculation + Speculation(),
            )
            for i, part in enumerate(self.parts)
        ]

        finished = [part.request.finished_at or 0.0 for part in self.parts]

        def since(at: float | None) -> float | None:
            return None if at is None else at - first.arrived

        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=self._ids,
            outputs=outputs,
            speculation=sum((o.speculation for o in outputs[1:]), outputs[0].speculation),
            prompt_logprobs=list(first.prompt_logprobs) if self.params.prompt_logprobs is not None else None,
            timing=Timing(
                since(first.admitted_at),
                since(first.first_token_at),
                since(max(finished) if all(part.done for part in self.parts) else None),
            ),
            cached_tokens=first.cached_tokens,
        )


def _ids(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(prompt, str):
        assert tokenizer is not None
        return tokenizer.encode(prompt)
    ids = list(prompt)
    wrong = next((t for t in ids if not isinstance(t, Integral)), None)
    if wrong is not None:
        raise RequestError(f"the prompt holds {wrong!r}; expected a string or a list of token ids")
    return ids
