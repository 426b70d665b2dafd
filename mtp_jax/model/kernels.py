"""Who computes an operation: XLA, or a kernel where there is one that can."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from mtp_jax.errors import ConfigError
from mtp_jax.model.device import is_hopper
from mtp_jax.model.sharding import ways

Implementation = Literal["xla", "mosaic_gpu"]


@dataclass(frozen=True)
class Kernels:
    """Who computes what. None chooses: the kernels on a Hopper GPU where they can, XLA otherwise.

    Attributes:
        linear: products with FP8 weights; others are always XLA's.
        experts: routed experts.
        attention: over the paged cache: ``mla_decode`` in the absorbed form, ``mla_prefill`` in the naive;
            where the queries' product takes e4m3, also ``mla_low_rank``, which writes the cache.
    """

    linear: Implementation | None = None
    experts: Implementation | None = None
    attention: Implementation | None = None


AUTO = Kernels()


def all_by(implementation: Implementation | Literal["auto"]) -> Kernels:
    """The same for everything. Raises ConfigError for kernels on a device that has none."""
    if implementation == "auto":
        return AUTO
    if implementation == "mosaic_gpu" and not is_hopper():
        found = jax.devices()[0].device_kind
        raise ConfigError(
            "kernels = 'mosaic_gpu' needs an NVIDIA GPU of the Hopper generation (H100, H200); found "
            f"{found}: --kernels auto or xla, in Python kernels='auto' or 'xla'"
        )
    return Kernels(implementation, implementation, implementation)


def may_run(wanted: Implementation | None) -> bool:
    """Whether kernels run where they can."""
    return wanted == "mosaic_gpu" or (wanted is None and is_hopper())


def runs(wanted: Implementation | None, check: Callable[..., None], *args: Any) -> bool:
    """Whether the kernel that ``check`` speaks for runs. Raises ConfigError if it is wanted and cannot."""
    if not may_run(wanted):
        return False
    try:
        check(*args)
    except ValueError as e:
        if wanted is not None:
            raise ConfigError(f"{e}: --kernels auto or xla, in Python kernels='auto' or 'xla'") from e
        return False
    return True


def can(check: Callable[..., None], *args: Any) -> bool:
    """Whether the kernel that ``check`` speaks for can do the work."""
    try:
        check(*args)
    except ValueError:
        return False
    return True


def part(x: Any, mesh: Mesh | None, *axes: str | None) -> jax.ShapeDtypeStruct:
    """Shape of one device's part of an array with these logical axes; the others are not split."""
    parts = [ways(axis, mesh) for axis in axes] + [1] * (len(x.shape) - len(axes))
    return jax.ShapeDtypeStruct(tuple(n // p for n, p in zip(x.shape, parts, strict=True)), x.dtype)
