"""A ``mtp-jax serve`` process of a benchmark's own, from start to end."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from mtp_jax.errors import MtpJaxError

_WARM_SECONDS = 3600.0
_TAIL_BYTES = 4000
_SECONDS = 600.0
MODEL_NAME = "served"


@dataclass(frozen=True)
class OwnServer:
    """A process that may not be ready yet, its address, and what it logs."""

    process: subprocess.Popen[bytes]
    host: str
    port: int
    log: IO[bytes]

    @property
    def url(self) -> str:
        """Without /v1."""
        return f"http://{self.host}:{self.port}"

    def client(self) -> httpx2.AsyncClient:
        """As many connections as it takes; no proxy, whatever the environment names."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx2.AsyncClient(base_url=self.url, timeout=_SECONDS, limits=limits, trust_env=False)

    def check(self) -> None:
        """Raises MtpJaxError with the end of its log if it has ended."""
        if (status := self.process.poll()) is not None:
            self.log.seek(0)
            tail = self.log.read()[-_TAIL_BYTES:].decode(errors="replace")
            raise MtpJaxError(f"the server ended with status {status}; its log ends with\n{tail}")

    async def warm(self, http: httpx2.AsyncClient) -> None:
        """Wait until every program is compiled. Raises MtpJaxError if it ends, refuses, or takes an hour."""
        end = time.monotonic() + _WARM_SECONDS
        while time.monotonic() < end:
            self.check()
            try:
                if (await metrics(http))["mtp_jax:warming"] == 0:
                    return
            except httpx2.TransportError:  # it does not listen yet
                pass
            except httpx2.HTTPStatusError as error:
                raise MtpJaxError(f"the server does not show its metrics: {error}") from error
            await asyncio.sleep(1)
        raise MtpJaxError(f"the server is not warm after {_WARM_SECONDS:.0f} s")


@contextmanager
def own_server(model: str, options: Sequence[str]) -> Iterator[OwnServer]:
    """Start one with these options on a free port; it is killed at the end. JAX logs its compilations."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host, port = free.getsockname()
    command = [sys.executable, "-m", "mtp_jax", "serve", *([] if model == "demo" else [model])]
    command += ["--port", str(port), "--served-model-name", MODEL_NAME, *options]
    with tempfile.TemporaryFile() as log:
        env = os.environ | {"JAX_LOG_COMPILES": "1"}
        for key in ("MTP_JAX_API_KEY", "MTP_JAX_ADMIN_KEY"):
            env.pop(key, None)  # it listens on loopback and needs none
        process = subprocess.Popen(command, stderr=log, stdout=subprocess.DEVNULL, env=env)
        try:
            yield OwnServer(process, host, port, log)
        finally:
            process.kill()
            process.wait()


async def metrics(http: httpx2.AsyncClient) -> dict[str, float]:
    """The sums of /metrics by name."""
    found: defaultdict[str, float] = defaultdict(float)
    response = await http.get("/metrics")
    for family in text_string_to_metric_families(response.raise_for_status().text):
        for sample in family.samples:
            found[sample.name] += sample.value
    return dict(found)
