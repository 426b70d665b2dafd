"""A gradient: of the next-token loss, with respect to every parameter."""

import jax
import jax.numpy as jnp

from mtp_jax import Tokenizer, demo_model
from mtp_jax.checkpoint import load
from mtp_jax.model import Params, trunk

TEXT = "def read_config(path):\n    with open(path) as f:\n        return f.read()\n"


def main(rate: float = 0.01) -> tuple[float, float]:
    """The loss of ``TEXT`` in nats per token, before and after a step of gradient descent."""
    m = load(demo_model())
    tokenizer = Tokenizer.from_dir(demo_model())
    assert tokenizer, "the embedded model has one"
    ids = jnp.array([tokenizer.encode(TEXT)])

    def loss(params: Params) -> jax.Array:
        logits = trunk.logits(params, trunk.forward(params, m.config, ids))
        log_probs = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1).mean()

    of = jax.jit(jax.value_and_grad(loss))
    before, gradient = of(m.params)
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)))
    step = jax.tree.map(lambda p, g: p - rate * g / norm, m.params, gradient)
    after, _ = of(step)
    print(f"norm of the gradient {norm:.2f}; loss {before:.4f} before a step, {after:.4f} after it")
    return float(before), float(after)


if __name__ == "__main__":
    main()
