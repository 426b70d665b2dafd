"""Tools: a call that must be made, held to its schema while drafts go on, then parsed.

A server does this for OpenAI's ``tools`` and ``tool_choice`` (docs/serving.md).
"""

import json

from mtp_jax import LLM, CallArguments, SamplingParams, Tool, ToolUse

WEATHER = Tool(
    "weather",
    {
        "properties": {
            "city": {"enum": ["Paris", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    description="Forecasts the weather.",
)


def main(llm: LLM) -> dict[str, object]:
    """The arguments of the call."""
    assert llm.tokenizer, "a call is text"
    use = ToolUse.of("deepseek_v3", [WEATHER], "named", name="weather")
    assert use, "a named tool is there"
    params = SamplingParams(
        temperature=0,
        max_tokens=128,
        structured=use.structured(llm.tokenizer, None),
        skip_special_tokens=False,  # the tags of a call may be special tokens
    )
    (output,) = llm.chat([{"role": "user", "content": "Do I need an umbrella in Rome this week?"}], params)
    print(output.outputs[0].text)
    parser = use.parser()
    parts = parser.push(output.outputs[0].text) + parser.flush()
    arguments = json.loads("".join(part.text for part in parts if isinstance(part, CallArguments)))
    print(f"weather(**{arguments})")
    print(f"acceptance length {output.speculation.acceptance_length:.2f}")
    return arguments


if __name__ == "__main__":
    main(LLM(num_speculative_tokens=3))
