"""What a simulated device must say, by the language alone: no cache, no slots, all summed anew."""

from collections.abc import Sequence

import numpy as np

from mtp_jax.engine.request import Request
from mtp_jax.simulate.language import MASK, Language, mix


class Told:
    """The text that a request must have, and the drafts that are right on the way.

    Attributes:
        output: all tokens up to the end.
        reason: why it ends.
        hidden: the state that each token of the output follows.
    """

    def __init__(self, language: Language, request: Request) -> None:
        self.language, self.request, p = language, request, request.params
        self.heat = (request.progress.seed or 0) + 1 if p.temperature > 0 else 0
        self.output, self.hidden, self.reason = list[int](), list[int](), "length"
        total, broken = language.total(request.prompt), bool({*request.prompt} & language.broken)
        matcher = None
        if request.constraints and request.constraints.matcher and p.structured:
            matcher = request.constraints.matcher.compiled.matcher.deep_copy()
        while len(self.output) < request.max_tokens:
            if broken:
                self.reason = "error"
                return
            self.hidden.append(mix(total))
            token = self._next(mix(total), matcher)
            if token < 0:
                self.reason = "error"
                return
            position = len(request.prompt) + len(self.output)
            self.output.append(token)
            if token in request.stops and (matcher is None or matcher.is_accepting()):
                self.reason = "stop"
                return
            if matcher is not None:
                matcher.consume_tokens([token])
            broken = token in language.broken
            total = (total + language.row(token, position)) & MASK

    def _next(self, hidden: int, matcher: object) -> int:
        p, r = self.request.params, self.request
        if p.is_plain_greedy and matcher is None:
            return self.language.next(hidden)
        logits = self.language.logits(hidden, self.heat).astype(np.float64)
        for token in {*r.prompt, *self.output}:
            logits[token] *= p.repetition_penalty if logits[token] < 0 else 1 / p.repetition_penalty
        for token in {*self.output}:
            logits[token] -= p.presence_penalty + p.frequency_penalty * self.output.count(token)
        for token, bias in p.logit_bias.items():
            logits[token] += bias
        allowed = np.ones(self.language.vocab, bool)
        if p.allowed_token_ids is not None:
            allowed[:] = False
            allowed[[*p.allowed_token_ids]] = True
        if len(self.output) < p.min_tokens:
            allowed[[*r.stops]] = False
        if matcher is not None:
            allowed &= self._fitting(matcher)
        if not allowed.any():
            return -1
        return int(np.where(allowed, logits.round(4), -np.inf).argmax())

    def _fitting(self, matcher: object) -> np.ndarray:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)  # type: ignore[attr-defined]
        found = np.unpackbits(bits, count=self.language.vocab, bitorder="little").astype(bool)
        ends = [*self.language.ends]
        if found[ends].any():
            found[[*self.request.stops]] = True
        else:
            found[ends] = False
        return found

    def accepted(self) -> list[int]:
        """Of each step of the request, the drafts that must be kept of those that there were."""
        found, at = [], 1
        for drafted in self.request.progress.speculation.drafted_per_step:
            kept = 0
            while kept < drafted and self.language.right(self._after(at), kept):
                kept += 1
            found.append(kept)
            at += kept + 1
        return found

    def _after(self, count: int) -> int:
        """The state after so many tokens of the output."""
        if count < len(self.hidden):
            return self.hidden[count]
        return mix(self.language.total([*self.request.prompt, *self.output[:count]]))


def prefix(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether a text is the beginning of another."""
    return list(a) == list(b[: len(a)])
