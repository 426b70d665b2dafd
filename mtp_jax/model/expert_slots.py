"""Slots for experts: more than there are experts, so that what is chosen often lies on several devices.

Which slots hold an expert is an array beside the weights (``Moe.copies``), an input of the step. A new
placement is therefore other values of the same shapes, and nothing is compiled for it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int


def slots_of(copies: Int[Array, "E c"], ids: Int[Array, "T k"], rows: Int[Array, " T"]) -> Int[Array, "T k"]:
    """The slot in which each row finds each of its experts; -1 where ids name none.

    A row takes the copies of an expert in turn, by its number: all of them hold the same weights.
    """
    inside = (ids >= 0) & (ids < len(copies))
    expert = jnp.where(inside, ids, 0)
    count = (copies >= 0).sum(axis=1)[expert]
    return jnp.where(inside, copies[expert, rows[:, None] % count], -1)
