"""What the latency metrics of a request are taken from."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mtp_jax.engine.request import Speculation
from mtp_jax.outputs import CompletionOutput, RequestOutput, Timing
from tests.serve.test_grafana import still_metrics


def output(*tokens: int) -> RequestOutput:
    """Of completions with so many tokens: half a second to a slot, 2 to the first token, 11 to the end."""
    completions = [
        CompletionOutput(i, "", [], n, "length", None, [], [], Speculation()) for i, n in enumerate(tokens)
    ]
    return RequestOutput("", [1, 2, 3], completions, None, Timing(0.5, 2.0, 11.0), 0)


def sums_after(*outputs: RequestOutput) -> dict[str, float]:
    """The sums of all histograms once a stream of these outputs has been followed."""
    metrics = still_metrics()

    async def stream() -> AsyncGenerator[RequestOutput, None]:
        for o in outputs:
            yield o

    async def follow() -> list[RequestOutput]:
        return [o async for o in metrics.follow(stream())]  # type: ignore[arg-type]

    assert asyncio.run(follow()) == list(outputs)
    families = text_string_to_metric_families(metrics.text().decode())
    return {s.name: s.value for family in families for s in family.samples if s.name.endswith("_sum")}


def test_the_last_output_is_what_counts():
    sums = sums_after(output(1), output(10))
    assert sums["vllm:request_prompt_tokens_sum"] == 3
    assert sums["vllm:request_generation_tokens_sum"] == 10
    assert sums["vllm:request_queue_time_seconds_sum"] == 0.5
    assert sums["vllm:request_prefill_time_seconds_sum"] == 1.5
    assert sums["vllm:time_to_first_token_seconds_sum"] == 2
    assert sums["vllm:request_decode_time_seconds_sum"] == 9
    assert sums["vllm:e2e_request_latency_seconds_sum"] == 11


@pytest.mark.parametrize("tokens", [(10,), (10, 4), (2, 10, 10)])
def test_time_per_token_is_that_of_the_longest_completion(tokens):
    """Completions of one prompt grow side by side: all their tokens together would look too fast."""
    sums = sums_after(output(*tokens))
    assert sums["vllm:request_time_per_output_token_seconds_sum"] == 1
    assert sums["vllm:request_generation_tokens_sum"] == sum(tokens)


def test_one_token_has_no_time_per_token():
    assert sums_after(output(1))["vllm:request_time_per_output_token_seconds_sum"] == 0
