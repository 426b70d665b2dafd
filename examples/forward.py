"""The model as pure functions: logits of the trunk, and of the NextN layer that drafts.

Row i of the trunk's logits predicts token i + 1, row i of the NextN layer's token i + 2, one further.
"""

import jax
import jax.numpy as jnp

from mtp_jax import Tokenizer, demo_model
from mtp_jax.checkpoint import load
from mtp_jax.model import nextn, trunk

TEXT = "def read_config(path):\n    return"


def main() -> tuple[jax.Array, jax.Array]:
    """Both logits of ``TEXT``, float32 [1, T, V] and [1, T - 1, V]."""
    m = load(demo_model())
    tokenizer = Tokenizer.from_dir(demo_model())
    assert tokenizer, "the embedded model has one"
    ids = jnp.array([tokenizer.encode(TEXT)])

    @jax.jit
    def both(params, tokens):
        hidden = trunk.forward(params, m.config, tokens)
        z = nextn.teacher_forced(params, m.config, 0, tokens[:, 1:], hidden[:, :-1])
        return trunk.logits(params, hidden), nextn.logits(params, 0, z)

    logits, drafts = both(m.params, ids)
    agree = logits[:, 1:].argmax(-1) == drafts.argmax(-1)
    print(f"the trunk goes on with {tokenizer.decode([int(logits[0, -1].argmax())])!r}")
    print(f"the draft agrees with the trunk at {int(agree.sum())} of {agree.size} places")
    return logits, drafts


if __name__ == "__main__":
    main()
