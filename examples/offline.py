"""Offline: many prompts in one call, batched by the engine."""

from mtp_jax import LLM, RequestOutput, SamplingParams

PROMPTS = ["def mean(values):", "class Stack:", "import os\n\ndef find_files(", "def is_prime(n):"]


def main(llm: LLM, max_tokens: int = 64) -> list[RequestOutput]:
    """The completions, in the order of ``PROMPTS``."""
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=max_tokens)
    outputs = llm.generate(PROMPTS, params)
    for output in outputs:
        print(f"{output.prompt}{output.outputs[0].text}\n")
    steps = sum(output.speculation.steps for output in outputs)
    accepted = sum(output.speculation.accepted for output in outputs)
    print(f"acceptance length {1 + accepted / steps:.2f}")
    return outputs


if __name__ == "__main__":
    main(LLM(num_speculative_tokens=3))  # LLM("DIR", ...) loads another model
