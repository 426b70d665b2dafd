"""Comparison of a kernel's result with its reference's, on the device at hand."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kernels_pallas.check.case import Case


@dataclass(frozen=True)
class Distances:
    """The worst output's relative distance from the reference, and elements that are not finite.

    Attributes:
        distance: the largest norm(kernel - reference) / norm(reference) of all outputs.
        not_finite: number of NaN and infinite elements, in all outputs, where the reference is finite.
        worst: the element with the largest error, in words.
    """

    distance: float
    not_finite: int
    worst: str

    def faults(self, tolerance: float) -> list[str]:
        """Sentences about the faults found."""
        if self.not_finite:
            what = f"{self.not_finite} elements are NaN or infinite where the reference's are not"
        elif not self.distance <= tolerance:
            what = f"relative distance {self.distance:.2e} from the reference, at most {tolerance:.0e}"
        else:
            return []
        return [f"{what}; {self.worst}"]


def verify(case: Case, key: jax.Array) -> Distances:
    """Run kernel and reference on random inputs."""
    inputs = jax.jit(case.inputs)(key)
    # XLA on a GPU would else keep float32 where a program rounds to bfloat16 in between.
    exact = {"xla_allow_excess_precision": False}
    reference = jax.jit(case.reference, compiler_options=exact)(*inputs)
    # Outputs take memory that holds NaN, so that elements which the kernel does not write are NaN.
    for poison in [
        jnp.full(x.shape, jnp.nan, jnp.float32) for x in jax.tree.leaves(reference) for _ in range(2)
    ]:
        poison.block_until_ready().delete()
    out = jax.jit(case.kernel)(*inputs)
    pairs = list(zip(jax.tree.leaves(out), jax.tree.leaves(reference), strict=True))
    compared = [_compare(a, b) for a, b in pairs]
    distances, not_finite = ([float(x) for x in column] for column in list(zip(*compared, strict=True))[:2])
    # The worst element of all outputs: the first NaN if there is one, as numpy's argmax finds it.
    which = int(np.argmax([np.nan if n else d for d, n in zip(distances, not_finite, strict=True)]))
    got, expected = pairs[which]
    place = np.unravel_index(int(compared[which][2]), got.shape)
    worst = (
        f"worst in output {which + 1} of {len(pairs)}, {got.dtype.name}{list(got.shape)}, at "
        f"{[int(i) for i in place]}: {got[place].astype(jnp.float32)} instead of "
        f"{expected[place].astype(jnp.float32)}"
    )
    return Distances(float(np.max(distances)), int(sum(not_finite)), worst)


def distance(got: ArrayLike, expected: ArrayLike) -> float:
    """norm(got - expected) / norm(expected); NaN if float32 cannot hold the latter."""
    return float(_compare(jnp.asarray(got), jnp.asarray(expected))[0])


@jax.jit
def _compare(got: jax.Array, expected: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Distance, elements that are not finite, and the flat index of the element with the largest error."""
    got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
    bad = ~jnp.isfinite(got) & jnp.isfinite(expected)
    off = jnp.where(bad, jnp.inf, jnp.nan_to_num(jnp.abs(got - expected)))
    difference = jnp.linalg.norm((got - expected).reshape(-1))
    size = jnp.linalg.norm(expected.reshape(-1))
    return jnp.where(jnp.isfinite(size), difference / size, jnp.nan), bad.sum(), jnp.argmax(off)
