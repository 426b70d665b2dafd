"""Pieces of responses, in OpenAI's shapes."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial

from mtp_jax import (
    CompletionOutput,
    JsonObject,
    Logprob,
    RequestOutput,
    Speculation,
    StreamDecoder,
    Tokenizer,
)
from serve.base.settings import SpecMetrics

_LEAST = -9999.0  # OpenAI's number for minus infinity, which JSON cannot express


def usage(outputs: Collection[RequestOutput], reasoning_tokens: int | None = None) -> JsonObject:
    """Token counts over all prompts."""
    prompt = sum(len(o.prompt_token_ids) for o in outputs)
    completion = sum(c.num_tokens for o in outputs for c in o.outputs)
    counts: JsonObject = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(o.cached_tokens for o in outputs)},
    }
    if reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return counts


def speculation_metrics(s: Speculation, level: SpecMetrics, depth: int) -> JsonObject:
    """vLLM's ``metrics.speculative_decoding``: the results of drafting, over the steps that drafted."""
    steps = [(d, a) for d, a in zip(s.drafted_per_step, s.accepted_per_step, strict=True) if d]
    by_length = {d: [0] * (d + 1) for d, _ in steps}
    histogram = [0] * (depth + 1)
    for drafted, accepted in steps:
        by_length[drafted][accepted] += 1
        histogram[accepted] += 1
    metrics: JsonObject = {
        "mean_acceptance_length": 1 + s.accepted / len(steps) if steps else 0.0,
        "draft_acceptance_rate": s.accepted / s.drafted if steps else 0.0,
        "acceptance_histogram": histogram,
        "acceptance_histogram_by_draft_length": {str(d): counts for d, counts in sorted(by_length.items())},
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": s.accepted,
        "num_draft_tokens": s.drafted,
        "num_spec_tokens": depth,
    }
    if level == "detailed":
        metrics["per_step_drafted"] = [d for d, _ in steps]
        metrics["per_step_accepted"] = [a for _, a in steps]
        sources = zip(s.drafted_per_step, s.source_per_step, strict=True)
        metrics["per_step_source"] = [source.name.lower() for d, source in sources if d]
    return metrics


def time_metrics(output: RequestOutput, s: Speculation) -> JsonObject:
    """Times of a request with one completion by the names of vLLM's ``metrics``, and counts of its tokens.

    Times are in milliseconds, and null where nothing was measured: an answer of one token has no time between
    tokens. ``tokens_per_second`` counts the tokens after the first. output: the last one. s: all its drafts.
    """
    (c,), t = output.outputs, output.timing
    gaps = c.num_tokens - 1 if c.decode_seconds else 0

    def milliseconds(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1e3, 3)

    return {
        "queue_time_ms": milliseconds(t.admitted),
        "time_to_first_token_ms": milliseconds(t.first_token),
        "generation_time_ms": milliseconds(c.decode_seconds),
        "mean_itl_ms": milliseconds(c.decode_seconds / gaps) if c.decode_seconds and gaps > 0 else None,
        "tokens_per_second": gaps / c.decode_seconds if c.decode_seconds and gaps > 0 else None,
        "cached_tokens": output.cached_tokens,
        "draft_tokens": s.drafted,
        "accepted_draft_tokens": s.accepted,
    }


def without_tokens(output: RequestOutput) -> RequestOutput:
    """The output of a request for no tokens, which the engine answers with one."""

    def without(c: CompletionOutput) -> CompletionOutput:
        return replace(
            c,
            text="",
            token_ids=[],
            token_texts=[],
            drafted=[],
            logprobs=[],
            num_tokens=0,
            finish_reason="length" if c.finish_reason == "stop" else c.finish_reason,
            stop_reason=None,
        )

    return replace(output, outputs=[without(c) for c in output.outputs])


def token_extras(c: CompletionOutput, ids: bool | None, origins: bool | None) -> JsonObject:
    """Fields of tokens, as requested: their ids; or ids, texts and whether each was drafted."""
    extras: JsonObject = {}
    if ids:
        extras["token_ids"] = c.token_ids
    if origins:
        tokens = zip(c.token_ids, c.token_texts, c.drafted, strict=True)
        extras["token_origins"] = [{"id": t, "text": text, "drafted": d} for t, text, d in tokens]
    return extras


