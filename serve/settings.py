"""What an operator decides about a server."""

import ipaddress
from dataclasses import dataclass
from typing import Literal, get_args

from mtp_jax import ConfigError

SpecMetrics = Literal["none", "summary", "detailed"]
MAX_NAME = 256
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Settings:
    """Options of a server. Raises ConfigError for what is wrong or unsafe.

    Attributes:
        model_name: what clients call the model.
        host, port: where to listen; port 0 takes a free one.
        api_keys: any of them opens every route; none: no key is needed.
        insecure_no_auth: allow others than this computer to connect without a key.
        allowed_hosts: Host headers to answer; none: the loopback names while bound to one, else any.
        strict: refuse requests with unknown fields instead of warning.
        max_body_bytes: of a request.
        body_seconds: in which a request's headers, and then its body, must arrive, and something of an answer
            that waits must be read.
        max_connections: HTTP requests in progress; more are refused before their bodies are read.
        request_seconds: after which a request is ended, or sooner by its own timeout; None: never.
        drain_seconds: how long SIGTERM lets requests go on.
        ready_seconds: age of a step from which the server calls itself not ready.
        step_seconds: age of a step from which the process is ended.
        base_model: whether it has learnt to go on with text, not to converse: the page begins with that.
        spec_metrics: speculation metrics in responses that do not ask: "none", "summary" or "detailed".
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    insecure_no_auth: bool = False
    allowed_hosts: tuple[str, ...] = ()
    strict: bool = False
    max_body_bytes: int = 8 * 2**20
    body_seconds: float = 30.0
    max_connections: int = 4096
    request_seconds: float | None = None
    drain_seconds: float = 30.0
    ready_seconds: float = 30.0
    step_seconds: float = 300.0
    base_model: bool = False
    spec_metrics: SpecMetrics = "none"

    def __post_init__(self) -> None:
        if not 0 < len(self.model_name) <= MAX_NAME:
            raise ConfigError(f"model_name = {self.model_name!r}; expected 1 to {MAX_NAME} characters")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port = {self.port}; expected 0 to 65535")
        for name in ("max_body_bytes", "max_connections"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}; expected 1 or more")
        for name in ("body_seconds", "drain_seconds", "ready_seconds", "step_seconds", "request_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                raise ConfigError(f"{name} = {value}; expected a number of seconds above 0")
        if self.spec_metrics not in get_args(SpecMetrics):
            raise ConfigError(
                f"spec_metrics = {self.spec_metrics!r}; expected one of {get_args(SpecMetrics)}"
            )
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in self.api_keys):
            raise ConfigError("an API key is empty or has spaces or other than printable ASCII characters")
        if not (self.is_loopback or self.api_keys or self.insecure_no_auth):
            raise ConfigError(
                f"host {self.host} lets other computers connect, and there is no API key; set one "
                "(--api-key, or MTP_JAX_API_KEY in the environment), bind to 127.0.0.1, or pass "
                "--insecure-no-auth"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this computer can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def hosts(self) -> frozenset[str]:
        """Host names to answer, without ports; empty: any."""
        if self.allowed_hosts:
            return frozenset(map(str.lower, self.allowed_hosts))
        own = f"[{self.host}]" if ":" in self.host else self.host
        return frozenset((*_LOCAL_NAMES, own)) if self.is_loopback else frozenset()
