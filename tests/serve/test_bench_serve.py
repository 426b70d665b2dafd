"""`mtp-jax bench serve`: load on this server, and on others that know less."""

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mtp_jax import LLM
from mtp_jax.commands import cli
from mtp_jax.errors import ConfigError, MtpJaxError
from mtp_jax.lab.bench import endpoint, plot, traffic
from mtp_jax.lab.bench.endpoint import DraftCounts, address
from tests.models import slowed
from tests.serve.conftest import Running, start

Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs the command, without its figure; gives the JSON that it writes."""
    monkeypatch.setattr(plot, "can_draw", lambda: False)

    def run(url: str, *given: object) -> dict[str, Any]:
        out = tmp_path / "out.json"
        assert cli.main(["bench", "serve", url, "--json", str(out), *map(str, given)]) == 0
        return json.loads(out.read_text())

    return run


def test_arrivals_wait_for_nobody_and_follow_the_seed():
    assert traffic.schedule(4, 2.0, "fixed", 0) == [0.0, 0.5, 1.0, 1.5]
    assert traffic.schedule(3, math.inf, "poisson", 0) == [0.0] * 3
    due = traffic.schedule(20_000, 4.0, "poisson", 1)
    gaps = [b - a for a, b in pairwise(due)]
    assert due == traffic.schedule(20_000, 4.0, "poisson", 1) != traffic.schedule(20_000, 4.0, "poisson", 2)
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 4, rel=0.03)
    deviation = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.05)  # as of exponentially distributed gaps
    assert sum(g > mean for g in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.02)


def test_random_prompts_have_the_lengths_asked_for():
    ids = traffic.random_prompts(300, 10, 0.5, 7, 0).all
    assert {len(prompt) for prompt in ids} == set(range(5, 16))
    assert sorted({str(token) for prompt in ids for token in prompt}) == list("0123456")
    words = traffic.random_prompts(3, 4, 0.0, None, 0)
    assert [len(str(prompt).split(" ")) for prompt in words.all] == [4, 4, 4]
    assert words.source == "4 random words"
    few = traffic.Traffic(["a", "b", "c"], "three")
    taken = few.take(7, 0)
    assert sorted(map(str, taken[:6])) == ["a", "a", "b", "b", "c", "c"]
    assert taken == few.take(7, 0)


def sharegpt_file(folder: Path, *texts: str) -> Path:
    path = folder / "share.json"
    said = [[{"from": "system", "value": "s"}, {"from": "human", "value": text}] for text in texts]
    path.write_text(json.dumps([{"id": str(i), "conversations": turns} for i, turns in enumerate(said)]))
    return path


def test_files_of_prompts_are_read_and_others_refused(tmp_path: Path):
    path = sharegpt_file(tmp_path, "one", "", "two")
    assert traffic.sharegpt(path) == traffic.Traffic(["one", "two"], "share.json, 2 prompts")
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    lines = [
        {"question_id": 1, "category": "coding", "turns": ["first", "second"]},
        {"messages": [system, user, {"role": "assistant", "content": "a"}, user]},
        {"turns": []},
    ]
    (tmp_path / "speed.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert traffic.speed_bench(tmp_path / "speed.jsonl").all == ["first", [system, user]]
    assert traffic.speed_bench(tmp_path / "speed.jsonl", "coding").all == ["first"]
    with pytest.raises(ConfigError, match=r"--category maths; .*speed.jsonl has coding"):
        traffic.speed_bench(tmp_path / "speed.jsonl", "maths")
    wrong = tmp_path / "wrong"
    for text, read, told in (
        ("{", traffic.sharegpt, "is not JSON"),
        ("{}", traffic.sharegpt, "holds dict; expected ShareGPT's list"),
        ('[{"conversations": 1}]', traffic.sharegpt, "entry 1: expected an object with"),
        ("[]", traffic.sharegpt, "has no prompts"),
        ('{"turns": ["a"]}\n{', traffic.speed_bench, "line 2 is not JSON"),
        ('{"prompt": "a"}', traffic.speed_bench, "entry 1: expected an object with"),
        ("[1]", traffic.speed_bench, "entry 1: expected an object with"),
        ("[" * 10**5, traffic.sharegpt, "is not JSON: maximum recursion depth"),
        ("[" * 10**5, traffic.speed_bench, "line 1 is not JSON: maximum recursion depth"),
        ("[" + "9" * 5000 + "]", traffic.sharegpt, "is not JSON: Exceeds the limit"),
        ('[{"conversations": [{"from": "human", "value": [1]}]}]', traffic.sharegpt, "entry 1: expected"),
        ('[{"conversations": [{"from": ["human"], "value": "a"}]}]', traffic.sharegpt, "has no prompts"),
        ('{"turns": [{}]}', traffic.speed_bench, "entry 1: expected an object with"),
        ('{"turns": {"a": 1}}', traffic.speed_bench, "entry 1: expected an object with"),
        ('{"messages": [{"role": [], "content": "a"}]}', traffic.speed_bench, "entry 1: expected"),
    ):
        wrong.write_text(text)
        with pytest.raises(ConfigError, match=told):
            read(wrong)
    wrong.write_text('{"turns": ["a\u2028b"], "category": ["x"]}\n{"turns": ["c"], "category": "y"}\n1')
    with pytest.raises(ConfigError, match=r"--category x; .* has y$"):
        traffic.speed_bench(wrong, "x")
    assert traffic.speed_bench(wrong, "y").all == ["c"]
    wrong.write_text(json.dumps({"turns": ["a\u2028b"]}, ensure_ascii=False))
    assert traffic.speed_bench(wrong).all == ["a\u2028b"]
    with pytest.raises(ConfigError, match="missing cannot be read"):
        traffic.sharegpt(tmp_path / "missing")


def test_this_server_is_measured_with_its_drafts(server: Running, bench: Bench):
    engine = server.allm.llm.engine
    before = engine.stats()
    sizes = ("--requests", 6, "--prompt-tokens", 4, "--max-tokens", 20, "--ignore-eos")
    with slowed(engine):  # else a busy computer sends several steps in one chunk
        found = bench(server.url + "/v1/", "--rates", "inf,200", *sizes, "--arrivals", "fixed")
    after = engine.stats()
    levels = found["figures"]["levels"]
    assert [level["level"] for level in levels] == ["inf", 200.0]
    for level in levels:
        latencies = level["latencies"]
        assert (level["answered"], level["failures"], level["counts"]) == (6, {}, "chunks")
        assert latencies["tokens"] == 6 * 20
        # Tokens that a step accepted came in one chunk, and are told apart: all but the first chunk's.
        assert level["drafts"]["rows"] < latencies["itl"]["count"] <= 6 * 19
        assert latencies["tpot"]["mean"] == pytest.approx(latencies["itl"]["mean"], rel=0.5)
        assert 0 < latencies["ttft"]["p50"] <= latencies["e2e"]["p50"]
        assert level["prompt_tokens"] == 6 * (4 * 6 - 1)  # one token per letter and space
        assert level["output_tokens_per_second"] == pytest.approx(level["answered_per_second"] * 20, rel=1e-6)
    rows = sum(level["drafts"]["rows"] for level in levels)
    accepted = sum(level["drafts"]["accepted"] for level in levels)
    assert rows == after.drafts - before.drafts > 0
    # The trial before the first level has one token, and verifies nothing.
    assert accepted == after.accepted_tokens - before.accepted_tokens > 0
    assert accepted == sum(sum(level["drafts"]["positions"]) for level in levels)
    assert 1.5 < 1 + accepted / rows < 3.4
    assert found["figures"]["model"] == "tiny"


def test_failures_are_counted_and_told_apart(server: Running, bench: Bench, tmp_path: Path, capsys):
    path = sharegpt_file(tmp_path, "abc", "a" * 300, "def")
    found = bench(server.url, "--sharegpt", path, "--rates", "50", "--requests", 3, "--max-tokens", 4)
    (level,) = found["figures"]["levels"]
    ((why, times),) = level["failures"].items()
    assert (level["answered"], times) == (2, 1)
    assert why.startswith("400: ")
    assert "252" in why
    assert f"FAILED, 1 times: {why}" in capsys.readouterr().out


def test_a_chat_takes_text_and_no_token_ids(server: Running, bench: Bench, capsys):
    sizes = ("--rates", "inf", "--requests", 2, "--prompt-tokens", 8, "--max-tokens", 4, "--vocabulary", 60)
    (level,) = bench(server.url, *sizes)["figures"]["levels"]
    assert level["prompt_tokens"] == 2 * 8
    assert cli.main(["bench", "serve", server.url, "--api", "chat", *map(str, sizes)]) == 2
    assert "a chat takes no token ids" in capsys.readouterr().err


def test_the_key_comes_from_the_environment(fresh: LLM, bench: Bench, monkeypatch, tmp_path: Path, capsys):
    with start(fresh, api_keys=("secret-key",)) as running:
        monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
        found = bench(running.url, "--rates", "inf", "--requests", 1, "--max-tokens", 2, "--prompt-tokens", 2)
        assert found["figures"]["levels"][0]["answered"] == 1
        assert "secret" not in json.dumps(found)
        monkeypatch.delenv("OPENAI_API_KEY")
        assert cli.main(["bench", "serve", running.url]) == 2
        assert "does not list its models: 401, " in capsys.readouterr().err


@contextmanager
def running(answer: Callable[[dict[str, Any]], Any]) -> Iterator[str]:
    """Another server: ``answer`` makes a response, or the chunks of one."""

    async def complete(request: Request) -> Response:
        made = answer(json.loads(await request.body()))
        if isinstance(made, Response):
            return made
        return StreamingResponse(made, media_type="text/event-stream")

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "theirs"}]})

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", complete, methods=["POST"])]
    options: dict[str, Any] = {"port": 0, "log_config": None, "lifespan": "off"}
    theirs = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), **options))
    thread = threading.Thread(target=theirs.run)
    thread.start()
    while not theirs.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{theirs.servers[0].sockets[0].getsockname()[1]}"
    finally:
        theirs.should_exit = True
        thread.join()


def said(finish: str | None = None, **delta: str) -> bytes:
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return f"data:{json.dumps(chunk, ensure_ascii=False)}\r\n\r\n".encode()


SMALL = ("--api", "chat", "--rates", "inf", "--requests", 2, "--prompt-tokens", 2)


def test_a_server_that_counts_only_at_the_end_is_told_so(bench: Bench, capsys):
    asked = []

    def strict(body: dict[str, Any]) -> Any:
        asked.append(body)
        if "continuous_usage_stats" in body["stream_options"]:
            return JSONResponse({"error": {"message": "unknown field"}}, 400)
        usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}
        end = [b": still here\n\n", f"data: {json.dumps(usage)}\n\n".encode(), b"data: [DONE]\n\n"]
        start = [said(role="assistant"), said(reasoning_content="so"), said(content="a\u2028b")]
        return iter([*start, said(content="c"), said("stop"), *end])

    with running(strict) as url:
        found = bench(url, *SMALL, "--extra-body", '{"top_p": 0.5}')
    (level,) = found["figures"]["levels"]
    assert (level["counts"], level["answered"], level["prompt_tokens"]) == ("answers", 2, 10)
    assert level["latencies"]["tokens"] == 14
    assert level["latencies"]["itl"]["count"] == 2 * 5  # the first of three chunks has two of the seven
    assert level["acceptance_length"] is None
    assert asked[-1]["model"] == "theirs"
    assert asked[-1]["top_p"] == 0.5
    assert (asked[0]["max_tokens"], asked[-1]["max_tokens"]) == (1, 128)
    assert len(asked) == 2 + 2
    assert "spread evenly over its chunks" in capsys.readouterr().out


def test_a_server_that_counts_nothing_is_measured_by_chunks(bench: Bench, capsys):
    def plain(body: dict[str, Any]) -> Any:
        if "stream_options" in body:
            return JSONResponse({"detail": "extra fields not permitted"}, 422)
        return iter([said(content="a"), said(content="b"), said("length")])

    with running(plain) as url:
        (level,) = bench(url, *SMALL)["figures"]["levels"]
    assert (level["counts"], level["latencies"]["tokens"]) == ("none", 4)
    assert "each chunk is one" in capsys.readouterr().out


def test_an_answer_that_breaks_off_is_a_failure(bench: Bench, capsys):
    ways = [
        [said(content="a"), said("stop")],  # the trial
        [said(content="a"), b'data: {"error": {"message": "lost"}}\n\n', b"data: [DONE]\n\n"],
        [said(content="a")],
        [b"data: {\n\n"],
        [said(content="a"), said("stop")],
    ]
    left = iter(ways)
    with running(lambda body: iter(next(left))) as url:
        sizes = (*SMALL[:4], "--requests", 4, "--prompt-tokens", 2)
        (level,) = bench(url, *sizes)["figures"]["levels"]
    assert level["answered"] == 1
    causes = sorted(level["failures"])
    assert len(causes) == 3
    assert causes[0].startswith("JSONDecodeError")
    assert causes[1:] == ["in the stream: lost", "the stream ended before the answer did"]
    with running(lambda body: JSONResponse({"error": "no room"}, 503)) as url:
        assert cli.main(["bench", "serve", url, *map(str, SMALL)]) == 2
    assert "refuses what would be measured: 503: no room" in capsys.readouterr().err


def test_requests_come_at_their_time_whatever_became_of_others(bench: Bench):
    """The server answers nobody until all have come, so a client that waited for answers would hang."""
    together = threading.Barrier(5)
    trial = iter([True])

    def answer(body: dict[str, Any]) -> Iterator[bytes]:
        if not next(trial, False):
            together.wait(60)
        yield said(content="a")
        yield said("stop")

    with running(answer) as url:
        sizes = (*SMALL[:2], "--rates", 100, "--requests", 5, "--prompt-tokens", 2)
        (level,) = bench(url, *sizes)["figures"]["levels"]
    assert (level["answered"], level["failures"]) == (5, {})


def test_a_closed_loop_keeps_each_client_busy(tmp_path: Path, capsys):
    """The server answers when every client has asked, so a loop with fewer clients would hang."""
    trial = iter([True])
    waiting = {1: threading.Barrier(1), 3: threading.Barrier(3)}
    lock, seen = threading.Lock(), []
    now = 0

    def answer(body: dict[str, Any]) -> Iterator[bytes]:
        nonlocal now
        if not next(trial, False):
            with lock:
                now += 1
                seen.append(now)
                level = 1 if len(seen) <= 6 else 3
            waiting[level].wait(60)
            with lock:
                now -= 1
        yield said(content="a")
        yield said("stop")

    out = tmp_path / "out.json"
    with running(answer) as url:
        given = [url, "--api", "chat", "--concurrency", "1,3", "--requests", "6", "--prompt-tokens", "2"]
        assert cli.main(["bench", "serve", *given, "--json", str(out)]) == 0
    found = json.loads(out.read_text())["figures"]
    assert found["loop"] == "Closed loop, 6 requests per level"
    assert [(f["level"], f["answered"]) for f in found["levels"]] == [(1, 6), (3, 6)]
    assert max(seen[:6]) == 1
    assert max(seen[6:]) == 3
    assert "at a time" in capsys.readouterr().out
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_drafts_of_a_server_that_began_anew_are_not_told():
    before, after = DraftCounts(10, 30, 12, (8, 4)), DraftCounts(14, 42, 20, (12, 7, 1))
    found = after.since(before)
    assert found == DraftCounts(4, 12, 8, (4, 3))
    assert found
    assert found.acceptance_length == 3.0
    assert before.since(after) is None
    assert before.since(before) is None


def test_wrong_usage_is_one_line(capsys):
    assert address("http://h:1/base/v1/") == "http://h:1/base"
    for given, told in (
        (["localhost:8000"], "is no address of a server; write http://127.0.0.1:8000"),
        (["http://127.0.0.1:99999"], "is no address of a server; write http://127.0.0.1:8000"),
        (["http://127.0.0.1:-1"], "is no address of a server"),
        (["http://127.0.0.1:9\n"], "is no address of a server"),
        (["http://127.0.0.1:9/\0"], "is no address of a server"),
        (["http://[::1:9"], "is no address of a server"),
        (["http://[v1.x]:9"], "is no address of a server"),
        (["http://h:9/" + "a" * 70_000], "is no address of a server"),
        (["http://h", "--extra-body", "[" * 10**5], "is not a JSON object"),
        (["http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9: ConnectError; start it"),
        (["http://h", "--rates", "0"], "'0' is not a list of numbers above 0; write 0.5,2,inf"),
        (["http://h", "--rates", "1", "--concurrency", "2"], "not allowed with argument --rates"),
        (["http://h", "--arrivals", "fixed", "--concurrency", "2"], "--arrivals fixed has no effect beside"),
        (["http://h", "--spread", "1.5"], "'1.5' is not a number from 0 to 1"),
        (["http://h", "--extra-body", "[1]"], "'[1]' is not a JSON object"),
        (["http://h", "--sharegpt", "a", "--vocabulary", "3"], "not allowed with argument"),
        ([], "the following arguments are required: URL"),
    ):
        assert cli.main(["bench", "serve", *given]) != 0, given
        err = capsys.readouterr().err
        assert told in err
        assert err.count("\n") == 1


def test_a_server_that_answers_nonsense_has_no_models_and_no_drafts():
    async def ask(page: str, question: Callable[[httpx2.AsyncClient], Any]) -> Any:
        transport = httpx2.MockTransport(lambda request: httpx2.Response(200, text=page))
        async with httpx2.AsyncClient(transport=transport, base_url="http://h") as http:
            return await question(http)

    for page in ("[" * 10**5, '{"data": 1}', "9" * 5000):
        with pytest.raises(MtpJaxError, match="lists no model; give --model NAME"):
            asyncio.run(ask(page, endpoint._model))
    for value in ("NaN", "+Inf", "x"):
        page = f"vllm:spec_decode_num_drafts_total {value}\n"
        assert asyncio.run(ask(page, endpoint.drafted)) is None
