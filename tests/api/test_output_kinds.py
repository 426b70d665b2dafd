"""What an iterator of outputs gives: all so far, what is new, or the end alone."""

import asyncio
from dataclasses import replace
from functools import reduce
from operator import add

import pytest

from mtp_jax import LLM, AsyncLLM, RequestError, RequestOutput, SamplingParams
from mtp_jax.text.tokenizer import StreamDecoder
from tests import golden, tiny_tokenizer
from tests.models import RATES

PROMPT = golden.expected("rigged")["input_ids"].tolist()
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, n=2, logprobs=1, prompt_logprobs=1)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny_tokenizer.model(tmp_path_factory.mktemp("kinds") / "model")
    return LLM(folder, max_num_seqs=2, max_model_len=96, page_size=16, prefill_chunk=16, simulate=RATES)


def without_times(output: RequestOutput) -> RequestOutput:
    return replace(output, timing=None)


def test_deltas_are_parts_of_the_whole(llm):
    whole = llm.generate(PROMPT, PARAMS)[0]
    deltas = list(llm.stream(PROMPT, replace(PARAMS, output_kind="delta")))
    assert len(deltas) > 3
    assert all(0 < sum(len(c.token_ids) for c in output.outputs) <= 8 for output in deltas)
    assert [len(o.prompt_logprobs or ()) for o in deltas] == [len(PROMPT)] + [0] * (len(deltas) - 1)
    assert without_times(reduce(add, deltas)) == without_times(whole)
    assert whole.speculation.acceptance_length > 1.5
    total = 0
    for output in deltas:
        total += len(output.outputs[0].token_ids)
        assert output.outputs[0].num_tokens == total
    # Every step ends with a token of the model itself, the first delta is a prefill's.
    first, *steps = [output.outputs[0].drafted for output in deltas if output.outputs[0].token_ids]
    assert first == [False]
    assert all(drafted[:-1] == [True] * (len(drafted) - 1) for drafted in steps)


def test_who_reads_late_misses_no_delta(llm):
    async def run() -> tuple[list[RequestOutput], RequestOutput]:
        async with AsyncLLM(llm) as allm:
            whole = [output async for output in allm.generate(PROMPT, PARAMS)][-1]
            stream = await allm.submit(PROMPT, replace(PARAMS, output_kind="delta"))
            async with asyncio.timeout(60):
                while allm.live:
                    await asyncio.sleep(0.01)
            return [output async for output in stream], whole

    (late,), whole = asyncio.run(run())
    assert without_times(late) == without_times(whole)


def test_the_end_alone(llm):
    last = replace(PARAMS, output_kind="final_only")

    async def run() -> list[RequestOutput]:
        async with AsyncLLM(llm) as allm:
            return [output async for output in allm.generate(PROMPT, last)]

    whole = llm.generate(PROMPT, PARAMS)[0]
    (from_async,), (from_stream,) = asyncio.run(run()), llm.stream(PROMPT, last)
    assert without_times(from_async) == without_times(from_stream) == without_times(whole)
    times = from_async.timing
    assert times.finished
    assert times.first_token
    assert times.finished > times.first_token > 0


@pytest.mark.parametrize("kind", ["delta", "final_only"])
def test_generate_gives_the_whole_whatever_the_kind(llm, kind):
    whole, other = (llm.generate(PROMPT, p)[0] for p in (PARAMS, replace(PARAMS, output_kind=kind)))
    assert without_times(other) == without_times(whole)


@pytest.mark.parametrize("kind", ["whole", None, 2])
def test_kinds_that_there_are(kind):
    with pytest.raises(RequestError, match="expected one of 'cumulative', 'delta', 'final_only'"):
        SamplingParams(output_kind=kind)


def test_a_stop_string_in_the_last_token_counts_as_a_stop(llm):
    whole = llm.generate(PROMPT, replace(PARAMS, n=1))[0].outputs[0]
    ends_at = next(
        n for n in range(2, 24) if whole.token_texts[n - 1] not in "".join(whole.token_texts[: n - 1])
    )
    stop = replace(PARAMS, n=1, max_tokens=ends_at, stop=whole.token_texts[ends_at - 1])
    before = llm.engine.stats().finished
    (output,) = llm.generate(PROMPT, stop)
    after = llm.engine.stats().finished
    assert (output.outputs[0].finish_reason, output.outputs[0].num_tokens) == ("stop", ends_at)
    assert after["stop"] == before.get("stop", 0) + 1
    assert after["length"] == before["length"]


def test_what_stopped_it(llm):
    """A stop string or a stop token inside an accepted window, however the output is given."""
    whole = llm.generate(PROMPT, replace(PARAMS, n=1))[0].outputs[0]
    assert (whole.finish_reason, whole.stop_reason) == ("length", None)
    once = [i for i in range(2, 20) if whole.drafted[i] and whole.text.count(whole.token_texts[i]) == 1]
    assert once, "no drafted token whose text comes once: choose another prompt"
    for at in once:
        string, token = whole.token_texts[at], whole.token_ids[at]
        for more in ({"stop": ["not in it", string]}, {"stop_token_ids": [token]}):
            params = replace(PARAMS, n=1, **more)
            *running, last = [o.outputs[0] for o in llm.stream(PROMPT, params)]
            want = string if "stop" in more else token
            assert (last.finish_reason, last.stop_reason, last.num_tokens) == ("stop", want, at + 1)
            assert all(o.stop_reason is None for o in running)
            deltas = [o.outputs[0] for o in llm.stream(PROMPT, replace(params, output_kind="delta"))]
            assert reduce(add, deltas).stop_reason == want


@pytest.mark.parametrize(
    ("ignore_eos", "stops", "reason"), [(False, [], None), (False, [1], None), (True, [1], 1)]
)
def test_the_end_of_a_sequence_has_no_stop_reason(llm, ignore_eos, stops, reason):
    """Unless the end-of-sequence token is nothing but a stop token."""
    (eos,) = llm.engine.cfg.eos_token_ids
    assert eos == 1
    forced = replace(PARAMS, n=1, ignore_eos=ignore_eos, stop_token_ids=stops, logit_bias={eos: 100.0})
    ended = llm.generate(PROMPT, replace(forced, min_tokens=6))[0].outputs[0]
    assert (ended.num_tokens, ended.finish_reason, ended.stop_reason) == (7, "stop", reason)


def test_a_stop_string_in_what_is_held_back_until_the_end_is_a_stop(llm, monkeypatch):
    """As the rest of a character that never comes is."""
    monkeypatch.setattr(StreamDecoder, "flush", lambda _: "\ufffd\ufffd")
    (output,) = llm.generate(PROMPT, replace(PARAMS, n=1, max_tokens=3, stop="\ufffd\ufffd"))
    ended = output.outputs[0]
    assert (ended.finish_reason, ended.stop_reason, ended.num_tokens) == ("stop", "\ufffd\ufffd", 3)
    assert "\ufffd" not in ended.text
