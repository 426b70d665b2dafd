"""/abort_request ends requests of every route, wherever they are, with the tokens so far."""

import json
from typing import Any

import pytest

from tests.serve.conftest import LONG, live

KEY = {"Authorization": "Bearer admin"}
ABORTED = {"type": "abort", "message": "the request was aborted"}
CHAT = {"messages": [{"role": "user", "content": "abc"}], "temperature": 0, "ignore_eos": True}


def abort(client, **body: Any) -> None:
    answer = client.post("/abort_request", json=body)
    assert (answer.status_code, answer.json()) == (200, {"success": True})


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_an_abort_gives_the_tokens_so_far(server, client, ask, stop_after, steps):
    gate = stop_after(steps)
    running = ask(rid="r1", return_logprob=True)
    gate.wait()
    live(server, 1)
    abort(client, rid="r1")
    gate.open()
    answer = running.result(60)
    meta = answer["meta_info"]
    assert meta["finish_reason"] == ABORTED
    assert (meta["id"], meta["completion_tokens"]) == ("r1", len(answer["output_ids"]))
    assert len(answer["output_ids"]) == len(meta["output_token_logprobs"]) < 200
    assert (
        client.post("/detokenize", json={"tokens": answer["output_ids"]}).json()["prompt"] == answer["text"]
    )
    whole = client.post("/generate", json={"text": "abc", "sampling_params": LONG}).json()
    assert whole["output_ids"][: len(answer["output_ids"])] == answer["output_ids"]
    assert bool(answer["text"]) == (steps > 0)


def test_aborts_of_requests_that_wait_or_are_not_there(server, client, ask, stop_after):
    gate = stop_after(3)
    asked = [ask(rid=f"r{i}", text="a" * (i + 1)) for i in range(4)]  # two slots
    gate.wait()
    live(server, 4)
    abort(client, rid="r3")
    abort(client, rid="r")  # a beginning is no name
    abort(client, rid="nobody's")
    gate.open()
    ends = [a.result(60)["meta_info"]["finish_reason"]["type"] for a in asked]
    assert ends == ["length"] * 3 + ["abort"]


def test_one_rid_ends_a_batch(server, client, ask, stop_after):
    gate = stop_after(2)
    batch, other = ask(text=["a", "b", "c"], rid="b"), ask(rid="b_x")
    gate.wait()
    live(server, 4)
    abort(client, rid="b")
    gate.open()
    assert [a["meta_info"]["finish_reason"] for a in batch.result(60)] == [ABORTED] * 3
    assert other.result(60)["meta_info"]["finish_reason"]["type"] == "length"


def test_a_rid_in_use_is_refused(server, client, ask, stop_after):
    gate = stop_after(0)
    first = ask(rid="once")
    live(server, 1)
    for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a"})):
        refused = client.post(path, json={**body, "rid": "once"})
        assert refused.status_code == 400
        assert "(rid) 'once' is in use" in refused.json()["error"]["message"]
    abort(client, rid="once")
    gate.open()
    assert first.result(60)["text"] == ""


def test_abort_all(server, client, ask, stop_after):
    gate = stop_after(3)
    asked = [ask(), ask(text=["a", "b"])]
    chat = ask("/v1/chat/completions", **CHAT)
    gate.wait()
    live(server, 4)
    abort(client, abort_all=True)
    gate.open()
    assert asked[0].result(60)["meta_info"]["finish_reason"] == ABORTED
    assert [a["meta_info"]["finish_reason"] for a in asked[1].result(60)] == [ABORTED] * 2
    assert chat.result(60)["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc", "max_tokens": 200, "temperature": 0, "ignore_eos": True}),
        ("/v1/chat/completions", CHAT),
    ],
)
def test_a_rid_names_answers_of_openais_routes(server, client, ask, stop_after, path, body):
    gate = stop_after(3)
    running, waiting = ask(path, **body, rid="mine"), ask(path, **body, rid="later")
    gate.wait()
    live(server, 2)
    for name in ("mine", "later"):
        abort(client, rid=name)
    gate.open()
    for name, future in (("mine", running), ("later", waiting)):
        answer = future.result(60)
        assert answer["id"] == name
        assert answer["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        ("/v1/completions", {"prompt": "abc", "max_tokens": 200}, "cmpl-"),
        ("/v1/completions", {"prompt": ["abc", "de"], "max_tokens": 200}, "cmpl-"),
        ("/v1/chat/completions", CHAT, "chatcmpl-"),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 200, "model": "tiny"}, "msg_"),
        ("/v1/responses", {"input": "abc", "max_output_tokens": 200}, "resp_"),
    ],
)
def test_the_id_of_a_streamed_answer_ends_it(server, client, stop_after, path, body, prefix):
    gate = stop_after(3)
    with client.stream("POST", path, json={**body, "stream": True, "temperature": 0}) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {"))
        first = json.loads(next(lines))
        name = next(v["id"] for v in (first, first.get("message"), first.get("response")) if v and "id" in v)
        assert name.startswith(prefix)
        abort(client, rid=name)
        gate.open()
        *_, last = lines
    # A message has no end that says so, and a response has failed.
    assert ("the request was aborted after" in last) == (prefix in ("msg_", "resp_"))
    assert server.allm.llm.engine.stats().finished["abort"]


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": None, "abort_all": False}, {"rid": ["a"]}])
def test_an_abort_says_whom_it_ends(client, body):
    answer = client.post("/abort_request", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "rid")


def test_all_are_ended_by_the_admin_key_alone_where_there_are_keys(server):
    keyed = server.variant(api_keys=("user",), admin_key="admin")
    user = {"Authorization": "Bearer user"}
    assert keyed.post("/abort_request", json={"rid": "r"}).status_code == 401
    assert keyed.post("/abort_request", json={"rid": "r"}, headers=user).status_code == 200
    refused = keyed.post("/abort_request", json={"abort_all": True}, headers=user)
    assert (refused.status_code, "--admin-key" in refused.text) == (403, True)
    assert keyed.post("/abort_request", json={"abort_all": True}, headers=KEY).status_code == 200
    no_admin = server.variant(api_keys=("user",))
    assert no_admin.post("/abort_request", json={"abort_all": True}, headers=user).status_code == 403
