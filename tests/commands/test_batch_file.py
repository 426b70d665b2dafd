"""Batch files: every line is answered once, whatever it holds and whenever the run was interrupted."""

import asyncio
import json
import tracemalloc

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mtp_jax.commands import batch_file as batch
from mtp_jax.errors import RequestError
from serve.http.in_process import Answer, post

USAGE = {"usage": {"completion_tokens": 2}}


def request(name, url="/v1/completions", **body):
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {"prompt": "x"} | body})


class Server:
    """Answers with the prompt; fails, or breaks down, on some."""

    def __init__(self, breaks=()):
        self.breaks, self.asked, self.busy, self.most = breaks, [], 0, 0

    async def send(self, url, body):
        prompt = json.loads(body)["prompt"]
        self.busy += 1
        self.most = max(self.most, self.busy)
        await asyncio.sleep(0)
        self.busy -= 1
        if prompt in self.breaks:
            raise RuntimeError("broken")
        self.asked.append((url, prompt))
        if prompt == "bad":
            return Answer(400, "r", {"error": {"message": "no"}})
        warning = f"ignored {prompt}" if prompt.startswith("odd") else ""
        return Answer(200, "r", {"text": prompt, **USAGE}, warning)


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def run(files, server=None, in_flight=4, progress=lambda counts: None):
    counts = batch.Counts()
    send = (server or Server()).send
    asyncio.run(batch.run(files[0], files[1], send, in_flight, lambda: progress(counts), counts))
    return counts


def entries(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "text",
    ["notes", '{"precious": 1}', '{"custom_id": "a", "error": null}', '{"id": "batch_x", "error": null}'],
)
def test_a_file_that_is_no_output_is_left_as_it_is(files, text):
    """Without a line end, too: it is not what an interrupted run leaves."""
    files[0].write_text(request("a"))
    files[1].write_text(text)
    with pytest.raises(RequestError, match="is no line of a batch's output"):
        batch.already(*files)
    assert files[1].read_text() == text


@pytest.mark.parametrize("torn", ["{", '{"id": "bat', '{"id": "batch_req_0", "custom_id": "a", "resp'])
def test_a_line_torn_anywhere_is_cut_away(files, torn):
    files[0].write_text(request("a"))
    run(files)
    whole = files[1].read_text()
    files[1].write_text(whole + torn)
    assert batch.already(*files) == (1, batch.Counts(skipped=1))
    assert files[1].read_text() == whole


def test_answers_in_openai_format(files):
    files[0].write_text(f"{request('a')}\n\n{request('b', '/v1/chat/completions', prompt='bad')}")
    server, seen = Server(), []
    counts = run(files, server, progress=lambda c: seen.append(c.done))
    assert (counts.succeeded, counts.failed, counts.skipped) == (1, 1, 0)
    assert seen == [1, 2]
    assert batch.already(*files) == (2, batch.Counts(skipped=2, failed_before=1))
    a, b = sorted(entries(files[1]), key=lambda e: e["custom_id"])
    assert a.pop("id").startswith("batch_req_")
    assert a == {
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r", "body": {"text": "x", **USAGE}},
        "error": None,
    }
    assert b["response"]["status_code"] == 400
    assert [url for url, _ in server.asked] == ["/v1/completions", "/v1/chat/completions"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "the line is not JSON"),
        ("[" * 100_000, "the line is not JSON"),
        ("[1]", "the line is [1]; expected an object with custom_id, method, url and body"),
        ("{}", "custom_id is missing; expected a string"),
        ('{"custom_id": 3}', "custom_id = 3; expected a string"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', "expected POST"),
        (request("a", "/v1/embeddings"), "url = '/v1/embeddings'; expected /v1/completions or /v1/chat"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', "body is missing; expected an ob"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": []}', "body = []; expected"),
        (request("a", stream=True), "body has stream = True; leave it out"),
        (request("a", pad="x" * batch.MAX_LINE_BYTES), "longer than 8388608 bytes"),
        ("\udcff", "the line is not JSON"),
    ],
)
def test_a_bad_line_is_one_error_line(files, line, message):
    text = "\n".join([request("good"), line, request("better")])
    files[0].write_bytes(text.encode("utf-8", "surrogateescape"))
    counts = run(files)
    assert (counts.succeeded, counts.failed) == (2, 1)
    [error] = [e for e in entries(files[1]) if e["error"]]
    assert error["response"] is None
    assert error["error"]["line"] == 2
    assert error["error"]["message"].startswith("line 2: ")
    assert message in error["error"]["message"]
    again = run(files, server := Server())
    assert (again.skipped, server.asked) == (3, [])


@pytest.mark.parametrize("first", [request("good"), '{"custom_id": "good"}'])
def test_a_custom_id_that_occurs_twice_refuses_the_file(files, first):
    """As OpenAI does: two answers of one id could not be told apart."""
    files[0].write_text(f"{first}\n{request('good')}\n")
    with pytest.raises(RequestError, match="line 2 has the custom_id 'good' of an earlier line"):
        batch.already(*files)


