"""Rollouts: sample, reward, learn, and give the engine the new weights (docs/rollouts.md).

One step of REINFORCE. Its reward, line ends, stands for one of yours.
"""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax import LLM, CompletionOutput, SamplingParams, demo_model
from mtp_jax.checkpoint import load, save_checkpoint
from mtp_jax.model import Params, trunk, xla

PROMPT = "def add(a, b):"
ON = xla(experts="dense")  # has derivatives


def reward(completion: CompletionOutput) -> float:
    """Line ends per token."""
    return completion.text.count("\n") / max(1, completion.num_tokens)


def main(llm: LLM, max_tokens: int = 24, probe: tuple[str, ...] = (PROMPT,)) -> tuple[str | None, str | None]:
    """The versions of the weights that the rollouts before and after the update name.

    probe: prompts to compare the acceptance length of old and new weights on.
    """
    params = SamplingParams(n=4, temperature=1, seed=1, max_tokens=max_tokens, ignore_eos=True)
    (before,) = llm.generate([PROMPT], params)
    rewards = np.array([reward(c) for c in before.outputs])
    advantages = jnp.array(rewards - rewards.mean())
    start, rows = (
        len(before.prompt_token_ids),
        [before.prompt_token_ids + c.token_ids for c in before.outputs],
    )
    tokens = jnp.array(rows)

    policy = load(demo_model())  # the trainer's own copy, in float32

    def loss(p: Params) -> jax.Array:
        logits = trunk.logits(p, trunk.forward(p, policy.config, tokens, ON), ON)
        log_probs = jax.nn.log_softmax(logits[:, start - 1 : -1])
        chosen = jnp.take_along_axis(log_probs, tokens[:, start:, None], axis=-1)[..., 0]
        return -(advantages * chosen.sum(axis=1)).mean()

    gradient = jax.jit(jax.grad(loss))(policy.params)
    learned = jax.tree.map(lambda p, g: p - 0.01 * g, policy.params, gradient)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(folder, policy.config, learned)
        update = llm.update_weights(folder, weight_version="step-1", probe=probe)
    (after,) = llm.generate([PROMPT], params)
    print(
        f"mean reward {rewards.mean():.3f} by weights {before.weight_version!r}, "
        f"{np.mean([reward(c) for c in after.outputs]):.3f} by {after.weight_version!r}"
    )
    if update.acceptance_before and update.acceptance_after:
        print(f"acceptance length {update.acceptance_before:.2f}, then {update.acceptance_after:.2f}")
    return before.weight_version, after.weight_version


if __name__ == "__main__":
    main(LLM(num_speculative_tokens=3))
