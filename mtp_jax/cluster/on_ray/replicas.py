"""The server as an application of Ray Serve.

    client -> Serve's proxy -> Ingress -> PrefixRouter -> a replica: the application of serve/http/app.py

Before an answer's first bytes no byte has been sent to the client, so a request whose replica is lost goes to
another replica. An answer that has begun ends as an error.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from ray import serve as ray_serve  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]
from ray.serve.config import RequestRouterConfig  # pyright: ignore[reportMissingImports]
from ray.serve.handle import DeploymentHandle  # pyright: ignore[reportMissingImports]
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from mtp_jax import EngineStopped, JsonObject
from mtp_jax.cluster.on_ray.front import Front
from mtp_jax.cluster.on_ray.options import RayOptions
from mtp_jax.cluster.on_ray.spec import EngineSpec
from serve.base.errors import ApiError
from serve.base.settings import Settings
from serve.base.sse import event
from serve.http.in_process import AnswerHead, SentRequest, stream

_LOG = logging.getLogger(__name__)
_HEALTH_PERIOD_SECONDS = 2
_HEALTH_SECONDS = 30
_MOST_STARTS = 3  # starts of a replica before the application counts as failed
_AGAIN_SECONDS = 0.25
_MOST_SECONDS_LOST = 60.0
_LEAVING_SECONDS = 5
_EVENTS = b"text/event-stream"
_NAME_HEADER = b"x-request-id"


class Replica:
    """One engine behind the server's application."""

    async def __init__(self, spec: EngineSpec, reserves: Mapping[str, float]) -> None:
        """reserves: resources of each host of the engine."""
        from mtp_jax.cluster.on_ray.engine import Served  # imports jax, which the ingress does without

        self._gang = None
        if spec.hosts > 1:
            from mtp_jax.cluster.on_ray.gang import Gang

            self._gang = await asyncio.to_thread(Gang, spec, reserves)
        self._served = await Served.start(spec, self._gang and self._gang.group)

    async def check_health(self) -> None:
        """Raise EngineStopped once the engine, or one of its hosts, is lost. Ray Serve asks."""
        if self._served.allm.error is not None:
            raise EngineStopped(f"the engine has failed: {self._served.allm.error}")
        if self._gang is not None:
            self._gang.check()

    async def answer(self, call: SentRequest) -> AsyncGenerator[AnswerHead | bytes, None]:
        """Yield the head of the answer with its first bytes, then further bytes as they come.

        Raises EngineStopped where the engine was lost before the first.
        """
        head, begun = None, False
        async with aclosing(stream(self._served.app, call)) as parts:
            async for part in parts:
                if isinstance(part, AnswerHead):
                    head = part
                    continue
                if not begun and self._served.allm.error is not None:
                    raise EngineStopped("the engine was lost before the first token")
                if head is not None:
                    yield head
                    head = None
                begun = True
                yield part
        if head is not None:  # no body
            yield head


class Ingress:
    """Hands requests on to replicas."""

    def __init__(self, replicas: DeploymentHandle, settings: Settings) -> None:
        """replicas: handle of the deployment of ``Replica``."""
        self._replicas = replicas.options(stream=True, method_name="answer")
        self._front = Front(settings)

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        try:
            head, first, rest = await self._begin(await self._front.call(request))
        except ApiError as error:
            return self._front.refused(request, error)
        response = StreamingResponse(_joined(head, first, rest), head.status)
        # Serve's proxy has given the request its name, and says it itself.
        response.raw_headers = [(name, value) for name, value in head.headers if name != _NAME_HEADER]
        return response

    async def _begin(self, call: SentRequest) -> tuple[AnswerHead, bytes, Any]:
        """(head, first bytes, the rest) of the answer of the first replica that lives to begin one.

        Raises ApiError.
        """
        end = time.monotonic() + _MOST_SECONDS_LOST
        while True:
            reply = self._replicas.remote(call)
            try:
                head = await anext(reply)
                return head, await anext(reply, b""), reply
            except (RayActorError, EngineStopped) as error:
                reason = str(error).splitlines()[0]
                if time.monotonic() > end:
                    message = "the replicas were lost again and again before the first token"
                    raise ApiError(503, message, code="unavailable", headers={"Retry-After": "5"}) from error
                _LOG.warning("a replica was lost before it answered; another gets the request: %s", reason)
            await asyncio.sleep(_AGAIN_SECONDS)


async def _joined(head: AnswerHead, first: bytes, rest: Any) -> AsyncGenerator[bytes, None]:
    """The body. It ends with an exception if its replica is lost, so that no client takes it as complete."""
    yield first
    try:
        async for part in rest:
            yield part
    except (RayActorError, EngineStopped):
        if dict(head.headers).get(b"content-type", b"").startswith(_EVENTS):
            yield event(ApiError(503, "the engine was lost", code="unavailable").body)
        raise
    finally:
        rest.cancel()  # the client may have gone; no effect after the end


def application(spec: EngineSpec, options: RayOptions, reserves: Mapping[str, float]) -> object:
    """The application, to be run by `serve.run`, with the number of replicas from the options.

    reserves: resources of each host of an engine, from ``start.reservation``.
    """
    slots = spec.options["max_num_seqs"]
    size: JsonObject = {"num_replicas": options.min_replicas}
    if options.scales:
        scaling = {
            "min_replicas": options.min_replicas,
            "initial_replicas": options.min_replicas,
            "max_replicas": options.most,
            "target_ongoing_requests": options.target_requests or slots,
        }
        size = {"autoscaling_config": scaling}
    bundle = {"CPU": reserves["num_cpus"], "GPU": reserves["num_gpus"]}
    router = RequestRouterConfig(
        request_router_class="mtp_jax.cluster.on_ray.router:PrefixRouter",
        request_router_kwargs={"slack": options.routing_slack, "by_prefix": options.routing == "prefix"},
    )
    replicas = ray_serve.deployment(
        Replica,
        name="engine",
        ray_actor_options=dict(reserves),
        placement_group_bundles=[{k: v for k, v in bundle.items() if v}] * spec.hosts,
        # Further requests wait before the router, for the replica that has room first.
        max_ongoing_requests=slots + spec.max_queued_requests,
        max_constructor_retry_count=_MOST_STARTS,
        health_check_period_s=_HEALTH_PERIOD_SECONDS,
        health_check_timeout_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=spec.settings.drain_seconds + _LEAVING_SECONDS,
        request_router_config=router,
        **size,
    )
    ingress = ray_serve.deployment(
        Ingress,
        name="ingress",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=spec.settings.max_connections,
        graceful_shutdown_timeout_s=spec.settings.drain_seconds + _LEAVING_SECONDS,
    )
    return ingress.bind(replicas.bind(spec, reserves), spec.settings)
