"""A span per request, at a collector of the tests, and no request that waits for one."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import pytest

from mtp_jax import ConfigError
from serve.base.settings import Settings
from serve.watch import traces
from tests.hosts.ranks import two_free_ports
from tests.serve.conftest import simulated, start, wait_until

pytest.importorskip(
    "opentelemetry.exporter.otlp.proto.http", reason="needs OTLP: pip install -e '.[otel]' -c constraints.txt"
)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ASKED = {"prompt": "abc", "max_tokens": 12, "temperature": 0.5, "ignore_eos": True, "seed": 3}


class Collector:
    """A server that takes spans, on a port that may be free for a while first."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.port = two_free_ports()
        self.url = f"http://127.0.0.1:{self.port}/v1/traces"

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # pyright: ignore
            ExportTraceServiceRequest,
        )

        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            (name,) = (a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            assert name == "mtp-jax"
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    @contextmanager
    def listening(self) -> Iterator[None]:
        take = self.take

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                take(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", self.port), Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield
            finally:
                server.shutdown()
                thread.join()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Collector:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    return Collector()


def attributes(span: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [plain(v) for v in found.values] if kind == "array_value" else found

    return {a.key: plain(a.value) for a in span.attributes}


def test_a_request_is_a_span_with_the_clients_parent(model: Any, collector: Collector):
    with collector.listening(), start(simulated(model), otlp_traces_endpoint=collector.url) as running:
        with running.client() as http:
            headers = {"traceparent": PARENT, "x-request-id": "mine"}
            assert http.post("/v1/completions", json={**ASKED, "n": 2}, headers=headers).status_code == 200
            streamed = http.post("/v1/completions", json={**ASKED, "stream": True})
            assert streamed.text.rstrip().endswith("data: [DONE]")
            assert http.post("/v1/completions", json={"prompt": 3.5}).status_code == 400
            assert http.get("/v1/models").status_code == 200
        wait_until(lambda: len(collector.spans) == 2)
    one, other = collector.spans
    assert one.name == other.name == "llm_request"
    assert (one.trace_id.hex(), one.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
    assert other.parent_span_id == b""
    found = attributes(one)
    assert found["gen_ai.request.id"] == "mine"
    assert found["gen_ai.response.model"] == "tiny"
    asked = {k: found[f"gen_ai.request.{k}"] for k in ("max_tokens", "temperature", "top_p", "n")}
    assert asked == {"max_tokens": 12, "temperature": 0.5, "top_p": 1.0, "n": 2}
    assert (found["gen_ai.usage.prompt_tokens"], found["gen_ai.usage.completion_tokens"]) == (3, 24)
    assert found["gen_ai.usage.num_sequences"] == 2
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert found["http.response.status_code"] == 200
    for span in (one, other):
        found = attributes(span)
        assert 0 < found["mtp_jax.accepted_draft_tokens"] < found["mtp_jax.draft_tokens"]
        queue, first, end = (
            found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")
        )
        assert 0 <= queue <= first <= end <= (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        parts = [found[f"gen_ai.latency.time_in_model_{part}"] for part in ("prefill", "decode", "inference")]
        assert parts == pytest.approx([first - queue, end - first, end - queue])
        assert "abc" not in str(span)


def test_a_collector_that_is_gone_is_said_once(
    model: Any, collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(traces, "_SEND_SECONDS", 0.2)

    def asked(http: httpx2.Client) -> None:
        assert http.post("/v1/completions", json=ASKED).status_code == 200

    with start(simulated(model), otlp_traces_endpoint=collector.url) as running, running.client() as http:
        asked(http)
        wait_until(lambda: "no spans reach http://127.0.0.1" in caplog.text)
        for _ in range(3):
            asked(http)
        with collector.listening():
            wait_until(lambda: bool(asked(http)) or f"spans reach {collector.url} again" in caplog.text)
            wait_until(lambda: bool(collector.spans))
        assert caplog.text.count("no spans reach") == 1
        asked(http)
    assert "Traceback" not in caplog.text
    assert caplog.text.count("requests go on without") <= 2  # the end is another time


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        ("localhost:4318", "otlp_traces_endpoint = 'localhost:4318'; expected a URL of OTLP over HTTP"),
        ("grpc://localhost:4317", "expected a URL of OTLP over HTTP"),
    ],
)
def test_other_addresses_are_refused(endpoint: str, told: str):
    with pytest.raises(ConfigError, match=told) as caught:
        Settings("tiny", otlp_traces_endpoint=endpoint)
    assert "\n" not in str(caught.value)


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"install the extra otel: pip install 'mtp-jax\[otel\]'"):
        Settings("tiny", otlp_traces_endpoint="http://localhost:4318/v1/traces")
