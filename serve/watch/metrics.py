"""Prometheus metrics. Metrics of vLLM have its names, so that its dashboards and clients work."""

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UntypedMetricFamily,
)
from prometheus_client.utils import floatToGoString

from mtp_jax import AsyncLLM, EngineStats, RequestOutput, Stream
from serve.watch.acceptance import KINDS, AcceptanceAlarm

_LATENCY = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_COMPLETIONS = (1, 2, 5, 10, 20)
_LABEL = "model_name"
_SPECULATION = "vllm:spec_decode_"
disable_created_metrics()  # a time of creation for each series


class Metrics:
    """Everything that ``/metrics`` shows, in a registry of its own."""

    def __init__(self, allm: AsyncLLM, model_name: str, alarm: AcceptanceAlarm) -> None:
        self.registry = CollectorRegistry()
        self._name = model_name

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, [_LABEL], registry=self.registry, buckets=buckets).labels(model_name)

        self._first = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _LATENCY
        )
        self._queued = histogram("vllm:request_queue_time_seconds", "From arrival to a slot.", _LATENCY)
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "From a slot to the first token.", _LATENCY
        )
        self._decode = histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", _LATENCY
        )
        self._inference = histogram(
            "vllm:request_inference_time_seconds", "From a slot to the end.", _LATENCY
        )
        self._end = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _LATENCY)
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Seconds per token after the first, of a request.",
            _PER_TOKEN,
        )
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _LENGTHS)
        self._output = histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request.", _LENGTHS
        )
        self._longest = histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest completion.", _LENGTHS
        )
        self._n = histogram("vllm:request_params_n", "Completions asked for.", _COMPLETIONS)
        self._most = histogram("vllm:request_params_max_tokens", "The max_tokens asked for.", _LENGTHS)
        self._responses = Counter(
            "mtp_jax:http_responses", "HTTP responses.", [_LABEL, "route", "status"], registry=self.registry
        )
        self.registry.register(_Engine(allm, model_name, alarm))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def responded(self, route: str, status: int) -> None:
        """Count a response; ``route`` is a route of the server, never a client's own text."""
        self._responses.labels(self._name, route, str(status)).inc()

    async def follow(
        self, stream: Stream | AsyncGenerator[RequestOutput, None], max_tokens: int | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The stream's outputs: its first token is measured as it comes, its end unless it was aborted.

        max_tokens: most tokens of a completion that its request asked for.
        """
        output, begun = None, False
        async with aclosing(stream):
            async for output in stream:
                if not begun and (output.timing.first_token is not None or output.finished):
                    begun = True
                    self._began(output)
                yield output
        if output is not None and all(c.finish_reason not in (None, "abort") for c in output.outputs):
            self._ended(output)
            if max_tokens is not None:
                self._most.observe(max_tokens)

    def _began(self, output: RequestOutput) -> None:
        t = output.timing
        if t.admitted is not None:
            self._queued.observe(t.admitted)
            if t.first_token is not None:
                self._first.observe(t.first_token)
                self._prefill.observe(t.first_token - t.admitted)

    def _ended(self, output: RequestOutput) -> None:
        t, longest = output.timing, max(output.outputs, key=lambda c: c.num_tokens)
        self._prompt.observe(len(output.prompt_token_ids))
        self._output.observe(sum(c.num_tokens for c in output.outputs))
        self._longest.observe(longest.num_tokens)
        self._n.observe(len(output.outputs))
        if t.finished is not None:
            self._end.observe(t.finished)
            if t.admitted is not None:
                self._inference.observe(t.finished - t.admitted)
        # Completions of one prompt grow side by side, if there are slots.
        if longest.decode_seconds is not None and longest.num_tokens > 1:
            self._decode.observe(longest.decode_seconds)
            self._per_token.observe(longest.decode_seconds / (longest.num_tokens - 1))


class _Engine:
    """The engine's own counts, read for each ``/metrics``."""

    def __init__(self, allm: AsyncLLM, model_name: str, alarm: AcceptanceAlarm) -> None:
        self._allm, self._name, self._alarm = allm, model_name, alarm

    def describe(self) -> list[Metric]:
        """An empty list: no check is needed, as all names differ from the names in ``Metrics``."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Families of metrics."""
        s = self._allm.stats()
        for name, (text, values) in _histograms(s).items():
            yield self._histogram(HistogramMetricFamily(name, text, labels=[_LABEL]), values)
        for name, (text, value) in self._gauges(s).items():
            yield self._family(GaugeMetricFamily(name, text, labels=[_LABEL]), {(): value})
        alarms = GaugeMetricFamily(
            "mtp_jax:acceptance_alarm",
            "1 while the first draft is accepted less often than --acceptance-floor (low), or more often "
            "than --acceptance-ceiling (high).",
            labels=[_LABEL, "kind"],
        )
        yield self._family(alarms, {(kind,): kind == self._alarm.kind for kind in KINDS})
        checked = GaugeMetricFamily(
            "mtp_jax:draft_check_acceptance",
            "Drafts of --draft-model that were accepted in a text of the model at the start, by position.",
            labels=[_LABEL, "position"],
        )
        yield self._family(checked, {(str(i),): share for i, share in enumerate(self._alarm.at_start)})
        for name, (text, value) in _counters(s).items():
            yield self._family(CounterMetricFamily(name, text, labels=[_LABEL]), {(): value})
            if name.startswith(_SPECULATION):  # queries of vLLM's older dashboards lack the ending _total
                yield self._family(UntypedMetricFamily(name, text, labels=[_LABEL]), {(): value})
        yield self._cache_config(s)
        for totals in (_totals(s), *(further() for further in self._allm.hooks.counters)):
            for (name, text, label), values in totals.items():
                family = CounterMetricFamily(name, text, labels=[_LABEL, label])
                yield self._family(family, {(str(key),): value for key, value in values.items()})

    def _gauges(self, s: EngineStats) -> dict[str, tuple[str, float]]:
        allm, law = self._allm, self._allm.about.engine.law
        gauges: dict[str, tuple[str, float]] = {
            "vllm:num_requests_running": ("Requests that have a slot.", s.running),
            "vllm:num_requests_waiting": ("Requests without a slot.", s.waiting),
            "vllm:kv_cache_usage_perc": (
                "Cache pages held by requests, 1 is all.",
                s.pages_used / s.pages_total,
            ),
            "mtp_jax:cache_pages": ("Cache pages.", s.pages_total),
            "mtp_jax:cache_pages_reusable": ("Cache pages that only the prefix cache keeps.", s.pages_cached),
            "mtp_jax:host_cache_pages": ("Pages that the host's memory keeps.", s.tier.pages),
            "mtp_jax:host_cache_bytes": ("Bytes of those pages.", s.tier.bytes),
            "mtp_jax:file_cache_bytes": ("Bytes of pages in files, of all servers.", s.tier.files.bytes),
            "mtp_jax:queued_requests": (
                "Requests counted against --max-queued-requests.",
                allm.admission.requests,
            ),
            "mtp_jax:queued_tokens": ("Tokens counted against --max-queued-tokens.", allm.admission.tokens),
            "mtp_jax:step_age_seconds": ("Age of the step in progress; 0 while idle.", allm.step_age),
            "mtp_jax:executables": ("Compiled programs.", s.executables),
            "mtp_jax:simulated": ("1: no model answers, all tokens are SIMULATED.", allm.about.simulated),
            "mtp_jax:synthetic_acceptance_length": (
                "Acceptance length that is forced, SYNTHETIC; 0: the model decides.",
                law.length if law else 0,
            ),
            f"{_SPECULATION}draft_acceptance_rate": (
                "Drafts accepted over drafts verified, since the start; 0 before the first.",
                s.accepted_tokens / max(s.draft_tokens, 1),
            ),
            "mtp_jax:warming": ("Whether smaller programs are still being compiled.", allm.warming),
        }
        if s.realised_speedup is not None:
            gauges["mtp_jax:realised_speedup"] = (
                "Of recent steps: seconds that their tokens would have taken at depth 0, over the seconds "
                "they took, by the measured costs of steps of the same slots, pages and sampling. Absent "
                "while depth 0 has not been measured lately where half of the time was spent.",
                s.realised_speedup,
            )
        if s.experts is not None:
            gauges["mtp_jax:expert_imbalance"] = (
                "Rows of the busiest device's experts over the mean of all devices, as last read; the mean "
                "of all layers.",
                s.experts.imbalance,
            )
            gauges["mtp_jax:expert_imbalance_worst"] = ("The same of the worst layer.", s.experts.worst)
        return gauges

    def _cache_config(self, stats: EngineStats) -> Metric:
        """The size of the cache in labels: a router weighs a server's usage by it."""
        engine = self._allm.about.engine
        labels = {
            "block_size": str(engine.page_size),
            "num_gpu_blocks": str(stats.pages_total),
            "cache_dtype": engine.kv_cache_dtype,
            "enable_prefix_caching": str(engine.prefix_cache),
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "1, and the cache's size in labels.", labels=[_LABEL, *labels]
        )
        return self._family(family, {tuple(labels.values()): 1})

    def _histogram(self, family: HistogramMetricFamily, values: Any) -> Metric:
        bounds = [*map(floatToGoString, values.bounds), "+Inf"]
        family.add_metric([self._name], list(zip(bounds, accumulate(values.counts), strict=True)), values.sum)
        return family

    def _family(
        self,
        family: CounterMetricFamily | GaugeMetricFamily | UntypedMetricFamily,
        values: dict[tuple[str, ...], float],
    ) -> Metric:
        for labels, value in values.items():
            family.add_metric([self._name, *labels], value)
        return family


def _histograms(s: EngineStats) -> dict[str, tuple[str, Any]]:
    return {
        "vllm:inter_token_latency_seconds": (
            "From token to token of a request: a step's seconds over its tokens, once per token.",
            s.inter_token,
        ),
        "vllm:iteration_tokens_total": (
            "Tokens of a launch: of prompts that it read, and of texts.",
            s.launch_tokens,
        ),
    }


def _counters(s: EngineStats) -> dict[str, tuple[str, float]]:
    counters: dict[str, tuple[str, float]] = {
        "vllm:prompt_tokens": ("Prompt tokens of admitted requests.", s.prompt_tokens),
        "vllm:generation_tokens": ("Tokens generated, also those cut off again.", s.generation_tokens),
        "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", s.prefix_queries),
        "vllm:prefix_cache_hits": ("Prompt tokens found there.", s.prefix_hits),
        "vllm:num_preemptions": ("Requests that lost their pages for a time.", s.preemptions),
        "vllm:spec_decode_num_drafts": ("Rows that verified at least one draft.", s.drafts),
        "vllm:spec_decode_num_draft_tokens": ("Drafts verified.", s.draft_tokens),
        "vllm:spec_decode_num_accepted_tokens": ("Drafts accepted.", s.accepted_tokens),
        "mtp_jax:host_cache_stored_pages": ("Pages that the host's memory took.", s.tier.stored),
        "mtp_jax:host_cache_restored_pages": ("Pages that it gave back.", s.tier.restored),
        "mtp_jax:file_cache_hits": ("Pages read from files.", s.tier.files.hits),
        "mtp_jax:file_cache_misses": ("Prompts whose next page had no file.", s.tier.files.missed),
        "mtp_jax:file_cache_read_bytes": ("Bytes of the pages read.", s.tier.files.read_bytes),
        "mtp_jax:file_cache_written_pages": ("Pages written to files.", s.tier.files.written),
        "mtp_jax:prefill_seconds": ("Seconds of steps that had nothing but prompts.", s.prefill_seconds),
    }
    if s.experts is not None:
        counters["mtp_jax:expert_moves"] = ("Experts copied from slot to slot.", s.experts.moves)
        counters["mtp_jax:expert_gathers"] = (
            "Passes through a layer whose all-to-all had no room for all rows.",
            s.experts.over,
        )
    return counters


