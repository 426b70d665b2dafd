"""What the latency metrics of a request are taken from."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mtp_jax.api.outputs import CompletionOutput, RequestOutput, Timing
from mtp_jax.cluster.handover.handover import Handover
from mtp_jax.engine.speculation import Speculation
from serve.watch.metrics import Metrics
from tests.serve.helpers import still_metrics

FIRST_TOKEN = Timing(0.5, 2.0, None)
ENDED = Timing(0.5, 2.0, 11.0)


def output(*tokens: int, ended: str | None = "length", timing: Timing = ENDED) -> RequestOutput:
    """Of completions with so many tokens: half a second to a slot, 2 to the first token, 11 to the end."""
    completions = [
        CompletionOutput(i, "", [], n, ended, None, [], [], Speculation(), 9.0 if ended else None)
        for i, n in enumerate(tokens)
    ]
    return RequestOutput("", [1, 2, 3], completions, None, timing, 0, None)


def sums(metrics: Metrics) -> dict[str, float]:
    """The sums of all histograms."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {s.name: s.value for family in families for s in family.samples if s.name.endswith("_sum")}


def following(metrics: Metrics, *outputs: RequestOutput) -> AsyncGenerator[RequestOutput, None]:
    """What comes of a stream of these outputs."""

    async def stream() -> AsyncGenerator[RequestOutput, None]:
        for o in outputs:
            yield o

    return metrics.follow(stream())


def sums_after(*outputs: RequestOutput) -> dict[str, float]:
    """The sums of all histograms once a stream of these outputs has been followed."""
    metrics = still_metrics()

    async def follow() -> list[RequestOutput]:
        return [o async for o in following(metrics, *outputs)]

    assert asyncio.run(follow()) == list(outputs)
    return sums(metrics)


def test_the_last_output_is_what_counts():
    sums = sums_after(output(1), output(10))
    assert sums["vllm:request_prompt_tokens_sum"] == 3
    assert sums["vllm:request_generation_tokens_sum"] == 10
    assert sums["vllm:request_queue_time_seconds_sum"] == 0.5
    assert sums["vllm:request_prefill_time_seconds_sum"] == 1.5
    assert sums["vllm:time_to_first_token_seconds_sum"] == 2
    assert sums["vllm:request_decode_time_seconds_sum"] == 9
    assert sums["vllm:e2e_request_latency_seconds_sum"] == 11
    assert sums["vllm:request_inference_time_seconds_sum"] == 10.5


def test_the_first_token_is_measured_when_it_comes():
    metrics = still_metrics()

    async def first() -> None:
        none_yet = output(0, ended=None, timing=Timing(0.5, None, None))
        outputs = following(metrics, none_yet, output(1, ended=None, timing=FIRST_TOKEN))
        await anext(outputs)
        assert not any(sums(metrics).values())
        await anext(outputs)

    asyncio.run(first())
    seen = sums(metrics)
    assert seen["vllm:time_to_first_token_seconds_sum"] == 2
    assert seen["vllm:request_queue_time_seconds_sum"] == 0.5
    assert seen["vllm:request_prefill_time_seconds_sum"] == 1.5
    assert sum(seen.values()) == 4


def test_what_is_aborted_says_nothing_of_how_long_requests_take():
    seen = sums_after(output(1, ended=None, timing=FIRST_TOKEN), output(4, ended="abort"))
    assert seen["vllm:time_to_first_token_seconds_sum"] == 2
    assert sum(seen.values()) == 4


@pytest.mark.parametrize("tokens", [(10,), (10, 4), (2, 10, 10)])
def test_time_per_token_is_that_of_the_longest_completion(tokens):
    """Completions of one prompt grow side by side: all their tokens together would look too fast."""
    sums = sums_after(output(*tokens))
    assert sums["vllm:request_time_per_output_token_seconds_sum"] == 1
    assert sums["vllm:request_generation_tokens_sum"] == sum(tokens)
    assert sums["vllm:request_max_num_generation_tokens_sum"] == 10
    assert sums["vllm:request_params_n_sum"] == len(tokens)


def test_a_completion_that_waits_for_a_slot_is_not_slower_for_it():
    """With more completions than slots the last ones begin when others have ended."""
    sums = sums_after(output(10, 10, timing=Timing(0.5, 2.0, 20.0)))
    assert sums["vllm:request_time_per_output_token_seconds_sum"] == 1
    assert sums["vllm:request_decode_time_seconds_sum"] == 9
    assert sums["vllm:e2e_request_latency_seconds_sum"] == 20


def test_one_token_has_no_time_per_token():
    assert sums_after(output(1))["vllm:request_time_per_output_token_seconds_sum"] == 0


def test_pages_in_the_hosts_memory_and_in_files_are_told():
    families = text_string_to_metric_families(still_metrics().text().decode())
    seen = {
        (s.name, s.labels.get("tier") or s.labels.get("reason")): s.value
        for family in families
        for s in family.samples
        if "host_cache" in s.name or "file_cache" in s.name or "mtp_jax:prefix_cache" in s.name
    }
    assert seen == {
        ("mtp_jax:host_cache_pages", None): 2,
        ("mtp_jax:host_cache_bytes", None): 64,
        ("mtp_jax:host_cache_stored_pages_total", None): 3,
        ("mtp_jax:host_cache_restored_pages_total", None): 1,
        ("mtp_jax:host_cache_dropped_pages_total", "damaged"): 1,
        ("mtp_jax:file_cache_bytes", None): 96,
        ("mtp_jax:file_cache_read_bytes_total", None): 32,
        ("mtp_jax:file_cache_hits_total", None): 5,
        ("mtp_jax:file_cache_misses_total", None): 6,
        ("mtp_jax:file_cache_written_pages_total", None): 7,
        ("mtp_jax:file_cache_dropped_pages_total", "foreign"): 2,
        ("mtp_jax:prefix_cache_hits_total", "device"): 3,
        ("mtp_jax:prefix_cache_hits_total", "host"): 1,
        ("mtp_jax:prefix_cache_hits_total", "file"): 4,
    }


def test_speculation_is_found_by_the_names_of_older_queries():
    text = still_metrics().text().decode()
    assert 'vllm:spec_decode_draft_acceptance_rate{model_name="tiny"} 0.6666' in text  # 4 of 6
    for name, value in (("num_drafts", 3), ("num_draft_tokens", 6), ("num_accepted_tokens", 4)):
        for ending in ("", "_total"):
            assert f'vllm:spec_decode_{name}{ending}{{model_name="tiny"}} {value:.1f}\n' in text


def test_a_router_reads_the_size_of_the_cache():
    families = text_string_to_metric_families(still_metrics().text().decode())
    (sample,) = (s for f in families for s in f.samples if s.name == "vllm:cache_config_info")
    assert sample.value == 1
    assert sample.labels["num_gpu_blocks"] == "8"
    assert {"block_size", "cache_dtype", "enable_prefix_caching"} < {*sample.labels}


def test_hand_overs_are_told_where_there_are_any():
    assert b"handover" not in still_metrics().text()
    told: Any = SimpleNamespace(server=None, peers=SimpleNamespace(received=5, failures={"late": 2}))
    text = still_metrics(counters=[lambda: Handover.counters(told)]).text().decode()
    assert 'mtp_jax:handover_pages_total{direction="received",model_name="tiny"} 5.0' in text
    assert 'mtp_jax:handover_failures_total{model_name="tiny",reason="late"} 2.0' in text


def test_no_series_says_when_it_was_created(client):
    assert "_created" not in client.get("/metrics").text
