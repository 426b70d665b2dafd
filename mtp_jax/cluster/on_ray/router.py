"""``Prefixes`` as a request router of Ray Serve, through its public interface (`ray.serve.request_router`).

Serve's own routers by prefix need vLLM or SGLang installed. Each process with a handle of the deployment has
a router of its own, which knows the requests that its process has sent.
"""

from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from mtp_jax.cluster.on_ray.prefixes import Prefixes
from serve.http.in_process import SentRequest


class PrefixRouter(RequestRouter):
    """Sends each ``SentRequest`` to the replica that ``Prefixes`` ranks first, or to the next with room."""

    def initialize_state(self, slack: int, by_prefix: bool) -> None:
        """Arguments of `request_router_kwargs`: those of ``Prefixes``, and whether prompts matter at all."""
        self._prefixes, self._by_prefix = Prefixes[ReplicaID](slack), by_prefix

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas as ranks of one replica each, the best first."""
        if pending_request is None:
            return [[replica] for replica in candidate_replicas]
        name, by_id = _name(pending_request), {r.replica_id: r for r in candidate_replicas}
        # There is no other sign of a request that is cancelled before it is sent.
        pending_request.future.add_done_callback(
            lambda future: self._prefixes.ended(name) if future.cancelled() else None
        )
        return [[by_id[i]] for i in self._prefixes.rank(name, self._of(pending_request), by_id)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Record that a replica has accepted a request."""
        self._prefixes.sent(_name(pending_request), self._of(pending_request), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Record that a request has ended, by success or failure."""
        self._prefixes.ended(internal_request_id)

    def _of(self, request: PendingRequest) -> tuple[bytes, ...]:
        call = request.args[0] if request.args else None
        return call.prefixes if self._by_prefix and isinstance(call, SentRequest) else ()


def _name(request: PendingRequest) -> str:
    return request.metadata.internal_request_id
