"""/generate in the shapes of SGLang."""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from mtp_jax import CompletionOutput, JsonObject, Logprob, RequestOutput, Stream
from serve.answers.calls import Call
from serve.answers.generation import check_room, submit
from serve.answers.shapes import finite, token_name, without_tokens
from serve.base.errors import ApiError
from serve.base.ids import new_id
from serve.base.state import Server
from serve.bodies.native import Ask, GenerateBody
from serve.bodies.reading import read


async def generate(server: Server, request: Request) -> Response:
    """The route."""
    body = await read(server.settings, request, GenerateBody)
    asks, defaults = body.asks, server.allm.about.sampling_defaults
    params = [ask.params(body.stream, defaults) for ask in asks]
    check_room(server, [p.n for p in params])
    names = [ask.rid or new_id() for ask in asks]

    async def submitted() -> _Generate:
        streams = []
        for ask, p, name in zip(asks, params, names, strict=True):
            streams += await submit(server, request, ask.sampling, [ask.prompt], p, name)
            _check_start(body.routed_experts_start_len or 0, ask, streams[-1].prompt_tokens)
        return _Generate(server, request, body, streams)

    return await _Generate.respond_to(server, request, body.stream, submitted())


def _check_start(start: int, ask: Ask, tokens: int) -> None:
    """Raise ApiError for a first token of routed experts that is past the prompt of ``tokens`` tokens."""
    if ask.return_routed_experts and start > tokens:
        field = "routed_experts_start_len"
        raise ApiError(400, f"{field} = {start}; expected 0 to {tokens}, the prompt's tokens", field)


class _Generate(Call):
    """Completions so far: texts and ids are cumulative; scores are [log-probability, id, text] per token."""

    def __init__(
        self, server: Server, request: Request, body: GenerateBody, streams: Sequence[Stream]
    ) -> None:
        super().__init__(server, request, streams, body.stream)
        self._body, self._asks, self._tokenizer = body, body.asks, server.allm.about.tokenizer
        # The number of each prompt's first completion among all.
        self._first = [0, *accumulate(ask.sampling.n or 1 for ask in self._asks)]
        self._scored: dict[int, Sequence[dict[int, Logprob] | None]] = {}

    def answer(self) -> JsonObject | list[JsonObject]:
        """The completion, or a list of several."""
        found = [one for prompt, output in sorted(self.last.items()) for one in self.grown(prompt, output)]
        return found if self._body.is_batch or len(found) > 1 else found[0]

    def grown(self, prompt: int, output: RequestOutput) -> Iterable[JsonObject]:
        """An object per completion."""
        output = output if self._asks[prompt].answers else without_tokens(output)
        for c in output.outputs:
            meta = self._meta(prompt, output, c)
            index = self._first[prompt] + c.index
            yield {"text": c.text, "output_ids": c.token_ids, "meta_info": meta, "index": index}

    def _meta(self, prompt: int, output: RequestOutput, c: CompletionOutput) -> JsonObject:
        s, seconds = c.speculation, output.timing.finished
        meta: JsonObject = {
            "id": self.streams[prompt].request_id,
            "finish_reason": _reason(c),
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": c.num_tokens,
            "cached_tokens": output.cached_tokens,
            "weight_version": output.weight_version,
            **self.server.fingerprint,
            **self._scores(prompt, output, c),
        }
        if c.routed_experts is not None:
            meta["routed_experts"] = self._experts(
                len(output.prompt_token_ids) + c.num_tokens, c.routed_experts
            )
        if s.drafted:
            meta |= {
                "spec_accept_length": s.acceptance_length,
                "spec_accept_rate": s.accepted / s.drafted,
                "spec_verify_ct": s.steps,
            }
        return meta if seconds is None else meta | {"e2e_latency": seconds}

    def _scores(self, prompt: int, output: RequestOutput, c: CompletionOutput) -> JsonObject:
        """Scores of a completion and of its prompt from the requested token on."""
        ask = self._asks[prompt]
        if not ask.return_logprob:
            return {}
        found = self._lists(ask, "output", c.token_ids, c.logprobs or [])
        if ask.scores_prompt:
            start = ask.logprob_start_len or 0
            scores = self._scored[prompt] = output.prompt_logprobs or self._scored.get(prompt, ())
            found |= self._lists(ask, "input", output.prompt_token_ids[start:], scores[start:])
        return found

    def _experts(self, tokens: int, found: np.ndarray) -> str:
        """Ids of experts [tokens - 1, layers, k] from the requested token on: int32, in base64."""
        wanted = found[self._body.routed_experts_start_len or 0 : tokens - 1]
        return b64encode(wanted.astype("<i4").tobytes()).decode()

    def _lists(
        self, ask: Ask, of: str, ids: Sequence[int], scores: Sequence[dict[int, Logprob] | None]
    ) -> JsonObject:
        pairs = list(zip(ids, scores, strict=False))  # a prompt that ended during its prefill has fewer
        found: JsonObject = {f"{of}_token_logprobs": [self._entry(t, s[t] if s else None) for t, s in pairs]}
        if most := ask.top_logprobs_num:
            found[f"{of}_top_logprobs"] = [self._best(s, most) if s else None for _, s in pairs]
        return found

    def _best(self, scores: dict[int, Logprob], most: int) -> list[list[object]]:
        best = sorted(scores.items(), key=lambda item: item[1].rank)[:most]
        return [self._entry(token, score) for token, score in best]

    def _entry(self, token: int, score: Logprob | None) -> list[object]:
        text = token_name(self._tokenizer, token) if self._body.return_text_in_logprobs else None
        return [score and finite(score), token, text]


def _reason(c: CompletionOutput) -> JsonObject | None:
    """The reason of the end in SGLang's shape, which has three types."""
    match c.finish_reason:
        case None:
            return None
        case "stop":
            token = c.token_ids[-1] if c.token_ids else None  # the model's own end
            return {"type": "stop", "matched": token if c.stop_reason is None else c.stop_reason}
        case "length":
            return {"type": "length", "length": c.num_tokens}
        case "timeout":
            return {"type": "abort", "message": "the request's time was over"}
        case _:
            return {"type": "abort", "message": "the request was aborted"}