def test_the_longest_line_is_no_body_too_large(files):
    """Of two-byte characters, whose escapes are three times as long."""
    pad = "\u00e9" * (batch.MAX_LINE_BYTES // 2 - 200)
    files[0].write_text(json.dumps(json.loads(request("a", pad=pad)), ensure_ascii=False), encoding="utf-8")
    sizes = []

    class Measuring(Server):
        async def send(self, url, body):
            sizes.append(len(body))
            return await super().send(url, body)

    assert run(files, Measuring()).succeeded == 1
    assert 2 * batch.MAX_LINE_BYTES < sizes[0] <= batch.MAX_BODY_BYTES


def test_two_runs_cannot_write_one_output(files):
    files[0].write_text(request("a"))

    async def send(url, body):
        for other in (lambda: batch.already(*files), lambda: run(files)):
            with pytest.raises(RequestError, match="is being written by another run"):
                await asyncio.to_thread(other)
        return Answer(200, "r", USAGE)

    counts = batch.Counts()
    asyncio.run(batch.run(files[0], files[1], send, 1, lambda: None, counts))
    assert counts.succeeded == 1
    assert run(files).skipped == 1


def test_tokens_and_warnings_are_counted(files):
    prompts = ["x", "odd 1", "bad", "odd 2"]
    files[0].write_text("\n".join(request(str(i), prompt=p) for i, p in enumerate(prompts)))
    counts = run(files, in_flight=1)
    assert (counts.succeeded, counts.tokens, counts.warned, counts.warning) == (3, 6, 2, "ignored odd 1")


def test_what_failed_before_is_told(files):
    files[0].write_text("\n".join([request("a"), "{", request("b", prompt="bad")]))
    assert run(files).failed == 2
    again = run(files)
    assert (again.skipped, again.failed, again.failed_before) == (3, 0, 2)


def test_refusals_that_may_pass_are_forgotten_and_asked_again(files):
    statuses = {"a": 200, "b": 500, "c": 408, "d": 400, "e": 429, "f": 507}
    files[0].write_text("\n".join([*(request(name, prompt=name) for name in statuses), "{"]))

    class Failing(Server):
        async def send(self, url, body):
            got = await super().send(url, body)
            return Answer(statuses[got.body["text"]], "r", got.body)

    assert run(files, Failing()).failed == 6
    files[1].chmod(0o640)
    before = entries(files[1])
    assert batch.forget_refused(files[1]) == 4
    assert [e["custom_id"] for e in before if e["custom_id"] in ("a", "d", None)] == [
        e["custom_id"] for e in entries(files[1])
    ]
    assert files[1].stat().st_mode & 0o777 == 0o640
    assert {path.name for path in files[1].parent.iterdir()} == {"in.jsonl", "out.jsonl"}
    counts = run(files, server := Server())
    assert (counts.succeeded, counts.skipped, counts.failed_before) == (4, 3, 2)
    assert sorted(prompt for _, prompt in server.asked) == ["b", "c", "e", "f"]
    assert len(entries(files[1])) == len(statuses) + 1
    assert batch.forget_refused(files[1]) == 0


def test_a_run_goes_on_where_it_was_interrupted(files):
    files[0].write_text("\n".join([*(request(f"n{i}", prompt=str(i)) for i in range(20)), "{"]))
    with pytest.raises(RuntimeError, match="broken"):
        run(files, Server(breaks=("7",)))
    before = files[1].read_bytes()
    assert 0 < len(entries(files[1])) < 20
    # The machine went down in the midst of a line.
    files[1].write_bytes(before + b'{"id": "batch_req_1", "custom_id": "n1')
    counts = run(files, server := Server())
    assert files[1].read_bytes().startswith(before)
    assert counts.skipped == before.count(b"\n")
    assert counts.done == 21
    names = [e["custom_id"] for e in entries(files[1])]
    assert sorted(names, key=str) == sorted([*(f"n{i}" for i in range(20)), None], key=str)
    assert len(server.asked) == 20 - counts.skipped


def test_nothing_is_appended_to_other_files(files):
    files[0].write_text(request("a"))
    files[1].write_text('{"custom_id": "a"}\n')
    with pytest.raises(RequestError, match="line 1 is no line of a batch's output"):
        run(files)
    assert files[1].read_text() == '{"custom_id": "a"}\n'


def test_no_input(files):
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        run(files)


def test_requests_in_flight_are_bounded(files):
    files[0].write_text("\n".join(request(f"n{i}") for i in range(50)))
    run(files, server := Server(), in_flight=3)
    assert server.most == 3


def test_memory_does_not_grow_with_the_file(files):
    async def send(url, body):  # a Server remembers what it was asked
        return Answer(200, "r", USAGE)

    def peak(lines):
        files[0].write_text("\n".join(request(f"n{i}", pad="x" * 2000) for i in range(lines)))
        files[1].unlink(missing_ok=True)
        tracemalloc.start()
        try:
            counts = batch.Counts()
            asyncio.run(batch.run(files[0], files[1], send, 4, lambda: None, counts))
            assert counts.succeeded == lines
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(10)
    # 2,000 further lines are 4 MB of input.
    assert peak(2100) - peak(100) < 300_000


def test_what_goes_wrong_in_a_route_is_the_answer_of_its_line():
    """Starlette answers 500, and raises what it was again."""

    async def wrong(request: Request) -> Response:
        raise RuntimeError("broken")

    async def respond(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": {"message": "internal error"}}, 500)

    routes = [Route("/v1/completions", wrong, methods=["POST"])]
    app = Starlette(routes=routes, exception_handlers={Exception: respond})
    answer = asyncio.run(post(app, "/v1/completions", b"{}"))
    assert (answer.status, answer.body) == (500, {"error": {"message": "internal error"}})

    async def silent(scope: object, receive: object, send: object) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(post(silent, "/v1/completions", b"{}"))


def test_every_custom_id_is_known_again(files):
    """Also one that is no valid text, and one that reads like the number of a line."""
    names = [*(str(i) for i in range(2000)), "line 7", "\udcff", "\udcfe"]
    lines = [request(name) for name in names]
    lines[6] = "{"
    files[0].write_text("\n".join(lines))
    counts = run(files)
    assert (counts.succeeded, counts.failed) == (len(names) - 1, 1)
    again = run(files, server := Server())
    assert (again.skipped, again.failed_before, server.asked) == (len(names), 1, [])
