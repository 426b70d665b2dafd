"""/v1/completions: what comes back is what LLM.generate gives, in OpenAI's shapes."""

import json
import re
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from mtp_jax import LLM, AsyncLLM, SamplingParams
from mtp_jax.decode.keys import MAX_DRAFTS
from serve.answers import calls
from serve.bodies.schema import CompletionBody
from tests.serve.helpers import GREEDY, events, post
from tests.soak import requests as soak_requests


def texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    joined: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    return joined


def test_greedy_equals_the_engine(client, fresh: LLM):
    expected = fresh.generate("abc", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))[0]
    answer = post(client, **GREEDY, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["text"] == expected.outputs[0].text
    assert choice["token_ids"] == expected.outputs[0].token_ids
    assert expected.speculation.acceptance_length > 1.5
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "tiny"
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["usage"]["total_tokens"] == 27


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_depth_changes_nothing_but_speed(client, depth):
    asked = {"enabled": depth > 0, "max_tokens": depth, "metrics": "detailed"}
    answer = post(client, **GREEDY, speculative=asked)
    assert answer["choices"][0]["text"] == post(client, **GREEDY)["choices"][0]["text"]
    metrics = answer["metrics"]["speculative_decoding"]
    assert set(metrics["per_step_drafted"]) == ({depth} if depth else set())
    if depth:
        steps, accepted = metrics["num_spec_steps"], metrics["num_accepted_draft_tokens"]
        assert metrics["mean_acceptance_length"] == 1 + accepted / steps > 1.3
        assert sum(metrics["acceptance_histogram"]) == steps == len(metrics["per_step_accepted"])
        assert metrics["acceptance_histogram_by_draft_length"] == {
            str(depth): metrics["acceptance_histogram"][: depth + 1]
        }
        assert metrics["num_spec_tokens"] == 3


def test_metrics_are_opt_in_and_of_one_completion(client):
    assert "metrics" not in post(client)
    assert post(client, n=2, speculative={"metrics": "summary"})["metrics"] == {"speculative_decoding": None}


def test_streamed_text_equals_the_whole(client):
    whole = post(client, **GREEDY)["choices"][0]["text"]
    chunks = events(client, **GREEDY)
    assert texts(chunks) == {0: whole}
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({c["id"] for c in chunks}) == 1


def test_usage_comes_last_when_asked_for(client):
    *chunks, last = events(client, **GREEDY, stream_options={"include_usage": True})
    assert all(c["usage"] is None for c in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 24
    assert all("usage" not in c for c in events(client, **GREEDY))
    so_far = events(client, **GREEDY, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [c["usage"]["completion_tokens"] for c in so_far]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 24


def test_several_prompts_and_completions(client, fresh: LLM):
    prompts, params = ["abc", "wxyz"], SamplingParams(n=2, seed=7, max_tokens=9)
    expected = [o.text for out in fresh.generate(prompts, params) for o in out.outputs]
    body = {"prompt": prompts, "n": 2, "seed": 7, "max_tokens": 9}
    answer = post(client, **body)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in answer["choices"]] == expected
    assert texts(events(client, **body)) == dict(enumerate(expected))
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == sum(
        len(o.token_ids) for out in fresh.generate(prompts, params) for o in out.outputs
    )


def test_a_stop_string_is_held_back_across_chunks(client):
    text = post(client, **GREEDY)["choices"][0]["text"]
    stop = text[9:13]
    expected = text[: text.index(stop)]
    answer = post(client, **GREEDY, stop=[stop, "not in it"])
    assert answer["choices"][0]["text"] == expected
    assert answer["choices"][0]["finish_reason"] == "stop"
    chunks = events(client, **GREEDY, stop=stop)
    assert texts(chunks) == {0: expected}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    kept = post(client, **GREEDY, stop=stop, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == expected + stop


def test_a_stop_token_ends_the_output(client):
    ids = post(client, **GREEDY, return_token_ids=True)["choices"][0]["token_ids"]
    answer = post(client, **GREEDY, stop_token_ids=[ids[7]], return_token_ids=True)["choices"][0]
    assert answer["token_ids"] == ids[: ids.index(ids[7]) + 1]
    assert answer["finish_reason"] == "stop"
    longer = post(client, **GREEDY, stop_token_ids=[ids[7]], min_tokens=20, return_token_ids=True)["choices"][
        0
    ]
    assert len(longer["token_ids"]) >= 20


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_with_echo_cover_the_whole_text(client, stream):
    body = {**GREEDY, "logprobs": 2, "echo": True, "max_tokens": 8}
    if stream:
        choices = [c["choices"][0] for c in events(client, **body)]
        choice: dict[str, Any] = {"text": "".join(c["text"] for c in choices)}
        parts = [c["logprobs"] for c in choices]
        choice["logprobs"] = {key: [value for p in parts for value in p[key]] for key in parts[0]}
    else:
        (choice,) = post(client, **body)["choices"]
    scores = choice["logprobs"]
    assert "".join(scores["tokens"]) == choice["text"]
    assert choice["text"].startswith("abc")
    assert scores["token_logprobs"][0] is None
    assert all(p <= 0 for p in scores["token_logprobs"][1:])
    assert len(scores["token_logprobs"]) == 3 + 8
    assert [len(t) for t in scores["top_logprobs"][3:]] == [2] * 8
    ends = [*scores["text_offset"][1:], len(choice["text"])]
    assert [choice["text"][a:b] for a, b in zip(scores["text_offset"], ends, strict=True)] == scores["tokens"]
    for token, score, top in list(
        zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True)
    )[1:]:
        assert top[token] == score


def test_ids_are_scored_without_a_tokenizer(client, server, monkeypatch):
    body = {"prompt": [5, 6, 7], "echo": True, "logprobs": 0, "max_tokens": 0}
    (known,) = post(client, **body)["choices"]
    monkeypatch.setattr(server.allm, "about", replace(server.allm.about, tokenizer=None))
    (choice,) = post(client, **body)["choices"]
    assert choice["text"] == ""
    assert len(choice["logprobs"]["token_logprobs"]) == 3
    assert choice["logprobs"]["token_logprobs"] == known["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("stream", [False, True])
def test_every_completion_of_an_echoed_prompt_has_its_logprobs(client, stream):
    """The prompt is longer than a chunk, so that completions begin in different steps."""
    body = {**GREEDY, "prompt": "a longer prompt " * 3, "n": 3, "echo": True, "logprobs": 0, "max_tokens": 4}
    answers = events(client, **body) if stream else [post(client, **body)]
    found: dict[int, list[float]] = {}
    for choice in (c for answer in answers for c in answer["choices"]):
        found.setdefault(choice["index"], []).extend(choice["logprobs"]["token_logprobs"])
    assert len(found[0]) == 48 + 4
    assert None not in found[0][1:]
    assert found[0] == found[1] == found[2]


def joined_offsets(chunks: list[dict[str, Any]]) -> tuple[list[int], list[str]]:
    """Offsets and tokens of all chunks."""
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    return [o for p in parts for o in p["text_offset"]], [t for p in parts for t in p["tokens"]]


def test_text_offsets_count_what_a_stop_string_holds_back(client):
    """Chunks end in text that may yet become a stop string; the tokens that follow begin after it."""
    letters = set(post(client, **GREEDY)["choices"][0]["text"])
    chunks = events(client, **GREEDY, logprobs=0, stop=[c + "~~" for c in letters][:32])
    offsets, tokens = joined_offsets(chunks)
    assert len(offsets) == 24 > len(chunks)
    assert offsets == [*accumulate(map(len, tokens[:-1]), initial=0)]


@pytest.mark.parametrize("skip", [False, True])
def test_text_offsets_of_special_tokens(client, skip):
    """Those that the text shows take room, in the prompt and after it; the others take none."""
    body = {"prompt": "a<bos>b", "logit_bias": {"0": 100}, "skip_special_tokens": skip, "max_tokens": 3}
    chunks = events(client, **GREEDY, **body, logprobs=0, echo=True)
    text, (offsets, tokens) = texts(chunks)[0], joined_offsets(chunks)
    assert tokens[-6:] == ["a", "<bos>", "b", "<bos>", "<bos>", "<bos>"]
    assert text == ("a<bos>b" if skip else "a<bos>b<bos><bos><bos>")
    assert offsets[-6:] == ([0, 1, 6, 7, 7, 7] if skip else [0, 1, 6, 7, 12, 17])


def test_origins_tell_drafted_from_corrected_tokens(client):
    body = {**GREEDY, "return_token_origins": True, "speculative": {"metrics": "detailed"}}
    answer = post(client, **body)
    (choice,) = answer["choices"]
    origins = choice["token_origins"]
    assert "".join(t["text"] for t in origins) == choice["text"]
    steps = answer["metrics"]["speculative_decoding"]["per_step_accepted"]
    expected = [False, *(flag for a in steps for flag in [True] * a + [False])]
    assert [t["drafted"] for t in origins] == expected[: len(origins)]
    assert 0 < sum(t["drafted"] for t in origins) < len(origins)
    streamed = [t for c in events(client, **body) for t in c["choices"][0]["token_origins"]]
    assert streamed == origins


def test_defaults_are_openais(client):
    answer = client.post("/v1/completions", json={"prompt": "abc", "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 16
    long = client.post(
        "/v1/completions", json={"prompt": [5, 6, 7], "ignore_eos": True, "max_tokens": 10**6}
    ).json()
    assert long["usage"]["total_tokens"] == 252


def test_every_option_reaches_the_engine():
    """Those with the engine's own names, and those that are called otherwise."""
    same = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "min_tokens": 2,
        "stop": ["x"],
        "stop_token_ids": [3],
        "allowed_token_ids": [4, 5],
        "bad_words": ["b"],
        "max_thinking_tokens": 7,
        "ignore_eos": True,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    mapped = {"seed": -1, "logit_bias": {"5": 1.5}, "speculative": {"max_tokens": 2, "suffix": False}}
    body = CompletionBody.model_validate({"prompt": "a", **same, **mapped})
    expected = SamplingParams(
        **same,
        max_tokens=9,
        logprobs=1,
        prompt_logprobs=2,
        seed=2**32 - 1,
        logit_bias={5: 1.5},
        num_speculative_tokens=2,
        suffix_drafts=False,
        output_kind="final_only",
    )
    assert body.params(9, None, 1, 2, defaults={}) == expected


def test_logit_bias_and_penalties_change_the_text(client):
    ids = post(client, **GREEDY, return_token_ids=True)["choices"][0]["token_ids"]
    biased = post(client, **GREEDY, logit_bias={str(ids[0]): -100}, return_token_ids=True)
    assert biased["choices"][0]["token_ids"][0] != ids[0]


@pytest.mark.parametrize("body", soak_requests.WRONG)
def test_what_a_soak_sends_as_invalid_is_refused(client, body):
    answer = client.post("/v1/completions", content=body("tiny"))
    assert 400 <= answer.status_code < 500


def test_unknown_fields_are_warned_of(client):
    body = {"prompt": "abc", "max_tokens": 2, "suer": "me", "nothing": None, "speculative": {"depth": 3}}
    response = client.post("/v1/completions", json=body)
    assert response.headers["warning"] == '299 mtp-jax "ignored: suer, speculative.depth"'
    assert "warning" not in client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).headers
    many = {f"x{i}": 1 for i in range(100_000)}
    told = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **many}).headers["warning"]
    assert told == '299 mtp-jax "ignored: ' + ", ".join(f"x{i}" for i in range(10)) + '"'


def test_unknown_fields_are_refused_when_strict(server):
    strict = server.variant(strict=True)
    answer = strict.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2, "typo": 1})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "unknown field typo; leave it out",
        "type": "invalid_request_error",
        "param": "typo",
        "code": "unknown_field",
    }
    assert strict.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2}).status_code == 200


