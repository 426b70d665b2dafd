"""/generate beyond one prompt: batches, names, scores without an answer, ends in SGLang's shapes."""

import base64
import json
from typing import Any

import httpx2
import numpy as np
import pytest

from mtp_jax import SamplingParams
from mtp_jax.model.family import config_of
from serve.bodies.fields import MAX_PROMPTS
from tests import golden
from tests.tiny_tokenizer import EOS

CFG = config_of(golden.raw_config("rigged"))

IDS = [[68, 69, 70], [71, 72]]
SAMPLING = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}


def generate(client: httpx2.Client, status: int = 200, **body: Any) -> Any:
    response = client.post("/generate", json={"sampling_params": SAMPLING, **body})
    assert response.status_code == status, response.text
    return response.json()


def refusal(client: httpx2.Client, **body: Any) -> str:
    return generate(client, 400, **body)["error"]["message"]


def chunks(client: httpx2.Client, **body: Any) -> list[dict[str, Any]]:
    text = client.post("/generate", json={"sampling_params": SAMPLING, "stream": True, **body}).text
    *lines, done = text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_batch_is_a_list_of_answers(client):
    alone = [generate(client, input_ids=ids) for ids in IDS]
    batches: list[dict[str, Any]] = [{"input_ids": IDS}, {"text": ["abc", "de"]}]
    for batch in batches:
        answers = generate(client, **batch)
        assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in alone]
        assert [a["index"] for a in answers] == [0, 1]
    (only,) = generate(client, text=["abc"])
    assert only["text"] == alone[0]["text"]


def test_a_streamed_batch_tells_its_answers_apart(client):
    found = chunks(client, input_ids=IDS, rid="streamed")
    last = {c["index"]: c for c in found}
    assert {i: c["meta_info"]["id"] for i, c in last.items()} == {0: "streamed_0", 1: "streamed_1"}
    assert [last[i]["output_ids"] for i in (0, 1)] == [
        generate(client, input_ids=i)["output_ids"] for i in IDS
    ]


def test_completions_of_a_batch_are_numbered_throughout(client):
    several = {**SAMPLING, "n": 2}
    answers = generate(client, input_ids=IDS, sampling_params=several)
    assert [a["index"] for a in answers] == [0, 1, 2, 3]
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [3, 3, 2, 2]
    mixed = generate(client, input_ids=IDS, sampling_params=[several, SAMPLING])
    assert [a["index"] for a in mixed] == [0, 1, 2]


def test_fields_of_a_batch_may_be_lists(client):
    answers = generate(
        client,
        input_ids=IDS,
        sampling_params=[SAMPLING, {**SAMPLING, "max_new_tokens": 2}],
        return_logprob=[True, False],
        logprob_start_len=[0, -1],
        top_logprobs_num=[2, 0],
    )
    first, second = (a["meta_info"] for a in answers)
    assert (first["completion_tokens"], second["completion_tokens"]) == (5, 2)
    assert len(first["input_token_logprobs"]) == len(first["input_top_logprobs"]) == 3
    assert "output_token_logprobs" not in second


def test_unknown_fields_in_a_list_are_named(client):
    body = {"input_ids": IDS, "sampling_params": [SAMPLING, {**SAMPLING, "tempre": 1}]}
    answer = client.post("/generate", json=body)
    assert answer.headers["warning"] == '299 mtp-jax "ignored: sampling_params.1.tempre"'


def experts(answer: dict[str, Any]) -> np.ndarray:
    """As SGLang's clients read them, of the two experts in each MoE layer of the model."""
    flat = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32)
    return flat.reshape(-1, CFG.moe_layers, CFG.num_experts_per_tok)


