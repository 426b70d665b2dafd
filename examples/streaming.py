"""Streaming: text as it is generated, drafted tokens between brackets."""

from mtp_jax import LLM, SamplingParams


def main(llm: LLM, max_tokens: int = 64) -> tuple[str, int]:
    """The text, and how many of its tokens were drafted."""
    text, drafted = "", 0
    # Deltas: each output has the text that is new since the one before, the tokens of a step together.
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=max_tokens, output_kind="delta")
    for output in llm.stream("class Parser:", params):
        (new,) = output.outputs
        for piece, of_draft in zip(new.token_texts, new.drafted, strict=True):
            print(f"[{piece}]" if of_draft else piece, end="", flush=True)
        text, drafted = text + new.text, drafted + sum(new.drafted)
    print(f"\n{drafted} tokens were drafted")
    return text, drafted


if __name__ == "__main__":
    main(LLM(num_speculative_tokens=3))
