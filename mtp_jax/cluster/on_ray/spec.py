"""The engine and server of a cluster's processes, as data that travels to them. No jax here."""

from dataclasses import dataclass
from pathlib import Path

from mtp_jax import JsonMapping
from serve.base.settings import Settings


@dataclass(frozen=True)
class EngineSpec:
    """An engine and its server.

    Attributes:
        model: the model's folder, the same on every host.
        options: options of ``LLM``, with ``mesh`` as its shape, (data, model).
        settings: settings of the server.
        max_queued_requests, max_queued_tokens: number of requests and tokens that may wait.
        hosts: number of processes of one engine.
    """

    model: Path
    options: JsonMapping
    settings: Settings
    max_queued_requests: int
    max_queued_tokens: int
    hosts: int = 1

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        data, model = self.options.get("mesh", (1, 1))
        return data * model
