"""A span per request, sent to a collector of traces over OTLP (OpenTelemetry): where its time went.

Attributes have the names that vLLM and SGLang give them; ``mtp_jax.*`` are this server's own. No text of a
prompt or an answer is in a span.
"""

import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtp_jax import ConfigError
from serve.watch.access_log import Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan  # pyright: ignore[reportMissingImports]
    from opentelemetry.sdk.trace.export import SpanExportResult  # pyright: ignore[reportMissingImports]

    from mtp_jax import Timing

_LOG = logging.getLogger(__name__)
_OF_PACKAGE = "opentelemetry"
_OF_SENDER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
# One batch may hold the server's end up for as long, if the collector is gone.
_SEND_SECONDS = 2.0
_FIRST_ERROR = 500  # status of HTTP: the server's own fault


class Traces:
    """Spans of requests, on their way to a collector. A thread sends them; requests never wait for it."""

    def __init__(self, endpoint: str, model: str) -> None:
        """endpoint: URL of the collector's OTLP over HTTP, with its path; must pass ``check_traces``."""
        from opentelemetry.sdk.resources import Resource  # pyright: ignore[reportMissingImports]
        from opentelemetry.sdk.trace import TracerProvider  # pyright: ignore[reportMissingImports]
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # pyright: ignore[reportMissingImports]

        own = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "mtp-jax"}
        self._model, self._sender = model, _sender(endpoint)
        self._provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._sender))
        self._tracer = self._provider.get_tracer("mtp-jax")

    def ended(self, record: Record, name: str, status: int, seconds: float, parent: str | None) -> None:
        """Make the span of a request that has ended now, if the engine had it.

        name: the request's id. status: of HTTP. seconds: since its arrival. parent: its ``traceparent``.
        """
        if record.asked is None:
            return
        from opentelemetry.trace import SpanKind, StatusCode  # pyright: ignore[reportMissingImports]
        from opentelemetry.trace.propagation.tracecontext import (  # pyright: ignore[reportMissingImports]
            TraceContextTextMapPropagator,
        )

        context = TraceContextTextMapPropagator().extract({"traceparent": parent} if parent else {})
        now = time.time_ns()
        span = self._tracer.start_span(
            "llm_request", context, SpanKind.SERVER, start_time=now - int(seconds * 1e9)
        )
        span.set_attributes(_attributes(record, name, self._model, status))
        if record.error is not None or status >= _FIRST_ERROR:
            span.set_status(StatusCode.ERROR, record.error)
        span.end(now)

    def close(self) -> None:
        """Send the last spans; a collector that does not answer is waited for once."""
        self._sender.closing = True
        self._provider.shutdown()


def check_traces(endpoint: str) -> None:
    """Raise ConfigError if spans cannot be sent to this address, or the packages are not installed."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_traces_endpoint = {endpoint!r:.80}; expected a URL of OTLP over HTTP, such as "
            "http://127.0.0.1:4318/v1/traces"
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401  # pyright: ignore
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs a package that is not installed ({error.name}); install the extra "
            "otel: pip install 'mtp-jax[otel]'"
        ) from error


def _attributes(
    record: Record, name: str, model: str, status: int
) -> dict[str, str | int | float | Sequence[str]]:
    asked, prompts = record.asked, list(record.prompts.values())
    found: dict[str, str | int | float | Sequence[str] | None] = {
        "gen_ai.request.id": name,
        "gen_ai.response.model": model,
        "http.response.status_code": status,
        "gen_ai.usage.num_sequences": sum(len(p.reasons) for p in prompts),
        "gen_ai.usage.prompt_tokens": sum(p.prompt_tokens for p in prompts),
        "gen_ai.usage.completion_tokens": sum(p.tokens for p in prompts),
        "gen_ai.response.finish_reasons": sorted({reason for p in prompts for reason in p.reasons}),
        "mtp_jax.cached_tokens": sum(p.cached for p in prompts),
        "mtp_jax.draft_tokens": sum(p.drafted for p in prompts),
        "mtp_jax.accepted_draft_tokens": sum(p.accepted for p in prompts),
    }
    if asked is not None:
        for option in ("max_tokens", "temperature", "top_p", "n"):
            found[f"gen_ai.request.{option}"] = getattr(asked, option)
    found |= {
        f"gen_ai.latency.{key}": value for key, value in _latencies([p.timing for p in prompts]).items()
    }
    return {key: value for key, value in found.items() if value is not None}


def _latencies(timings: Sequence["Timing"]) -> dict[str, float | None]:
    """Seconds of the prompt that ended last; an empty dict: none has ended."""
    ended = [(t.finished, t) for t in timings if t.finished is not None]
    if not ended:
        return {}
    end, last = max(ended, key=lambda one: one[0])
    begun, first = last.admitted, last.first_token
    found = {"time_in_queue": begun, "time_to_first_token": first, "e2e": end}
    if begun is None or first is None:
        return found
    parts = {"prefill": first - begun, "decode": end - first, "inference": end - begun}
    return found | {f"time_in_model_{part}": seconds for part, seconds in parts.items()}


def _sender(endpoint: str):
    """Make the sender of spans, which says once that no span arrives, and once that spans arrive again."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # pyright: ignore[reportMissingImports]
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.trace.export import SpanExportResult  # pyright: ignore[reportMissingImports]

    class Sender(OTLPSpanExporter):
        closing, _lost = False, False

        def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
            if self.closing and self._lost:
                return SpanExportResult.FAILURE
            result = super().export(spans)
            lost = result is not SpanExportResult.SUCCESS
            if lost != self._lost:
                self._lost = lost
                if lost:
                    _LOG.warning("no spans reach %s (%s); requests go on without", endpoint, words.last)
                else:
                    _LOG.warning("spans reach %s again", endpoint)
            return result

    words = _LastWords()
    logging.getLogger(_OF_SENDER).addFilter(words)
    logging.getLogger(_OF_PACKAGE).setLevel(logging.CRITICAL)  # a line for each span that is dropped
    logging.getLogger(_OF_SENDER).setLevel(logging.WARNING)
    return Sender(endpoint, timeout=_SEND_SECONDS)


class _LastWords(logging.Filter):
    """Keeps the last message of a logger, and passes none on."""

    last = "no reason given"

    def filter(self, record: logging.LogRecord) -> bool:
        self.last = " ".join(record.getMessage().split())[:200]
        return False
