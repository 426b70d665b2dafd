"""A mesh: the same functions over several devices, parameters split between them."""

import jax
import jax.numpy as jnp

from mtp_jax import Tokenizer, demo_model, make_mesh
from mtp_jax.checkpoint import load
from mtp_jax.model import Backend, trunk, xla

TEXT = "def read_config(path):\n    return"


def main() -> float:
    """The largest difference of a logit over two devices from that over one."""
    tokenizer = Tokenizer.from_dir(demo_model())
    assert tokenizer, "the embedded model has one"
    ids = jnp.array([tokenizer.encode(TEXT)])
    mesh = make_mesh(data=1, model=2)  # or jax.make_mesh((1, 2), ("data", "model"))

    def logits(on: Backend) -> jax.Array:
        m = load(demo_model(), mesh=on.mesh)  # each device reads its part alone
        print(f"embedding: {m.params.embed.sharding}")
        return jax.jit(lambda p: trunk.logits(p, trunk.forward(p, m.config, ids, on), on))(m.params)

    split, whole = logits(xla(mesh)), logits(xla())
    difference = float(jnp.abs(jax.device_get(split) - jax.device_get(whole)).max())
    print(f"logits over {mesh.shape} differ by {difference:.1e} at most")
    return difference


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)  # where there is a CPU alone: it acts as two devices
    main()
