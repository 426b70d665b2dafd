"""Log-probabilities: of a prompt, of a completion and its alternatives, and of a text by teacher forcing."""

import math

import jax

from mtp_jax import LLM, SamplingParams

PROMPT = "def read_config(path):"


def main(llm: LLM, max_tokens: int = 8) -> tuple[list[float], list[float]]:
    """Log-probabilities of the completion's tokens, as the engine gives them and as ``LLM.score`` does."""
    assert llm.tokenizer
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=2, prompt_logprobs=0)
    (output,) = llm.generate(PROMPT, params)
    (completion,) = output.outputs
    assert completion.logprobs, "they were asked for"
    assert output.prompt_logprobs, "so were these"
    given = [p for row in output.prompt_logprobs if row for p in row.values()]
    print(f"perplexity of the prompt {math.exp(-sum(p.logprob for p in given) / len(given)):.1f}")
    for row in completion.logprobs:  # the token that was chosen, then the likeliest
        print("   ".join(f"{llm.tokenizer.decode([t])!r} {p.logprob:.3f}" for t, p in row.items()))
    engine = [next(iter(row.values())).logprob for row in completion.logprobs]

    # Row i of the scores' logits predicts token i + 1.
    start, ids = len(output.prompt_token_ids), output.prompt_token_ids + completion.token_ids
    scores = jax.nn.log_softmax(llm.score(ids).logits[start - 1 : -1])
    return engine, [float(row[t]) for row, t in zip(scores, completion.token_ids, strict=True)]


if __name__ == "__main__":
    main(LLM(num_speculative_tokens=3))
