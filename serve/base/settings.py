"""Options of an operator for a server."""

import re
from dataclasses import MISSING, dataclass
from typing import Any, Literal, get_args

from mtp_jax import ConfigError, JsonObject, TlsFiles, Tokenizer, ToolUse, is_loopback
from mtp_jax.options import check, documented, option
from serve.watch.access_log import AccessLog
from serve.watch.traces import check_traces

SpecMetrics = Literal["none", "summary", "detailed"]
MAX_NAME = 256
ACCESS, LIMITS = "access", "limits"
"""Subjects of options."""
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def _seconds(default: float | None, help: str, unset: str = "", flag: str | None = "") -> Any:
    return option(
        default,
        help,
        kind=float,
        low=0,
        above=True,
        high=1e9,
        metavar="S",
        unset=unset,
        flag=flag,
        subject=LIMITS,
    )


def _share(default: float, help: str) -> Any:
    return option(default, help, kind=float, low=0, high=1, metavar="P")


_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#]+")


@documented
@dataclass(frozen=True)
class Settings(TlsFiles):
    """Options of a server. Raises ConfigError for a wrong or unsafe value."""

    model_names: str | tuple[str, ...] = option(
        MISSING,
        "the name of the model for clients, or several; the first stands in the metrics, and in answers to "
        "requests that name none",
        kind=str,
        metavar="NAME",
        flag="--served-model-name",
        repeated=True,
    )
    host: str = option("127.0.0.1", "address to bind to", metavar="ADDRESS", subject=ACCESS)
    port: int = option(
        8000, "port to bind to; 0: any free one", low=0, high=2**16 - 1, metavar="N", subject=ACCESS
    )
    api_keys: tuple[str, ...] = option(
        (),
        "a key that clients may use; any opens every route",
        kind=str,
        flag="--api-key",
        repeated=True,
        metavar="KEY",
        subject=ACCESS,
    )
    admin_key: str | None = option(
        None,
        "the key that opens the routes which change weights and memory, and all other routes",
        kind=str,
        unset="these routes stay closed",
        metavar="KEY",
        subject=ACCESS,
    )
    insecure_no_auth: bool = option(False, "let other computers connect without a key", subject=ACCESS)
    open_metrics: bool = option(False, "let /metrics be read without a key", subject=ACCESS)
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host header to answer instead of the loopback names, or of any if bound to other addresses",
        kind=str,
        flag="--allowed-host",
        repeated=True,
        metavar="NAME",
        subject=ACCESS,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "origin of pages that may ask this server, such as https://chat.example.com; * allows all",
        kind=str,
        flag="--allowed-origin",
        repeated=True,
        metavar="ORIGIN",
        subject=ACCESS,
    )
    tool_parser: str = option(
        "auto",
        "format in which the model writes calls of tools; auto: the format that its chat template shows",
        choices=("auto", *ToolUse.FORMATS),
        flag="--tool-parser",
    )
    chat_template_kwargs: JsonObject = option(
        {},
        "variables of the chat template where a request does not give them, as a JSON object such as "
        '{"enable_thinking": false}',
        kind=object,
        metavar="JSON",
    )
    strict: bool = option(False, "refuse unknown fields instead of warning of them")
    max_body_bytes: int = option(
        8 * 2**20, "most bytes of a request's body", low=1, metavar="N", subject=LIMITS
    )
    body_seconds: float = _seconds(
        30.0,
        "in which a request's headers, and then its body, must arrive, and something of an answer that "
        "waits must be read",
        flag=None,
    )
    # A third of the 15 s after which the standard of server-sent events has a comment sent. Proxies end
    # silent connections after 60 s by default (nginx, AWS), some after 30 s.
    ping_seconds: float = _seconds(5.0, "a stream that has been silent for this time sends a ping")
    max_connections: int = option(
        4096,
        "most HTTP requests in progress; more are refused before their bodies are read",
        low=1,
        metavar="N",
        subject=LIMITS,
    )
    request_seconds: float | None = _seconds(
        None, "end requests after this long, or sooner by their own timeout", unset="never"
    )
    drain_seconds: float = _seconds(30.0, "how long SIGTERM waits for requests")
    ready_seconds: float = _seconds(
        30.0, "age of a step from which the server calls itself not ready", flag=None
    )
    step_seconds: float = _seconds(300.0, "exit when a step takes longer")
    spec_metrics: SpecMetrics = option(
        "none",
        "speculation metrics in completions and chats that do not ask; in streams with the usage",
        choices=get_args(SpecMetrics),
        flag="--per-request-spec-decode-metrics",
    )

    request_metrics: bool = option(
        False,
        "times of a request in completions, chats and responses that do not ask; in streams with the usage",
        flag="--enable-per-request-metrics",
    )

    acceptance_floor: float = _share(
        0.2, "warn when fewer of the drafter's first drafts are accepted; 0: never"
    )
    acceptance_ceiling: float = _share(
        0.98, "warn when more of them are, as in text that repeats itself; 1: never"
    )
    strict_draft: bool = option(
        False,
        "end at the start if a draft_model's first drafts are accepted less often than acceptance_floor",
        excludes={"synthetic_acceptance": "a law throws the model's verdict on drafts away"},
    )
    access_log: AccessLog | None = option(
        None,
        "a line per request on stderr, or, as JSON, on stdout",
        kind=str,
        choices=get_args(AccessLog),
        unset="text, or off with --quiet",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "URL of a collector of traces, which gets a span per request by OTLP over HTTP, such as "
        "http://127.0.0.1:4318/v1/traces; needs the extra otel",
        kind=str,
        metavar="URL",
        unset="no spans",
    )

    def __post_init__(self) -> None:
        check(self, ConfigError)
        if not self.names or any(not 0 < len(name) <= MAX_NAME for name in self.names):
            raise ConfigError(f"model_names = {self.model_names!r}; expected 1 to {MAX_NAME} characters each")
        self._check_keys()
        self.check_tls()
        if self.otlp_traces_endpoint is not None:
            check_traces(self.otlp_traces_endpoint)
        if own := sorted(Tokenizer.OWN_VARIABLES.intersection(self.chat_template_kwargs)):
            raise ConfigError(
                f"chat_template_kwargs has {own[0]}, which the server sets itself; leave it out"
            )
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allowed-origin {origin!r}; expected scheme, host and port as browsers send them, "
                    "such as http://localhost:3000, or *"
                )

    def _check_keys(self) -> None:
        keys = (*self.api_keys, *([] if self.admin_key is None else [self.admin_key]))
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in keys):
            raise ConfigError(
                "an API key or the admin key is empty or has spaces or other than printable ASCII characters"
            )
        if self.admin_key in self.api_keys:
            raise ConfigError(
                "the admin key is one of the API keys, whose holders must not have it; choose another"
            )
        if not (self.is_loopback or self.api_keys or self.insecure_no_auth):
            raise ConfigError(
                f"host {self.host} lets other computers connect, and there is no API key; set one "
                "(--api-key, or MTP_JAX_API_KEY in the environment), bind to 127.0.0.1, or pass "
                "--insecure-no-auth"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names that clients may call the model."""
        return (self.model_names,) if isinstance(self.model_names, str) else self.model_names

    @property
    def model_name(self) -> str:
        """The first name of the model."""
        return self.names[0]

    def allows_origin(self, origin: str) -> bool:
        """Whether web pages of this origin (in lower case) may send requests."""
        return "*" in self.allowed_origins or origin in map(str.lower, self.allowed_origins)

    @property
    def is_loopback(self) -> bool:
        """Whether the address admits only clients of this computer."""
        return is_loopback(self.host)

    @property
    def scheme(self) -> str:
        """The scheme of the server's addresses."""
        return "http" if self.tls_cert is None else "https"

    @property
    def hosts(self) -> frozenset[str]:
        """Host names that requests may be for, without ports; empty: any host name."""
        if self.allowed_hosts:
            return frozenset(map(str.lower, self.allowed_hosts))
        own = f"[{self.host}]" if ":" in self.host else self.host
        return frozenset((*_LOCAL_NAMES, own)) if self.is_loopback else frozenset()