def _totals(s: EngineStats) -> Mapping[tuple[str, str, str], Mapping[Any, float]]:
    """Totals by name, description and label: the total of each value of the label."""
    return {
        ("vllm:request_success", "Requests by how they ended.", "finished_reason"): s.finished,
        (
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by position.",
            "position",
        ): dict(enumerate(s.accepted_per_position)),
        ("mtp_jax:draft_tokens", "Drafts verified, by origin.", "source"): s.drafted_by_source,
        ("mtp_jax:accepted_draft_tokens", "Drafts accepted.", "source"): s.accepted_by_source,
        ("mtp_jax:first_drafts", "Rows that verified drafts, by origin.", "source"): s.first_drafts,
        (
            "mtp_jax:accepted_first_drafts",
            "Those whose first draft was accepted.",
            "source",
        ): s.accepted_first_drafts,
        (
            "mtp_jax:prefix_cache_hits",
            "Prompt tokens found in the prefix cache, by where they were.",
            "tier",
        ): s.hits_by_tier,
        ("mtp_jax:host_cache_dropped_pages", "Pages that it lost.", "reason"): s.tier.dropped,
        ("mtp_jax:file_cache_dropped_pages", "Pages lost there.", "reason"): s.tier.files.dropped,
        ("mtp_jax:steps", "Draft-and-verify steps, by depth.", "depth"): s.depth_steps,
        ("mtp_jax:step_seconds", "Seconds of those steps.", "depth"): s.step_seconds,
    }