class TextOffsets:
    """Where the tokens of a choice begin in its text, in characters; without a tokenizer there is no text."""

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool) -> None:
        self._tokenizer, self._next = tokenizer, 0
        self._decoder = StreamDecoder(tokenizer, skip_special_tokens) if tokenizer else None

    def push(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token in token_ids:
            offsets.append(self._next)
            self._next += len(self._decoder.push([token])) if self._decoder else 0
        return offsets

    def of_prompt(self, token_ids: Sequence[int], prompt: str) -> list[int]:
        """Offsets of an echoed prompt's tokens; the completion begins at the prompt's end, in any case.

        A special token has its name's length where the prompt spells it; a tokenizer's own bos has none.
        """
        offsets = [0] * len(token_ids)
        if self._tokenizer:
            decoder, at = StreamDecoder(self._tokenizer), 0
            for i, token in enumerate(token_ids):
                offsets[i] = min(at, len(prompt))
                name = token_name(self._tokenizer, token)
                if self._tokenizer.token_bytes(token):  # a token with text of its own
                    at += len(decoder.push([token]))
                elif prompt.startswith(name, at):
                    at += len(name)
        self._next = len(prompt)
        return offsets


def completion_logprobs(
    tokenizer: Tokenizer | None,
    token_ids: Sequence[int],
    scores: Sequence[dict[int, Logprob] | None],
    offsets: Sequence[int],
) -> JsonObject:
    """Log-probabilities for the legacy completion route: parallel lists."""
    name = cache(partial(token_name, tokenizer))
    tokens = [name(t) for t in token_ids]
    best = [s and _by_name(name, s) for s in scores]
    chosen = [s and finite(s[t]) for t, s in zip(token_ids, scores, strict=True)]
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": best, "text_offset": offsets}


def chat_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    scores: Sequence[dict[int, Logprob]],
    top: int,
    *,
    ids: bool = False,
) -> JsonObject:
    """Log-probabilities for the chat route: an object per token. ids: whether their ids are their names."""

    def entry(token: int, score: Logprob) -> JsonObject:
        content = tokenizer.token_bytes(token, False)
        text = token_name(None, token) if ids else content.decode("utf-8", "replace")
        return {"token": text, "logprob": finite(score), "bytes": list(content)}

    content = []
    for token, scored in zip(token_ids, scores, strict=True):
        best = sorted(scored.items(), key=lambda item: item[1].rank)[:top]
        content.append(entry(token, scored[token]) | {"top_logprobs": [entry(t, s) for t, s in best]})
    return {"content": content, "refusal": None}


def prompt_scores(
    tokenizer: Tokenizer | None, scores: Sequence[dict[int, Logprob] | None]
) -> list[JsonObject | None]:
    """vLLM's ``prompt_logprobs``: for each token of a prompt its scores by id; null for the first token."""
    name = cache(partial(token_name, tokenizer))

    def entry(token: int, score: Logprob) -> JsonObject:
        return {"logprob": finite(score), "rank": score.rank, "decoded_token": name(token)}

    return [{str(t): entry(t, score) for t, score in s.items()} if s else None for s in scores]


def token_name(tokenizer: Tokenizer | None, token: int) -> str:
    """A token as text; without a tokenizer its id."""
    return tokenizer.decode([token], skip_special_tokens=False) if tokenizer else f"token_id:{token}"


def _by_name(name: Callable[[int], str], scores: dict[int, Logprob]) -> dict[str, float]:
    """Scores by name; tokens may share a name, as parts of characters do, and the likeliest stays."""
    best: dict[str, float] = {}
    for token, score in scores.items():
        best[name(token)] = max(best.get(name(token), _LEAST), finite(score))
    return best


def finite(score: Logprob) -> float:
    """Turns the log-probability into a number that JSON can express."""
    return max(score.logprob, _LEAST)
