"""Results of ``LLM.generate``."""

from dataclasses import dataclass, field, replace

import numpy as np

from mtp_jax.api.hints import hinting
from mtp_jax.engine.speculation import Speculation, TokenLogprobs
from mtp_jax.errors import RequestError


@hinting(RequestError)
@dataclass(frozen=True)
class CompletionOutput:
    """One completion.

    Attributes:
        index: number of the completion among the prompt's n.
        text: detokenised; empty without a tokenizer.
        token_ids: emitted tokens, a final stop token included.
        num_tokens: number of tokens; in a delta, tokens of earlier deltas count too.
        finish_reason: "stop", "length", "abort", "timeout", "no_token" (the request's options together left
            no token), "error" (the model produced NaN, or a structured output grew too complex to go on);
            None: it runs.
        logprobs: per token, if asked for: the chosen token first, then the most likely tokens.
        token_texts: text that each token added to ``text``; text held back comes with a later token.
            With deltas, text still held back at the end appears in ``text`` only, not in ``token_texts``.
        drafted: whether each token was a draft; a prefill's first token and each step's last token are not.
        speculation: drafts verified and accepted.
        decode_seconds: seconds from its first token to its end; None while it runs, and without a token.
        stop_reason: the stop string, or the token of ``stop_token_ids``, that ended it; None after the
            model's own end-of-sequence token, for every other end, and while it runs.
        routed_experts: ids of the experts that each token of prompt and output, but the last of all, chose in
            each MoE layer of the trunk, uint8 or uint16 [tokens, layers, k]; None where they are not asked
            for, while it runs, and if it never ran. Fewer tokens where it ended while its prompt was read.
    """

    index: int
    text: str
    token_ids: list[int]
    num_tokens: int
    finish_reason: str | None
    logprobs: list[TokenLogprobs] | None
    token_texts: list[str]
    drafted: list[bool]
    speculation: Speculation
    decode_seconds: float | None = field(compare=False)
    stop_reason: str | int | None = None
    routed_experts: np.ndarray | None = field(default=None, compare=False)

    def __add__(self, later: "CompletionOutput") -> "CompletionOutput":
        """Two deltas as one."""
        return replace(
            later,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=None if later.logprobs is None else (self.logprobs or []) + later.logprobs,
            token_texts=self.token_texts + later.token_texts,
            drafted=self.drafted + later.drafted,
            speculation=self.speculation + later.speculation,
        )


@dataclass(frozen=True)
class Timing:
    """Seconds from submission: to a slot, to the first token and to the end; None while it has not come."""

    admitted: float | None
    first_token: float | None
    finished: float | None


@hinting(RequestError)
@dataclass(frozen=True)
class RequestOutput:
    """All completions of one prompt, and the effect of speculation on them together.

    With ``output_kind = "delta"`` an output is the part that is new since the output before; the first has
    the prompt's log-probabilities.

    Attributes:
        prompt: the prompt as a string, None if token ids were given.
        prompt_token_ids: the prompt as tokens.
        outputs: completions, in order.
        prompt_logprobs: per prompt token, if asked for; the first is None.
        timing: time of the first completion to its first token, and to the end of the last completion.
        cached_tokens: number of tokens of the prompt whose cache was there already.
        weight_version: name of the weights that made every token (``LLM.update_weights``); None while it
            waits.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None
    timing: Timing
    cached_tokens: int
    weight_version: str | None

    @property
    def speculation(self) -> Speculation:
        """Drafts verified and accepted over all completions."""
        return sum((o.speculation for o in self.outputs), Speculation())

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(o.finish_reason is not None for o in self.outputs)

    def __add__(self, later: "RequestOutput") -> "RequestOutput":
        """Two deltas as one."""
        outputs = [a + b for a, b in zip(self.outputs, later.outputs, strict=True)]
        return replace(later, outputs=outputs, prompt_logprobs=self.prompt_logprobs or later.prompt_logprobs)


@dataclass(frozen=True)
class Draft:
    """Tokens that the NextN layers propose after a prompt.

    Attributes:
        next_token: the trunk's own greedy next token, which the drafts follow.
        token_ids: the greedy drafts.
        logits: [n, V] float32, from which each draft is the argmax.
    """

    next_token: int
    token_ids: list[int]
    logits: np.ndarray
