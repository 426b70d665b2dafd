"""Whether a kernel computes what its reference does, on the device at hand."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.checking.case import Case


@dataclass(frozen=True)
class Verdict:
    """The worst output's relative distance from the reference, and elements that are not finite."""

    distance: float
    not_finite: int

    def faults(self, tolerance: float) -> list[str]:
        """What is wrong."""
        found = []
        if self.not_finite:
            found.append(f"{self.not_finite} elements are NaN or infinite where the reference's are not")
        elif not self.distance <= tolerance:
            found.append(f"relative distance {self.distance:.2e} from the reference, at most {tolerance:.0e}")
        return found


def verify(case: Case, key: jax.Array) -> Verdict:
    """Run kernel and reference on random inputs."""
    inputs = jax.jit(case.inputs)(key)
    reference = jax.jit(case.reference)(*inputs)
    # An output takes memory that holds NaN: elements that the kernel does not write stay so.
    for poison in [
        jnp.full(x.shape, jnp.nan, jnp.float32) for x in jax.tree.leaves(reference) for _ in range(2)
    ]:
        poison.block_until_ready().delete()
    out = jax.jit(case.kernel)(*inputs)
    pairs = zip(jax.tree.leaves(out), jax.tree.leaves(reference), strict=True)
    compared = [_compare(a, b) for a, b in pairs]
    # numpy's max: NaN is the worst, whichever output has it.
    return Verdict(float(np.max([d for d, _ in compared])), sum(int(n) for _, n in compared))


def distance(got: Any, expected: Any) -> float:
    """norm(got - expected) / norm(expected); NaN if float32 cannot hold the latter."""
    return float(_compare(jnp.asarray(got), jnp.asarray(expected))[0])


@jax.jit
def _compare(got: Any, expected: Any) -> tuple[jax.Array, jax.Array]:
    got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
    bad = ~jnp.isfinite(got) & jnp.isfinite(expected)
    difference = jnp.linalg.norm((got - expected).reshape(-1))
    size = jnp.linalg.norm(expected.reshape(-1))
    return jnp.where(jnp.isfinite(size), difference / size, jnp.nan), bad.sum()
