"""Forced calls of random tools on the embedded model, with drafts and without."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator

from mtp_jax import LLM, CallArguments, CallBegin, CallEnd, SamplingParams, ToolUse
from tests.text.tools.helpers import random_tool

TOOLS = 200


def arguments(use: ToolUse, text: str) -> object:
    """Of the one call that a text consists of."""
    parser = use.parser()
    parts: Sequence[object] = parser.push(text) + parser.flush()
    assert [type(part) for part in parts if not isinstance(part, CallArguments)] == [CallBegin, CallEnd]
    return json.loads("".join(part.text for part in parts if isinstance(part, CallArguments)))


@pytest.mark.slow
def test_forced_calls_of_random_tools_are_valid_and_those_without_drafts():
    rng, llm = random.Random(0), LLM(max_model_len=1000)
    assert llm.tokenizer is not None
    uses = [
        ToolUse.of(ToolUse.FORMATS[i % len(ToolUse.FORMATS)], [random_tool(rng, "f")], "named", name="f")
        for i in range(TOOLS)
    ]
    forced = [use for use in uses if use is not None]
    assert len(forced) == TOOLS
    params = [
        SamplingParams(temperature=0, max_tokens=900, structured=use.structured(llm.tokenizer, None))
        for use in forced
    ]
    undrafted = [replace(p, num_speculative_tokens=0) for p in params]
    prompts = ["# The call:\n"] * TOOLS
    deep, plain = (llm.generate(prompts, each) for each in (params, undrafted))
    for use, a, b in zip(forced, deep, plain, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].finish_reason == "stop"
        Draft202012Validator(use.tools[0].parameters).validate(arguments(use, a.outputs[0].text))
    steps = sum(o.speculation.steps for o in deep)
    accepted = sum(o.speculation.accepted for o in deep)
    print(
        f"{sum(o.outputs[0].num_tokens for o in deep)} tokens, acceptance length {1 + accepted / steps:.2f}"
    )
    assert accepted > steps
