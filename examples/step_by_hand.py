"""Draft, verify, accept: greedy decoding with the NextN layer in one jitted function, without a cache.

The engine's step does the same over a paged cache, for many requests, with sampling (docs/architecture.md).
Here every pass computes the whole sequence, which is slow, and fits on a page.
"""

from functools import partial

import jax
import jax.numpy as jnp

from mtp_jax import Tokenizer, demo_model
from mtp_jax.checkpoint import load
from mtp_jax.model import ModelConfig, Params, nextn, trunk

PROMPT = "class Parser:\n    def __init__(self"
DEPTH = 3


@partial(jax.jit, static_argnums=1)
def step(params: Params, cfg: ModelConfig, tokens: jax.Array, hidden: jax.Array, length: jax.Array):
    """Emit 1 to ``DEPTH`` + 1 tokens. Entries at ``length`` and behind it are garbage that nothing sees.

    tokens: int32 [T]; the newest is at ``length`` - 1. hidden: the trunk's, [T, D], for the tokens before it.
    Returns (tokens, hidden, drafts accepted).
    """
    # Draft. Row i of the NextN layer merges hidden[i] with token i + 1. Where there is no hidden state of the
    # trunk's yet, the layer's own output of the row before stands for it.
    drafted, merged = tokens, hidden
    for k in range(DEPTH):
        z = nextn.teacher_forced(params, cfg, 0, drafted[None, 1:], merged[None, :-1])[0]
        row = length - 2 + k
        best = nextn.logits(params, 0, z[row]).argmax().astype(tokens.dtype)
        drafted = drafted.at[row + 2].set(best)
        merged = merged.at[row + 1].set(z[row])
    # Verify: one pass of the trunk over the newest token and the drafts gives its own choice behind each.
    hidden = trunk.forward(params, cfg, drafted[None])[0]
    window = jax.lax.dynamic_slice_in_dim(hidden, length - 1, DEPTH + 1)
    chosen = trunk.logits(params, window).argmax(-1).astype(tokens.dtype)
    # Accept the drafts up to the first that the trunk would not have chosen. Its choice there is one more.
    drafts = jax.lax.dynamic_slice_in_dim(drafted, length, DEPTH)
    accepted = jnp.cumprod(chosen[:-1] == drafts).sum()
    return jax.lax.dynamic_update_slice_in_dim(tokens, chosen, length, 0), hidden, accepted


def main(max_tokens: int = 24) -> tuple[list[int], float]:
    """Tokens of prompt and completion, and the acceptance length."""
    m = load(demo_model())
    tokenizer = Tokenizer.from_dir(demo_model())
    assert tokenizer, "the embedded model has one"
    ids = tokenizer.encode(PROMPT)
    tokens = jnp.zeros(len(ids) + max_tokens + DEPTH + 1, jnp.int32).at[: len(ids)].set(jnp.array(ids))
    hidden = trunk.forward(m.params, m.config, tokens[None])[0]
    length, steps = len(ids), 0
    while length < len(ids) + max_tokens:
        tokens, hidden, accepted = step(m.params, m.config, tokens, hidden, jnp.int32(length))
        length, steps = length + int(accepted) + 1, steps + 1
    acceptance_length = (length - len(ids)) / steps
    print(tokenizer.decode(tokens[:length].tolist()))
    print(f"{steps} steps, acceptance length {acceptance_length:.2f}")
    return tokens[:length].tolist(), acceptance_length


if __name__ == "__main__":
    main()
