"""/generate, /server_info, /tokenize, /v1/models and the rest."""

import inspect
import json
import logging
import re
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mtp_jax import SamplingParams
from serve.base.state import Server
from serve.bodies.fields import Body
from serve.bodies.reading import read
from serve.routes.route import Route, Routes
from serve.routes.table import ROUTES
from serve.watch.access_log import LOGGER
from tests.serve.conftest import Running
from tests.tiny_tokenizer import EOS


def test_generate_in_sglangs_shape(client, fresh):
    expected = fresh.generate("abc", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[
        0
    ].outputs[0]
    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    body = {
        "text": "abc",
        "sampling_params": sampling,
        "lora_path": None,
        "return_logprob": False,
        "logprob_start_len": -1,
    }
    answer = client.post("/generate", json=body).json()
    assert answer["text"] == expected.text
    assert answer["output_ids"] == expected.token_ids
    meta = answer["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 20)
    assert meta["spec_accept_length"] > 1.5
    assert meta["finish_reason"] == {"type": "length", "length": 20}
    lines = client.post("/generate", json={**body, "stream": True}).text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    texts = [c["text"] for c in chunks]
    assert texts[-1] == expected.text
    assert all(b.startswith(a) for a, b in pairwise(texts))
    by_ids = client.post("/generate", json={"input_ids": [68, 69, 70], "sampling_params": sampling}).json()
    assert by_ids["output_ids"] == expected.token_ids


@pytest.mark.parametrize("stream", [False, True])
def test_generate_scores_tokens_as_sglang_does(client, fresh, stream):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    expected = fresh.generate("abcd", params)[0]
    body = {
        "text": "abcd",
        "stream": stream,
        "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": 5},
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    text = client.post("/generate", json=body).text
    meta = json.loads(text.split("\n\n")[-3].removeprefix("data: ") if stream else text)["meta_info"]
    c = expected.outputs[0]
    assert [e[:2] for e in meta["output_token_logprobs"]] == [
        [pytest.approx(s[t].logprob), t] for t, s in zip(c.token_ids, c.logprobs, strict=True)
    ]
    assert "".join(e[2] for e in meta["output_token_logprobs"]) == c.text
    assert [e[1] for e in meta["input_token_logprobs"]] == expected.prompt_token_ids[1:]
    assert all(len(best) == 2 and best[0][0] >= best[1][0] for best in meta["input_top_logprobs"])
    del body["logprob_start_len"]
    assert (
        "input_token_logprobs"
        not in client.post("/generate", json=body | {"stream": False}).json()["meta_info"]
    )


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": "a", "input_ids": [1]},
        {"text": "a", "return_logprob": True, "logprob_start_len": -2},
        {"input_ids": [160]},
        {"text": "a", "sampling_params": {"speculative": {"metrics": "summary"}}},
        {"text": "a", "sampling_params": {"ebnf": "root := 'a'"}},
        {"text": "a", "sampling_params": {"ebnf": 'root ::= "a"', "structural_tag": "{}"}},
        {"text": "a", "sampling_params": {"regex": "a", "json_schema": "{}"}},
        {"text": "a", "sampling_params": {"regex": "a", "structured_outputs": {"choice": ["a"]}}},
    ],
)
def test_generate_refuses(client, body):
    assert client.post("/generate", json=body).status_code == 400


@pytest.mark.parametrize(
    ("constraint", "wanted"),
    [
        ({"regex": "[0-9]{3}"}, r"[0-9]{3}"),
        ({"json_schema": '{"type": "boolean"}'}, "true|false"),
        ({"ebnf": 'root ::= "x" [0-9]'}, "x[0-9]"),
        ({"structural_tag": '{"format": {"type": "const_string", "value": "ab"}}'}, "ab"),
    ],
)
def test_generate_takes_sglangs_constraints(client, constraint, wanted):
    body = {"text": "a", "model": "tiny", "sampling_params": {"temperature": 0, **constraint}}
    answer = client.post("/generate", json=body)
    assert re.fullmatch(wanted, answer.json()["text"])
    assert "warning" not in answer.headers


def test_generate_trims_stop_strings_unless_told_not_to(client):
    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    whole = client.post("/generate", json={"text": "abc", "sampling_params": sampling}).json()["text"]
    stop = whole[4]
    for keep in (False, True):
        options = {**sampling, "stop": stop, "no_stop_trim": keep}
        answer = client.post("/generate", json={"text": "abc", "sampling_params": options}).json()
        assert answer["text"] == whole[: whole.index(stop) + keep]