def test_characters_that_end_lines_elsewhere_do_not_end_events(client):
    prompt = "a\u2028b\u2029c\x85d"
    with client.stream(
        "POST", "/v1/completions", json={"prompt": prompt, "echo": True, "stream": True, "max_tokens": 1}
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert texts(chunks)[0].startswith(prompt)


@pytest.mark.parametrize("stream", [True, False])
def test_long_lists_of_scores_are_made_beside_the_event_loop(server, stream, monkeypatch):
    """Those of an echoed prompt come at once in a stream, too; the rest of it in small pieces."""
    beside, off_loop = [], AsyncLLM.off_loop
    monkeypatch.setattr(calls, "_MANY", 20)

    def counted(self: AsyncLLM, function: Any) -> Any:
        beside.append(function)
        return off_loop(self, function)

    monkeypatch.setattr(AsyncLLM, "off_loop", counted)
    for scores, long in (({}, False), ({"logprobs": 1}, not stream), ({"logprobs": 1, "echo": True}, True)):
        beside.clear()
        body = {**GREEDY, "prompt": "abcdefgh" * 3, "max_tokens": 12, "stream": stream, **scores}
        answer = server.variant().post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert len(beside) == long


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"temperature": 3}, "temperature", "less than or equal to 2; got 3"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"best_of": 2}, "best_of", "value of n"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"guided_choice": ["a", "b"]}, "guided_choice", "use response_format or structured_outputs"),
        ({"use_beam_search": True}, "use_beam_search", "not supported here; leave it out"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "greater than or equal to 1"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "not in a stream"),
        ({"prompt_logprobs": 0, "echo": True}, "prompt_logprobs", "not with echo"),
        ({"prompt_logprobs": 20, "n": 128, "prompt": "a" * 1561}, "prompt_logprobs", "at most 4194304"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        (
            {"echo": True, "logprobs": 20, "n": 128, "prompt": "a" * 1561},
            "logprobs",
            "are 4195968; at most 4194304",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream = true"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "match pattern '^(0|[1-9][0-9]{0,9})$'; got \"a\""),
        ({"logit_bias": {"1_0": 1}}, "logit_bias", "match pattern"),
        ({"logit_bias": {"05": 1}}, "logit_bias", "match pattern"),
        (
            {"logit_bias": {str(i): 1 for i in range(2000)}},
            "logit_bias",
            "at most 1024 tokens are allowed, got 2000",
        ),
        ({"logit_bias": []}, "logit_bias", "logit_bias: Input should be an object; got []"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"logit_bias": {"100000": 1}}, None, "logit_bias names token 100000"),
        ({"prompt": [7, 1000]}, None, "token 1000"),
        ({"min_tokens": 30}, None, "above max_tokens"),
        ({"speculative": {"suffix": True}}, None, "built without them"),
        ({"speculative": {"max_tokens": 9}}, "speculative", "max_tokens = 9; this server drafts at most 3"),
        ({"speculative": {"max_tokens": 32}}, "speculative", f"less than or equal to {MAX_DRAFTS}; got 32"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "response_format: the type json_schema needs json_schema",
        ),
        (
            {"structured_outputs": {"json": []}},
            "structured_outputs",
            "structured_outputs.json: Input should be",
        ),
        (
            {"structured_outputs": {"lark": "start: 'a'"}},
            "structured_outputs",
            "structured_outputs: got lark; give exactly one of json, regex, choice, grammar, structural_tag",
        ),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs",
            "structured_outputs: got json, regex; give exactly one",
        ),
        (
            {"prompt": 5},
            "prompt",
            "prompt: Input should be a string, a list of strings, a list of token ids or a list of such "
            "lists; got 5",
        ),
        ({"stop": 5}, "stop", "stop: Input should be a string or a list of strings; got 5"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            None,
            "not both",
        ),
    ],
)
def test_wrong_options_say_what_to_change(client, body, param, says):
    error = post(client, 400, **body)["error"]
    assert says in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_another_model_does_not_exist(client):
    error = post(client, 404, model="other")["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert post(client, model="tiny")["choices"]


def test_structured_output_keeps_speculation(client):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    body = {"temperature": 0, "max_tokens": 64, "response_format": wanted}
    answer = post(client, **body, speculative={"metrics": "summary"})
    assert json.loads(answer["choices"][0]["text"])["a"] in (1, 2)
    plain = post(client, **body, speculative={"enabled": False})
    assert plain["choices"][0]["text"] == answer["choices"][0]["text"]
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    tags = {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "[ab]{2}"}, "end": ">"}
    kinds = {
        "[ab]{3}": {"regex": "[ab]{3}"},
        "yes|no": {"choice": ["yes", "no"]},
        "(a|b)c": {"grammar": 'root ::= ("a" | "b") "c"'},
        "x[0-9]": {"grammar": 'start: "x" /[0-9]/'},
        "<[ab]{2}>": {"structural_tag": json.dumps({"type": "structural_tag", "format": tags})},
    }
    for pattern, kind in kinds.items():
        text = post(client, temperature=0, structured_outputs=kind)["choices"][0]["text"]
        assert re.fullmatch(pattern, text)
        off = post(client, temperature=0, structured_outputs=kind, speculative={"enabled": False})
        assert off["choices"][0]["text"] == text
    form = {"type": "structural_tag", "format": tags}
    assert re.fullmatch("<[ab]{2}>", post(client, response_format=form)["choices"][0]["text"])


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        ({"grammar": "root := 'a'"}, "the grammar is not valid EBNF: Expected ::="),
        ({"grammar": "start: missing"}, "the structured output cannot be compiled"),
        ({"structural_tag": "{"}, "structural_tag is not JSON"),
        ({"structural_tag": {"format": {"type": "x"}}}, "structural_tag: a format of the type 'x'"),
    ],
)
def test_a_wrong_grammar_is_refused(client, grammar, told):
    assert told in post(client, 400, structured_outputs=grammar)["error"]["message"]