def test_experts_of_prompt_and_output(client):
    """Of all tokens but the last; one prompt of a batch asks; a stream ends with them."""
    first, second = generate(client, input_ids=IDS, return_routed_experts=[True, False])
    found = experts(first)
    assert len(found) == 3 + 5 - 1
    assert 0 <= found.min() < found.max() < CFG.n_routed_experts
    assert "routed_experts" not in second["meta_info"]
    asking = {"input_ids": IDS[0], "return_routed_experts": True}
    np.testing.assert_array_equal(experts(generate(client, routed_experts_start_len=3, **asking)), found[3:])
    past = client.post("/generate", json={**asking, "routed_experts_start_len": 4})
    assert past.status_code == 400
    assert past.json()["error"]["message"].startswith("routed_experts_start_len = 4; expected 0 to 3")
    scored = generate(client, sampling_params={"max_new_tokens": 0}, **asking)
    np.testing.assert_array_equal(experts(scored), found[:2])
    *before, last = chunks(client, **asking)
    assert not any("routed_experts" in c["meta_info"] for c in before)
    np.testing.assert_array_equal(experts(last), found)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": []}, "at least 1"),
        ({"input_ids": [[]]}, "at least 1"),
        ({"input_ids": [[1], 2]}, "valid list"),
        ({"input_ids": [1, [2]]}, "valid integer"),
        ({"input_ids": [[1], ["a"]]}, "valid integer"),
        ({"input_ids": [[1]] * (MAX_PROMPTS + 1)}, f"at most {MAX_PROMPTS}"),
        ({"text": []}, "at least 1"),
        ({"text": ["a", 1]}, "valid string"),
        ({"text": ["a"], "input_ids": [[1]]}, "exactly one"),
        ({"input_ids": IDS, "rid": ["a"]}, "rid: a list of 1 for 2 prompts; give one value, or 2"),
        ({"input_ids": IDS[0], "rid": ["a"]}, "rid: a list of 1 for one prompt; give one value"),
        ({"input_ids": IDS, "rid": ["a", "a"]}, "two prompts have the same"),
        ({"input_ids": IDS, "sampling_params": [SAMPLING] * 3}, "sampling_params: a list of 3 for 2 prompts"),
        ({"text": "a", "return_logprob": [True]}, "return_logprob: a list of 1 for one prompt"),
        ({"text": "a", "rid": 7}, "valid string"),
        ({"text": "a", "rid": "a" * 257}, "at most 256"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "greater than or equal to 0"),
        ({"input_ids": [[5]] * 300}, "300 prompts of n = 1, 300 requests in all; the queue takes 256"),
    ],
)
def test_other_batches_are_refused(client, body, message):
    assert message in refusal(client, **body)


def test_a_rid_names_the_answer(client):
    assert generate(client, text="abc", rid="mine")["meta_info"]["id"] == "mine"
    assert generate(client, text="abc", rid="mine")["meta_info"]["id"] == "mine"  # free again
    named = generate(client, input_ids=IDS, rid=["a", "b"])
    assert [a["meta_info"]["id"] for a in named] == ["a", "b"]
    counted = generate(client, input_ids=IDS, rid="mine")
    assert [a["meta_info"]["id"] for a in counted] == ["mine_0", "mine_1"]
    unnamed = generate(client, input_ids=IDS)
    assert len({a["meta_info"]["id"] for a in unnamed}) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_no_new_tokens_are_the_scores_of_the_prompt(client, fresh, stream):
    scores = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    body = {"text": "abcd", "sampling_params": {"max_new_tokens": 0, "temperature": 0}, **scores}
    answer = chunks(client, **body)[-1] if stream else generate(client, **body)
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"], meta["completion_tokens"]) == ("", [], 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["output_token_logprobs"] == []
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    expected = fresh.generate("abcd", params)[0]
    assert [e[:2] for e in meta["input_token_logprobs"]] == [
        [s and pytest.approx(s[t].logprob), t]
        for t, s in zip(expected.prompt_token_ids, expected.prompt_logprobs, strict=True)
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_says_what_it_matched(client, stream):
    whole = generate(client, text="abc")
    token, string = whole["output_ids"][2], whole["text"][1:3]
    for stop, matched in (({"stop": string}, string), ({"stop_token_ids": [token]}, token)):
        body = {"text": "abc", "sampling_params": {**SAMPLING, **stop}}
        answer = chunks(client, **body)[-1] if stream else generate(client, **body)
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}


def test_the_models_own_end_is_matched_too(client):
    eos = client.post("/tokenize", json={"prompt": EOS}).json()["tokens"][-1]
    ended = {"temperature": 0, "max_new_tokens": 5, "logit_bias": {str(eos): 100}}
    reason = generate(client, text="abc", sampling_params=ended)["meta_info"]["finish_reason"]
    assert reason == {"type": "stop", "matched": eos}


def test_a_deadline_is_an_abort_with_the_tokens_so_far(client, compiled, monkeypatch):
    """A prompt of a batch whose time is over has a type of end that trainers know."""
    make, times = compiled.engine.make_requests, iter([1e-6, None])
    monkeypatch.setattr(
        compiled.engine, "make_requests", lambda *a, **o: make(*a, **{**o, "timeout": next(times)})
    )
    late, whole = generate(client, input_ids=IDS)
    assert late["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": "the request's time was over",
    }
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
