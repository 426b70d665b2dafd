"""A measurement of an engine's drafts: the acceptance length of a few greedy completions."""

from collections.abc import Sequence

from mtp_jax.api.completions import PromptState
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.speculation import Speculation

# Prose, code and a list, for a caller without prompts of its own: any text will do to compare with.
PROMPTS = ("Once upon a time", "import os\n\n\ndef main(", "The capital of France is", "1, 2, 3, 4,")
# The same for a model without a tokenizer.
IDS = tuple((first, first + 1, first + 2) for first in range(0, 12, 3))
# Tokens of each completion. Four of them have 124 steps where no draft is accepted, so that an acceptance of
# 0 lies below the server's floor of 0.2 with its confidence of 99.9 %.
TOKENS = 32


def params_of(depth: int) -> SamplingParams:
    """Greedy completions with ``depth`` drafts in every step, with an adaptive depth, too."""
    return SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, num_speculative_tokens=depth)


def acceptance(states: Sequence[PromptState]) -> Speculation:
    """The counts of prompts that were completed; none if a completion failed."""
    outputs = [state.output() for state in states]
    if any(c.finish_reason == "error" for output in outputs for c in output.outputs):
        return Speculation()
    return sum((output.speculation for output in outputs), Speculation())