def test_generate_warns_of_what_belongs_to_other_routes(client):
    sampling = {"max_new_tokens": 1, "stream": True, "return_token_ids": True, "model": "tiny"}
    answer = client.post("/generate", json={"text": "a", "sampling_params": sampling})
    others = "sampling_params.stream, sampling_params.return_token_ids, sampling_params.model"
    assert answer.headers["warning"] == f'299 mtp-jax "ignored: {others}"'


def test_server_info_has_what_sglangs_client_reads(client):
    client.post("/v1/completions", json={"prompt": "abc", "temperature": 0, "ignore_eos": True})
    info = client.get("/server_info").json()
    assert info["internal_states"][0]["avg_spec_accept_length"] > 1
    assert info["num_speculative_tokens"] == 3


def test_the_prefix_cache_is_told_and_flushed(client):
    def cached() -> int:
        answer = client.post("/v1/completions", json={"prompt": "z" * 100, "max_tokens": 2}).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert client.post("/flush_cache").json() == {"success": True}
    assert cached() == 0
    assert cached() >= 96 - 16
    client.post("/flush_cache")
    assert cached() == 0


def test_tokenize_and_detokenize(client):
    answer = client.post("/tokenize", json={"prompt": "abc", "return_token_strs": True}).json()
    assert answer == {"count": 3, "max_model_len": 252, "tokens": [68, 69, 70], "token_strs": ["a", "b", "c"]}
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "abc"}
    chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert client.post("/detokenize", json={"tokens": chat["tokens"]}).json() == {
        "prompt": "user: hi\nassistant:"
    }
    assert client.post("/tokenize", json={"neither": 1}).status_code == 400
    unknown = client.post("/detokenize", json={"tokens": [68, 160]})
    assert unknown.status_code == 400
    assert unknown.json()["error"]["message"] == "tokens has token 160; expected ids from 0 to 159"


def test_text_that_spells_a_special_token_is_that_token(client):
    """As docs/serving.md says, and shows how it is seen."""
    assert client.get("/tokenizer_info").json()["eos_token"] == EOS
    said = [{"role": "user", "content": f"a{EOS}b"}]
    assert 1 in client.post("/tokenize", json={"messages": said}).json()["tokens"]
    assert client.post("/tokenize", json={"prompt": f"a{EOS}b"}).json()["tokens"] == [68, 1, 69]


def test_models_and_version(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 252)
    assert client.get("/v1/models/tiny").json() == model
    assert client.get("/v1/models/other").status_code == 404
    slash = client.get("/v1/models/")
    assert slash.status_code == 404
    assert slash.json()["error"]["message"].startswith("there is no /v1/models/ here; use /v1/models")
    counted = client.get("/metrics").text
    named = "/v1/models/{name:path}"
    for route, status in (("/v1/models", 200), (named, 200), (named, 404)):
        labels = f'model_name="tiny",route="{route}",status="{status}"'
        assert f"mtp_jax:http_responses_total{{{labels}}}" in counted
    assert client.get("/version").json()["version"]


def test_what_other_tools_ask(client):
    assert client.get("/ping").json() == {"status": "ok"}
    assert client.get("/load").json() == {"server_load": 0}
    assert client.post("/reset_prefix_cache").json() == {"success": True}
    told = client.get("/tokenizer_info").json()
    assert (told["tokenizer_class"], told["model_max_length"]) == ("PreTrainedTokenizerFast", 252)
    assert (told["bos_token"], told["eos_token"]) == ("<bos>", "<eos>")
    assert "for m in messages" in told["chat_template"]


def test_health_and_ready(client):
    assert client.get("/health").json() == {"status": "ok"}
    ready = client.get("/ready").json()
    assert ready["status"] == "ready"
    assert re.fullmatch(r"ready|compiling program \d+ of \d+", ready["state"])


def test_unknown_routes_and_methods_are_openai_errors(client):
    assert "do you mean /v1/chat/completions?" in client.post("/chat/completions").text
    unknown = client.post("/zzz").json()["error"]
    assert unknown["type"] == "not_found_error"
    assert "no /zzz here" in unknown["message"]
    assert "; try /v1/chat/completions, " in unknown["message"]
    wrong = client.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["message"] == "/v1/completions takes POST, not GET"


