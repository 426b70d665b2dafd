"""Results of a step in the same memory every time: a donated box, out of which a tiny program copies them.

A graph of launches on a GPU holds the addresses of all arrays. A result that lies in another place than
before has the graph renewed before its launch, and two results alternate, as the host reads one while the
next is made. So the step writes its packed result into a box that it is given, and the host reads a copy,
which takes two launches without a graph. ZML, on XLA too, counted 9,712 renewals without such boxes and none
with them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from mtp_jax.decode.keys import EXTRA_COLUMNS, StepKey
from mtp_jax.decode.result import StepResult
from mtp_jax.decode.state import State

Stepped = tuple[State, StepResult]


def box_of(key: StepKey, shards: int) -> jax.ShapeDtypeStruct:
    """The shape of a step's packed result. shards: number of data shards."""
    rows, width = key.slots + key.prompts * shards, key.room + 1 if key.slots else 1
    return jax.ShapeDtypeStruct((rows, width + EXTRA_COLUMNS), jnp.int32)


def into_box(step: Callable[..., Stepped]) -> Callable[..., Stepped]:
    """A step that takes a box behind the state, and whose packed result is that box."""

    def run(params: Any, state: State, box: jax.Array, *given: Any) -> Stepped:
        state, result = step(params, state, *given)
        return state, result.replace(packed=jax.lax.dynamic_update_slice(box, result.packed, (0, 0)))

    return run


class Boxed:
    """A compiled step of ``into_box``, called as any other."""

    def __init__(
        self, step: jax.stages.Compiled, box: jax.ShapeDtypeStruct, where: NamedSharding | None
    ) -> None:
        """where: the sharding of results; None: of one device."""
        self.step = step
        self._box: jax.Array | None = None
        self._empty = jax.ShapeDtypeStruct(box.shape, box.dtype, sharding=where)
        self._copy = jax.jit(jnp.copy, out_shardings=where).lower(self._empty).compile()

    def __call__(self, params: Any, state: State, *given: Any) -> Stepped:
        """Run the step."""
        if self._box is None:
            self._box = jnp.zeros(self._empty.shape, self._empty.dtype, device=self._empty.sharding)
        state, result = self.step(params, state, self._box, *given)
        self._box = result.packed
        return state, result.replace(packed=self._copy(self._box))
