"""Code that `serve --ray` and `batch --ray` share."""

import argparse
from pathlib import Path

from mtp_jax.cluster.on_ray.options import RayOptions
from mtp_jax.cluster.on_ray.start import require_ray
from mtp_jax.commands.options import chosen, engine_options, flag_of, given
from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.options import declared


def ray_options(args: argparse.Namespace) -> RayOptions | None:
    """The options of engines on Ray; None without --ray. Raises ConfigError, also without Ray."""
    found = given(args, RayOptions)
    if found.get("ray"):
        require_ray()
        return chosen(args, RayOptions)
    if found:
        names = ", ".join(flag_of(name, declared(RayOptions)[name]) for name in found)
        raise ConfigError(f"{names} without effect on this process alone; add --ray, or leave it out")
    return None


def portable_options(args: argparse.Namespace, completions: int) -> JsonObject:
    """``engine_options`` for other processes, which may run in another folder. Raises ConfigError.

    Replicas are told their slots, by which they are loaded.
    """
    found = engine_options(args, completions)
    data, _ = found.get("mesh", (1, 1))
    found.setdefault("max_num_seqs", -(-completions // data) * data)
    return {name: v.absolute() if isinstance(v, Path) else v for name, v in found.items()}
