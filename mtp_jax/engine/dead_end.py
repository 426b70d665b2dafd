"""Options of a request that together leave no token with which its output could go on."""

from collections.abc import Collection
from typing import Literal

import numpy as np

from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.text.grammar import WORD, Grammars, MaskWindow
from mtp_jax.text.rules import Constraints

NO_TOKEN = "no_token"
"""The finish reason of an output at a dead end."""


def look_ahead(
    grammars: Grammars | None,
    constraints: Constraints | None,
    params: SamplingParams,
    stops: Collection[int],
    vocab_size: int,
    emitted: int = 0,
) -> Literal["goes on", "complete", "no token"]:
    """Whether an output can go on: all tokens that a step masks are left out here, too.

    "complete": only the end that its grammar allows is left out by other options. emitted: tokens of the
    output so far.
    """
    bits = np.full((1, -(-vocab_size // WORD)), 2**WORD - 1, np.uint32)
    matcher, complete = constraints.matcher if constraints else None, False
    if matcher and grammars:
        bits = grammars.masks([MaskWindow(0, matcher, [])], 1, 1)[0]
        complete = bool((bits[0] & matcher.stops).any())
    for rule in constraints.rules if constraints else ():
        rule.narrow(bits, [])
    allowed = np.unpackbits(bits[0].view(np.uint8), bitorder="little")[:vocab_size].astype(bool)
    if params.allowed_token_ids is not None:
        only = np.zeros(vocab_size, bool)
        only[list(params.allowed_token_ids)] = True
        allowed &= only
    if emitted < params.min_tokens:
        allowed[list(stops)] = False
    return "goes on" if allowed.any() else "complete" if complete else "no token"


def options_that_mask(params: SamplingParams) -> list[str]:
    """Names of the options of a request that leave tokens out."""
    masking = {
        "structured output": params.structured,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words,
        "max_thinking_tokens": params.max_thinking_tokens is not None,
        "min_tokens": params.min_tokens,
    }
    return [name for name, value in masking.items() if value]
