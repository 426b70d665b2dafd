"""The Ray cluster: a running cluster, or a cluster that this process starts and protects by a token.

A client that reaches a port of a cluster without a token runs code on it, and a cluster listens on the host's
own address. A running cluster is used with its own settings and the environment's.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from mtp_jax import ConfigError, JsonObject
from mtp_jax.cluster.on_ray.options import RayOptions

_ADDRESS, _MODE, _TOKEN, _TOKEN_PATH = "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_TOKEN_FILE = "~/.ray/auth_token"  # where Ray looks last


def require_ray() -> None:
    """Raise ConfigError where Ray is not installed."""
    if any(find_spec(name) is None for name in ("ray", "aiohttp", "pyarrow")):
        raise ConfigError("--ray needs Ray with its parts serve and data; run: pip install 'ray[serve,data]'")


def protect() -> None:
    """Make clusters that this process starts require a token, and send no statistics of usage.

    Sets variables of the environment that the user has not set. Call it before Ray is imported.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(_MODE, "token")
    known = (
        os.environ.get(_TOKEN)
        or os.environ.get(_TOKEN_PATH)
        or os.path.exists(os.path.expanduser(_TOKEN_FILE))
    )
    if os.environ[_MODE] == "token" and not known:
        os.environ[_TOKEN] = secrets.token_hex(32)


@contextmanager
def cluster(address: str | None) -> Iterator[bool]:
    """Join a cluster, or start a cluster that ends with the context. Yields whether it was started.

    address: the cluster's; None: RAY_ADDRESS, or a new one. Raises ConfigError.
    """
    require_ray()
    address = address or os.environ.get(_ADDRESS)
    more: JsonObject = {}
    if address is None:
        protect()
        more = {"include_dashboard": False}  # it would run code for any holder of the token
    import ray  # pyright: ignore[reportMissingImports]

    try:
        ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **more)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"cannot use the Ray cluster {address or 'of this command'}: {reason}") from error
    try:
        yield address is None
    finally:
        ray.shutdown()


def reservation(options: RayOptions, devices: int, hosts: int = 1, own: bool = False) -> dict[str, float]:
    """The resources that each host of an engine reserves, by Ray's names. Call it within ``cluster``.

    devices: number of devices of the engine's mesh. hosts: number of hosts of one engine. own: whether the
    cluster is this computer alone. Raises ConfigError if it then has too few CPUs or GPUs.
    """
    import ray  # pyright: ignore[reportMissingImports]

    has = ray.cluster_resources()
    gpus = options.gpus
    if gpus is None:
        gpus = -(-devices // hosts) if has.get("GPU") else 0
    each = {"CPU": options.cpus, "GPU": gpus}
    for name, flag in (("CPU", "--cpus"), ("GPU", "--gpus")):
        need = options.min_replicas * hosts * each[name]
        if own and need > has.get(name, 0):
            raise ConfigError(
                f"{options.min_replicas} engines of {hosts} hosts need {need:g} {name}s; this computer has "
                f"{has.get(name, 0):g}; lower {flag} or --min-replicas, or join a cluster (--ray-address)"
            )
    return {"num_cpus": options.cpus, "num_gpus": gpus}
