"""A measurement of an engine's drafts: the acceptance length of a few greedy completions."""

from collections.abc import Sequence

from mtp_jax.api.completions import PromptState
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.speculation import Speculation

# Prose, code and a list, for a caller without prompts of its own: any text will do to compare with.
PROMPTS = ("Once upon a time", "import os\n\n\ndef main(", "The capital of France is", "1, 2, 3, 4,")
PARAMS = SamplingParams(temperature=0, max_tokens=32)


def acceptance(states: Sequence[PromptState]) -> float:
    """The acceptance length of prompts that were completed with ``PARAMS``; 0.0 if one failed."""
    outputs = [state.output() for state in states]
    if any(c.finish_reason == "error" for output in outputs for c in output.outputs):
        return 0.0
    return sum((output.speculation for output in outputs), Speculation()).acceptance_length
