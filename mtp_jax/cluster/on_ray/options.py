"""Options of an operator for engines on Ray."""

from dataclasses import dataclass
from typing import Literal, get_args

from mtp_jax import ConfigError
from mtp_jax.options import check, documented, option

RoutingChoice = Literal["prefix", "even"]


@documented
@dataclass(frozen=True)
class RayOptions:
    """Options of engines on a Ray cluster. Raises ConfigError."""

    ray: bool = option(False, "run the engines on Ray, which the extra `ray` installs")
    ray_address: str | None = option(
        None,
        "the cluster",
        kind=str,
        unset="RAY_ADDRESS of the environment, or else one that is started here and ends with the command",
        metavar="HOST:PORT",
    )
    min_replicas: int = option(1, "engines at the start, and the least", low=1, high=4096, metavar="N")
    max_replicas: int | None = option(
        None, "the most engines", kind=int, low=1, high=4096, unset="min_replicas", metavar="N"
    )
    target_requests: float | None = option(
        None,
        "requests per engine that their number is chosen for",
        kind=float,
        low=0,
        above=True,
        high=1e6,
        unset="its slots",
        metavar="N",
    )
    cpus: float = option(
        1.0, "CPUs that each host of an engine reserves of the cluster", low=0, high=4096, metavar="N"
    )
    gpus: int | None = option(
        None,
        "GPUs that each host of an engine reserves",
        kind=int,
        low=0,
        high=1024,
        unset="the mesh's devices over the engine's hosts, rounded up; 0 where the cluster has no GPU",
        metavar="N",
    )
    routing: RoutingChoice = option(
        "prefix",
        "which engine gets a request: the one that knows most of its prompt (prefix), or the least "
        "busy (even)",
        choices=get_args(RoutingChoice),
    )
    routing_slack: int = option(
        8,
        "by how many requests the engine that knows the prompt may be busier than the least busy one",
        low=0,
        high=2**20,
        metavar="N",
    )

    def __post_init__(self) -> None:
        check(self, ConfigError)
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas = {self.max_replicas}; expected min_replicas = {self.min_replicas} or more"
            )
        if self.target_requests is not None and not self.scales:
            raise ConfigError(
                "target_requests has no effect on a fixed number of engines; add --max-replicas, or leave "
                "it out"
            )

    @property
    def most(self) -> int:
        """Most engines."""
        return self.max_replicas or self.min_replicas

    @property
    def scales(self) -> bool:
        """Whether the number of engines follows the load."""
        return self.most > self.min_replicas
