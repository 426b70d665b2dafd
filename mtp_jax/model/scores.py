"""Whole sequences through a model, without a cache: hidden states and logits of every position."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtp_jax.model import nextn, trunk
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import data_size
from mtp_jax.model.trunk import Model


class Positions(NamedTuple):
    """Values of every position of n sequences.

    Attributes:
        hidden: [n, T, D] after the final norm, then the residual streams of the taps.
        mtp_hidden: [n, T, D] of each NextN layer, if there are logits.
        logits: float32 [n, T, V], the trunk's and then each NextN layer's, if they were asked for.
    """

    hidden: tuple[Float[Array, "n T _D"], ...]
    mtp_hidden: tuple[Float[Array, "n T D"], ...]
    logits: tuple[Float[Array, "n T V"], ...]


def positions(
    params: Params, tokens: Int[Array, "n T"], model: Model, taps: tuple[int, ...], with_logits: bool
) -> Positions:
    """Pass sequences through the trunk, and for logits through the NextN layers. taps: see ``trunk.run``."""
    (count, _), (cfg, on) = tokens.shape, (model.cfg, model.on)
    # A sharded batch must divide over the data axis; with copies of its last row it does.
    rows = -(-count // data_size(on.mesh)) * data_size(on.mesh)
    padded = tokens[jnp.minimum(jnp.arange(rows), count - 1)]
    found = trunk.forward_traced(params, cfg, padded, on, taps)
    z, ahead, logits = found.hidden, [], []
    if with_logits:
        logits.append(trunk.logits(params, z, on))
        for k in range(cfg.num_nextn_predict_layers):
            z = nextn.teacher_forced(params, cfg, k, jnp.roll(padded, -1 - k, axis=1), z, on)
            ahead.append(z)
            logits.append(nextn.logits(params, k, z, on))
    states = found.hidden, *(found.taps[tap] for tap in taps)
    return jax.tree.map(lambda a: a[:count], Positions(states, tuple(ahead), tuple(logits)))