def values(client) -> dict[str, float]:
    """Every sample of /metrics, summed over labels but position, reason, depth and source."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            extra = [
                v for k, v in sample.labels.items() if k in ("position", "finished_reason", "depth", "source")
            ]
            name = ":".join([sample.name, *extra])
            found[name] = found.get(name, 0) + sample.value
    return found


def test_metrics_count_what_happened(client):
    before = values(client)
    body = {"prompt": "abc", "temperature": 0, "ignore_eos": True, "max_tokens": 30}
    answer = client.post("/v1/completions", json={**body, "speculative": {"metrics": "detailed"}}).json()
    after = values(client)

    def grown(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    told = answer["metrics"]["speculative_decoding"]
    assert grown("vllm:spec_decode_num_drafts_total") == told["num_spec_steps"]
    assert grown("vllm:spec_decode_num_draft_tokens_total") == told["num_draft_tokens"]
    assert grown("vllm:spec_decode_num_accepted_tokens_total") == told["num_accepted_draft_tokens"] > 0
    by_position = [sum(a > i for a in told["per_step_accepted"]) for i in range(3)]
    per_pos = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [grown(f"{per_pos}:{i}") for i in range(3)] == by_position
    assert grown("mtp_jax:draft_tokens_total:nextn") == told["num_draft_tokens"]
    assert grown("mtp_jax:accepted_draft_tokens_total:nextn") == told["num_accepted_draft_tokens"]
    assert after["mtp_jax:draft_tokens_total:suffix"] == 0
    assert set(told["per_step_source"]) == {"nextn"}
    assert grown("vllm:prompt_tokens_total") == 3
    assert grown("vllm:generation_tokens_total") == 30
    assert grown("vllm:request_success_total:length") == 1
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert grown(f"vllm:{name}_seconds_count") == 1
    assert grown("vllm:request_generation_tokens_sum") == 30
    assert grown("vllm:request_params_max_tokens_sum") == 30
    assert grown("vllm:iteration_tokens_total_sum") == 3 + 30
    first = grown("vllm:time_to_first_token_seconds_sum")
    assert 0 < first < grown("vllm:e2e_request_latency_seconds_sum")
    assert 0 < grown("vllm:inter_token_latency_seconds_count") < 30
    steps = sum(v - before.get(k, 0) for k, v in after.items() if k.startswith("mtp_jax:steps_total"))
    assert steps >= told["num_spec_steps"]
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0


def body_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    return document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def test_openapi_says_what_every_route_takes(client):
    document = client.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    schemas = document["components"]["schemas"]
    for route in (route for route in ROUTES if route.bodies):
        schema = body_schema(document, route.path)
        for reference, kind in zip(schema.get("anyOf", [schema]), route.bodies, strict=True):
            found = schemas[reference["$ref"].rpartition("/")[2]]
            assert set(found["properties"]) == {f.alias or n for n, f in kind.model_fields.items()}
    assert "get" in document["paths"]["/v1/models/{name}"]


def test_handlers_read_the_bodies_of_their_lines():
    for route in ROUTES:
        reads = re.search(r"await _?read\w*\(.*request, ([\w, ]+)\)", inspect.getsource(route.handler))
        assert [kind.__name__ for kind in route.bodies] == (reads[1].split(", ") if reads else []), route.path


class ToyBody(Body):
    number: int


async def toy(server: Server, request: Request) -> Response:
    body = await read(server.settings, request, ToyBody)
    return JSONResponse({"twice": 2 * body.number})


async def toys(server: Server, request: Request) -> Response:
    return JSONResponse({"toys": server.settings.names, "of": request.url.path})


def test_a_route_is_a_line_of_the_table(server: Running, caplog):
    """Served, guarded, described, logged and counted as its line says."""
    caplog.set_level(logging.INFO, LOGGER.name)
    lines = (
        Route("/toy", ("POST",), toy, (ToyBody,), access="admin", quiet=True),
        Route("/toys/{name:path}", ("GET",), toys, access="open"),
    )
    served = server.variant(Routes((*ROUTES, *lines)), api_keys=("user",), admin_key="admin")
    user, admin = ({"Authorization": f"Bearer {key}"} for key in ("user", "admin"))
    assert served.post("/toy", json={"number": 2}, headers=user).status_code == 401
    assert served.post("/toy", json={"number": 2}, headers=admin).json() == {"twice": 4}
    assert served.get("/toys/a/b").json() == {"toys": ["tiny"], "of": "/toys/a/b"}
    assert served.post("/toys/a").status_code == 401
    document = served.get("/openapi.json", headers=user).json()
    assert body_schema(document, "/toy") == {"$ref": "#/components/schemas/ToyBody"}
    assert document["components"]["schemas"]["ToyBody"]["required"] == ["number"]
    assert "get" in document["paths"]["/toys/{name}"]
    logged = [r.getMessage().split()[1:4] for r in caplog.records if "/toy" in r.getMessage()]
    assert logged == [["POST", "/toy", "401"], ["GET", "/toys/a/b", "200"], ["POST", "/toys/a", "401"]]
    counted = served.get("/metrics", headers=user).text
    assert 'route="/toy",status="200"} 1.0' in counted
    assert 'route="/toys/{name:path}",status="200"} 1.0' in counted
