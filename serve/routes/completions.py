"""/v1/completions."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from mtp_jax import CompletionOutput, JsonObject, LazyPrompt, Logprob, RequestOutput, Stream
from serve.answers.choices import ChoicesCall
from serve.answers.generation import submit
from serve.answers.shapes import TextOffsets, completion_logprobs, prompt_scores, token_extras, without_tokens
from serve.base.ids import new_id
from serve.base.state import Server
from serve.bodies.reading import read
from serve.bodies.schema import CompletionBody

_DEFAULT_MAX_TOKENS = 16


async def completions(server: Server, request: Request) -> Response:
    """The route."""
    body = await read(server.settings, request, CompletionBody)
    # To score a prompt the engine must generate one token, which the answer leaves out.
    most = _DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    scored = body.logprobs if body.echo else body.prompt_logprobs
    defaults = server.allm.about.sampling_defaults
    params = body.params(most, body.stream, body.logprobs, scored, defaults=defaults)
    name, prompts = body.rid or f"cmpl-{new_id()}", [_prompt(server, body, p) for p in body.prompts]

    async def submitted() -> _Completions:
        streams = await submit(server, request, body, prompts, params, name)
        return _Completions(server, request, body, streams, name)

    return await _Completions.respond_to(server, request, body.stream, submitted())


def _prompt(server: Server, body: CompletionBody, prompt: str | list[int]) -> str | list[int] | LazyPrompt:
    """The prompt as the engine takes it. Raises RequestError."""
    if isinstance(prompt, list):
        return body.cut(prompt)
    adds = body.add_special_tokens is not False
    if body.truncate_prompt_tokens is None and adds:
        return prompt
    tokenizer = server.tokenizer
    most = server.allm.about.engine.longest - 1 if body.truncate_prompt_tokens is None else None
    return LazyPrompt(lambda: body.cut(tokenizer.encode(prompt, adds, most)), len(prompt))


class _Completions(ChoicesCall):
    kind = chunk_kind = "text_completion"

    def __init__(
        self, server: Server, request: Request, body: CompletionBody, streams: Sequence[Stream], name: str
    ) -> None:
        super().__init__(server, request, body, streams, name)
        self.body = body
        self._tells_tokens |= body.logprobs is not None
        self._prompt_scores: dict[int, Sequence[dict[int, Logprob] | None]] = {}
        self._tokenizer, self._offsets = server.allm.about.tokenizer, dict[int, TextOffsets]()
        self._skips_special = body.skip_special_tokens is not False

    def choice(self, index: int, output: RequestOutput, c: CompletionOutput, begun: bool) -> JsonObject:
        """Text, and log-probabilities as parallel lists."""
        if output.prompt_logprobs:  # a stream has them once for all completions
            self._prompt_scores[index // len(output.outputs)] = output.prompt_logprobs
        echoed = self._prompt(index // len(output.outputs), output) if self.body.echo and not begun else None
        text = (echoed or "") + c.text
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": c.finish_reason}
        if self.body.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, output, c, echoed)
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_scores(self._tokenizer, output.prompt_logprobs or [])
        extras = token_extras(c, self.body.return_token_ids, self.body.return_token_origins)
        return choice | extras

    def _logprobs(self, index: int, output: RequestOutput, c: CompletionOutput, echoed: str | None) -> object:
        offsets = self._offsets.setdefault(index, TextOffsets(self._tokenizer, self._skips_special))
        ids, scores, places = c.token_ids, c.logprobs or [], []
        if echoed is not None:
            prompt = output.prompt_token_ids
            # A prompt that ended during its prefill has fewer scores than tokens.
            known = self._prompt_scores.get(index // len(output.outputs), ())
            ids, scores = prompt + ids, [*known, *[None] * (len(prompt) - len(known)), *scores]
            places = offsets.of_prompt(prompt, echoed)
        places += offsets.push(c.token_ids)
        names = None if self.body.names_ids else self._tokenizer
        return completion_logprobs(names, ids, scores, places)

    def take(self, output: RequestOutput) -> RequestOutput:
        """Record an output, without its token where max_tokens = 0."""
        output = super().take(output)
        return without_tokens(output) if self.body.max_tokens == 0 else output

    def _prompt(self, number: int, output: RequestOutput) -> str:
        given = self.body.prompts[number]
        if isinstance(given, str) and self.body.truncate_prompt_tokens is None:
            return given
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(output.prompt_token_ids, self._skips_special)
