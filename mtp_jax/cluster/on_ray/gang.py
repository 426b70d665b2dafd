"""One engine over several hosts of a cluster: a placement group with a bundle and a process per host.

The process of rank 0 is the replica of Ray Serve, in the group's first bundle; it makes an actor for each
other rank, in a bundle of its own, and watches them. The end of one of them ends all (docs/scaling.md,
"When something fails"), and Serve makes a new replica with a new gang.
"""

import os
import secrets
import socket
from collections.abc import Mapping
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.util import get_current_placement_group, get_node_ip_address  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    PlacementGroupSchedulingStrategy,
)

from mtp_jax import EngineStopped, Hosts, follow, join
from mtp_jax.cluster.on_ray.engine import llm_options
from mtp_jax.cluster.on_ray.spec import EngineSpec

_SECRET = "MTP_JAX_SECRET"


class Follower:
    """A rank after the first."""

    def follow(self, spec: EngineSpec, hosts: Hosts, secret: str) -> None:
        """Repeat the launches of rank 0, until it ends."""
        os.environ[_SECRET] = secret
        with join(hosts) as group:
            follow(spec.model, group=group, **llm_options(spec.options))


class Gang:
    """The engine's processes, of which this one is rank 0.

    Attributes:
        group: the group of processes, an argument of ``LLM``.
    """

    def __init__(self, spec: EngineSpec, reserves: Mapping[str, float]) -> None:
        """Start the other ranks and meet them. Raises ConfigError. reserves: a rank's resources, for Ray."""
        host = get_node_ip_address()
        port, log_port = _free_ports(host)
        secret = secrets.token_hex(32)
        os.environ[_SECRET] = secret

        def place(rank: int) -> Hosts:
            return Hosts(spec.hosts, rank, f"{host}:{port}", log_port)

        actor: Any = ray.remote(Follower)
        self._actors, self._work = [], []  # an actor lives while there is a handle of it
        for rank in range(1, spec.hosts):
            bundle = PlacementGroupSchedulingStrategy(get_current_placement_group(), rank)
            # A rank that was started again could not join a running group.
            made = actor.options(max_restarts=0, scheduling_strategy=bundle, **reserves).remote()
            self._actors.append(made)
            self._work.append(made.follow.remote(spec, place(rank), secret))
        self.group = join(place(0))

    def check(self) -> None:
        """Raise EngineStopped if a rank has ended."""
        ended, _ = ray.wait(self._work, timeout=0)
        if ended:
            raise EngineStopped(f"rank {self._work.index(ended[0]) + 1} of the engine has ended")


def _free_ports(host: str) -> tuple[int, int]:
    """Two ports that are free now; if one of them is taken before it is used, the gang is made anew."""
    with socket.socket() as first, socket.socket() as second:
        for free in (first, second):
            free.bind((host, 0))
        return first.getsockname()[1], second.getsockname()[1]
