"""The process of a server: its socket, signals, and the engine's end."""

import asyncio
import errno
import gc
import logging
import os
import socket
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mtp_jax import AsyncLLM, ConfigError, Reporter
from serve.base.settings import Settings
from serve.base.tls import tls_context
from serve.http.app import make_app
from serve.watch.acceptance import AcceptanceAlarm
from serve.watch.access_log import log_connection
from serve.watch.stats_log import log_stats
from serve.watch.watchdog import Watchdog

_LOG = logging.getLogger(__name__)
_MOST_HEADER_BYTES = 32 * 1024
_MOST_FILES = 65536
_LAST_ANSWERS_SECONDS = 0.5
_LEAVING_SECONDS = 5  # for what is still being sent or read then
# Longer than clients and proxies keep a connection, which is 60 s at most by default: one that the server
# closes while a request is on its way to it loses the request.
_KEEP_ALIVE_SECONDS = 75
_LOOK_SECONDS = 1.0
_TLS_HANDSHAKE = b"\x16\x03"  # a record of that type, and the major version of every TLS


def listen(settings: Settings) -> socket.socket:
    """Bind the port before any slow work; clients cannot connect yet.

    Raises ConfigError if the port is not free, or the files of ``tls_context`` are wrong.
    """
    tls_context(settings)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        try:  # two sockets that may share a port can both bind it, until one of them listens
            listener.bind((settings.host, settings.port))
        except OSError:  # the port is held for a minute by connections of a server that has just ended
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise _no_port(settings, error) from error
    return listener


def _no_port(settings: Settings, error: OSError) -> ConfigError:
    flag = "--host" if error.errno in (errno.EADDRNOTAVAIL, None) else "--port"
    return ConfigError(
        f"cannot bind to {settings.host} port {settings.port}: {error.strerror}; choose another {flag}"
    )


def serve(
    allm: AsyncLLM,
    settings: Settings,
    listener: socket.socket,
    reporter: Reporter | None = None,
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Serve until a signal or the engine's failure; ``ready`` is called when requests can come.

    Returns the exit status.
    """
    _raise_file_limit()
    tasks: list[asyncio.Future[None]] = []

    def begin() -> None:
        tasks.append(asyncio.ensure_future(allm.start_helpers()))
        ready()

    server = DrainingServer(allm, settings, begin, reporter)
    server.run([listener])
    status = 0 if allm.error is None and server.started else 1
    if allm.warming:
        os._exit(status)  # without waiting for programs that will not run
    return status


def _config(allm: AsyncLLM, settings: Settings, alarm: AcceptanceAlarm) -> uvicorn.Config:
    class Protocol(_Protocol):
        seconds = settings.body_seconds

    context = tls_context(settings)
    return uvicorn.Config(
        make_app(allm, settings, alarm),
        http=Protocol,
        ssl_context_factory=(lambda config, default: context) if context else None,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_LEAVING_SECONDS,
    )


class DrainingServer(uvicorn.Server):
    """Drains on the first SIGTERM or SIGINT, leaves at once on the second, and ends when the engine fails."""

    def __init__(
        self,
        allm: AsyncLLM,
        settings: Settings,
        ready: Callable[[], None],
        reporter: Reporter | None = None,
    ) -> None:
        limits = settings.acceptance_floor, settings.acceptance_ceiling
        meaningless = allm.about.engine.law or allm.about.random_weights
        self._alarm = AcceptanceAlarm(*((0, 1) if meaningless else limits))
        super().__init__(_config(allm, settings, self._alarm))
        self._allm, self._settings, self._ready = allm, settings, ready
        self._reporter = reporter
        self._asked = asyncio.Event()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the end."""
        self._loop = asyncio.get_running_loop()
        jobs = (self._end(), self._keep_programs(), log_stats(self._allm, self._alarm))
        beside = [asyncio.create_task(job) for job in jobs]
        with Watchdog(self._allm, self._settings.step_seconds):
            try:
                await super().serve(sockets)
            finally:
                for task in beside:
                    task.cancel()
                await self._allm.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the engine and open the port. Raises the error of an engine that does not start."""
        await self._allm.start(self._reporter)
        await self._alarm.check(self._allm, self._settings.strict_draft)
        for listener in sockets or ():
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.listen(self.config.backlog)
            except OSError as error:  # which uvicorn would not report
                raise _no_port(self._settings, error) from error
        await super().startup(sockets)
        if self.started:
            _freeze()
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self._asked.is_set() or not self.started:
            os._exit(128 + sig)  # any other way would wait for compilations and running answers
        self._loop.call_soon_threadsafe(self._asked.set)

    async def _keep_programs(self) -> None:
        """Freeze the programs once the last is compiled."""
        while self._allm.warming or not self.started:
            await asyncio.sleep(_LOOK_SECONDS)
        _freeze()

    async def _end(self) -> None:
        """Wait for a reason to end, and let the last answers be sent."""
        failed = asyncio.create_task(self._allm.failed())
        asked = asyncio.create_task(self._asked.wait())
        await asyncio.wait((failed, asked), return_when=asyncio.FIRST_COMPLETED)
        if self._asked.is_set():
            _LOG.warning(
                "shutting down: up to %g s for %d requests; another signal ends it at once",
                self._settings.drain_seconds,
                self._allm.live,
            )
            if not await self._allm.drain(self._settings.drain_seconds):
                _LOG.warning("requests were aborted")
        await asyncio.sleep(_LAST_ANSWERS_SECONDS)
        self.should_exit = True


class _Protocol(H11Protocol):
    """Closes connections whose clients do not complete their headers or do not read their answers."""

    seconds: float
    _begun = False

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: the answer is that of the same request without an upgrade, as clients expect."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._patience: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._check()

    def data_received(self, data: bytes) -> None:
        begun, self._begun = self._begun, True
        if not begun and data.startswith(_TLS_HANDSHAKE):
            log_connection("a client speaks TLS to this port, which has none: use http://, or --tls-cert")
            self.transport.close()
            return
        super().data_received(data)
        self._check()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._patience, self._unread):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _await_reader(self) -> None:
        """Close the connection if its client does not read the bytes that wait for it."""
        before = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() < before:
                self._await_reader()
            else:
                self.transport.abort()

        self._unread = self.loop.call_later(self.seconds, look)

    def _check(self) -> None:
        """Start or stop the clock, which runs from a request's beginning until its headers are complete.

        It also runs while the rest of a refused request's body is awaited.
        """
        answered = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        waits = self.conn.their_state is h11.IDLE or answered
        if waits and self._patience is None:
            self._patience = self.loop.call_later(self.seconds, self.transport.close)
        elif not waits and self._patience is not None:
            self._patience.cancel()
            self._patience = None


def _freeze() -> None:
    """Exclude lasting objects, programs above all, from garbage collection, which pauses the event loop."""
    gc.collect()
    gc.freeze()


def _raise_file_limit() -> None:
    """Raise the limit of open files, as each connection is a file, where the system has one."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(_MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
