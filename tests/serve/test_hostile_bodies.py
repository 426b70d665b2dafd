"""Bodies that are made to cost much: calls on the event loop, errors and memory grow as the body does."""

import asyncio
import gc
import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import pytest
from starlette.requests import Request

from serve.base import errors
from serve.base.errors import as_api_error
from serve.base.settings import Settings
from serve.bodies import reading
from serve.bodies.fields import Body
from serve.bodies.messages import MessagesBody
from serve.bodies.reading import read
from serve.bodies.responses import ResponsesBody
from serve.bodies.schema import ChatBody
from serve.http.app import make_app
from serve.http.in_process import Answer, post
from serve.routes.table import ROUTES
from tests.serve.conftest import Running

CALLS_PER_BYTE = 4
"""Of functions. A value of a schema, 5 bytes, takes 15 of them; a message of 30 bytes takes 50."""
MEMORY_PER_BYTE = 30
OBJECT_BYTES = 1024  # of an object, however short it is; there are 12,000 at most
CALLS, MEMORY = 2000, 256 * 1024  # that differ from request to request
ERRORS = 4  # of one field: an object lacks some
LONGEST_MESSAGE = 500
SIZES = (2_000, 4_000)
SETTINGS = Settings("tiny", admin_key="admin")

Make = Callable[[int], dict[str, Any]]
CHAT, RESPONSES, MESSAGES, COUNT = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
)


@contextmanager
def counted() -> Iterator[list[int]]:
    """The numbers of calls of functions, [Python's, all], in this thread, without garbage collections."""
    calls = [0, 0]

    def count(frame: FrameType, event: str, arg: object) -> None:
        calls[0] += event == "call"
        calls[1] += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        gc.enable()


class Cost(NamedTuple):
    size: int  # bytes of the body
    calls: int  # of functions, Python's and others, in the thread of the event loop
    memory: int  # bytes at once, in all threads
    answer: Answer


def cost(server: Running, route: str, text: bytes, traced: bool = False) -> Cost:
    """The cost of a request to a server that does nothing else."""
    app = make_app(server.allm, SETTINGS)

    async def measured() -> Cost:
        if not traced:
            with counted() as calls:
                answer = await post(app, route, text)
            return Cost(len(text), calls[1], 0, answer)
        tracemalloc.start()
        try:
            answer = await post(app, route, text)
            return Cost(len(text), 0, tracemalloc.get_traced_memory()[1], answer)
        finally:
            tracemalloc.stop()

    return asyncio.run_coroutine_threadsafe(measured(), server.loop).result(300)


# Conversations


def said(n: int, content: Any = "a") -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i in range(n | 1)]


def chat_calls(n: int) -> list[dict[str, Any]]:
    ids = [f"c{i}" for i in range(n)]
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ids]
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": i, "content": "r"} for i in reversed(ids)),
    ]


def one_by_one(n: int) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    for i in range(n):
        call = {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
        turns.append({"role": "tool", "tool_call_id": f"c{i}", "content": "r"})
    return turns


def functions(n: int) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"properties": {"a": {}}}}}
        for i in range(n)
    ]


def message(content: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


def uses(n: int) -> list[dict[str, Any]]:
    used = [{"type": "tool_use", "id": f"c{i}", "name": "f", "input": {"a": i}} for i in range(n)]
    results = [{"type": "tool_result", "tool_use_id": f"c{i}", "content": "r"} for i in range(n)]
    return [*message("q"), *message(used, "assistant"), *message(results)]


def item_calls(n: int) -> list[dict[str, Any]]:
    calls = [{"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"} for i in range(n)]
    results = [{"type": "function_call_output", "call_id": f"c{i}", "output": "r"} for i in range(n)]
    return [*message("q"), *calls, *results]


def assistants(n: int, **item: Any) -> list[dict[str, Any]]:
    return [{"type": "message", "role": "assistant", "content": "\U0001f600", **item}] * n + message("q")


def functions_of_items(n: int) -> list[dict[str, Any]]:
    return [{"type": "function", "name": f"f{i}"} for i in range(n)]


def odd(i: int) -> str:
    """Text that differs for each number, and that no name may have."""
    return "".join("!?~|"[i >> shift & 3] for shift in range(0, 12, 2))


def properties(count: int) -> dict[str, Any]:
    return {f"p{i}": {"type": "string"} for i in range(count)}


SAME = functions_of_items(4)
TEXT = {"type": "text", "text": "a"}
CONVERSATIONS: dict[str, tuple[str, Make]] = {
    "messages": (CHAT, lambda n: {"messages": said(n)}),
    "parts": (CHAT, lambda n: {"messages": message([TEXT] * n)}),
    "parts of many messages": (CHAT, lambda n: {"messages": said(n // 4, [TEXT] * 4)}),
    "calls of one message": (CHAT, lambda n: {"messages": chat_calls(n)}),
    "calls of many messages": (CHAT, lambda n: {"messages": one_by_one(n // 2)}),
    "calls without results": (CHAT, lambda n: {"messages": chat_calls(n)[:-1]}),
    "a call twice": (CHAT, lambda n: {"messages": chat_calls(n) + chat_calls(n)[-1:]}),
    "a wrong message at the end": (CHAT, lambda n: {"messages": [*said(n), {"role": "nobody"}]}),
    "unknown fields": (CHAT, lambda n: {"messages": [{**m, "x": [1], "y": None} for m in said(n)]}),
    "null fields": (CHAT, lambda n: {"messages": said(1), **dict.fromkeys(map(str, range(n)))}),
    "tools": (CHAT, lambda n: {"messages": said(1), "tools": functions(n // 4)}),
    "too many tools": (CHAT, lambda n: {"messages": said(1), "tools": functions(n + 300)}),
    "a tool at the end": (CHAT, lambda n: {"messages": said(1), "tools": [*functions(n // 4), {"type": 1}]}),
    "tools to choose": (
        CHAT,
        lambda n: {
            "messages": said(1),
            "tools": functions(n // 4),
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": functions(n // 4)},
            },
        },
    ),
    "properties of a tool": (
        CHAT,
        lambda n: {
            "messages": said(1),
            "tools": [{"type": "function", "function": {"name": "f", "parameters": properties(n)}}],
        },
    ),
    "a schema": (
        CHAT,
        lambda n: {
            "messages": said(1),
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a"] * n}}},
        },
    ),
    "items": (RESPONSES, lambda n: {"input": said(n)}),
    "items of one turn": (RESPONSES, lambda n: {"input": assistants(n)}),
    "thoughts of one turn": (
        RESPONSES,
        lambda n: {"input": [{"type": "reasoning", "summary": [{**TEXT, "type": "summary_text"}]}] * n},
    ),
    "parts of an item": (RESPONSES, lambda n: {"input": assistants(1, content=[TEXT] * n)}),
    "parts of a thought": (RESPONSES, lambda n: {"input": [{"type": "reasoning", "content": [TEXT] * n}]}),
    "calls of items": (RESPONSES, lambda n: {"input": item_calls(n)}),
    "calls of items without results": (RESPONSES, lambda n: {"input": item_calls(n)[:-1]}),
    "items left out": (RESPONSES, lambda n: {"input": [{"type": "web_search_call", "id": "a"}] * n}),
    "unknown items": (RESPONSES, lambda n: {"input": [*said(n), {"type": "odd"}]}),
    "fields of an item": (RESPONSES, lambda n: {"input": [{**said(1)[0], **properties(n)}]}),
    "included": (RESPONSES, lambda n: {"input": "q", "include": ["x.logprobs"] * n}),
    "wrongly included": (RESPONSES, lambda n: {"input": "q", "include": ["x"] * n + [1]}),
    "tools of items": (RESPONSES, lambda n: {"input": "q", "tools": [{"type": "web_search"}] * n}),
    "tools of one name": (
        RESPONSES,
        lambda n: {
            "input": "q",
            "tools": [
                {"type": "namespace", "name": "a" + odd(i), "tools": [{"type": "function", "name": "f"}]}
                for i in range(n + 300)
            ],
        },
    ),
    "added tools": (
        RESPONSES,
        lambda n: {
            "input": [
                *message("q"),
                *({"type": "additional_tools", "role": "developer", "tools": SAME} for _ in range(n // 4)),
            ]
        },
    ),
    "one namespace chosen often": (
        RESPONSES,
        lambda n: {
            "input": "q",
            "tools": [{"type": "namespace", "name": "a", "tools": functions_of_items(n + 300)}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "namespace", "name": "a"}] * (n // 4),
            },
        },
    ),
    "pictures": (
        RESPONSES,
        lambda n: {"input": [*message([{"type": "input_image", "image_url": "a"}] * n), *said(1), *said(1)]},
    ),
    "metadata": (RESPONSES, lambda n: {"input": "q", "metadata": properties(n)}),
    "turns": (MESSAGES, lambda n: {"messages": said(n), "max_tokens": 1}),
    "blocks": (MESSAGES, lambda n: {"messages": message([TEXT] * n), "max_tokens": 1}),
    "uses of tools": (MESSAGES, lambda n: {"messages": uses(n), "max_tokens": 1}),
    "system": (MESSAGES, lambda n: {"messages": said(1), "system": [TEXT] * n, "max_tokens": 1}),
    "blocks of a result": (
        MESSAGES,
        lambda n: {
            "messages": [
                *uses(1)[:2],
                *message([{"type": "tool_result", "tool_use_id": "c0", "content": [TEXT] * n}]),
            ],
            "max_tokens": 1,
        },
    ),
    "blocks left out": (COUNT, lambda n: {"messages": message([{"type": "server_tool_use"}] * n + [TEXT])}),
    "thinking blocks": (COUNT, lambda n: {"messages": message([{"type": "thinking", "thinking": "a"}] * n)}),
    "tools of a message": (
        COUNT,
        lambda n: {
            "messages": said(1),
            "tools": [{"name": f"f{i}", "input_schema": {}} for i in range(n // 4)],
        },
    ),
    "conversation to tokens": ("/tokenize", lambda n: {"messages": said(n)}),
    "ids": ("/v1/completions", lambda n: {"prompt": [5] * (n + 300)}),
    "tokens": ("/detokenize", lambda n: {"tokens": [5] * n}),
    "input ids": ("/generate", lambda n: {"input_ids": [5] * (n + 300)}),
}  # fmt: skip


LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"max_tokens": 1},
    RESPONSES: {"max_output_tokens": 1},
    MESSAGES: {"max_tokens": 1},
    "/v1/completions": {"max_tokens": 1},
    "/generate": {"sampling_params": {"max_new_tokens": 1}},
}
"""Fields for the shortest answer."""


def text_of(name: str, n: int) -> tuple[str, bytes]:
    route, make = CONVERSATIONS[name]
    return route, json.dumps({**LEAST.get(route, {}), **make(n)}).encode()


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_calls_on_the_event_loop_grow_as_the_body_does(server: Running, name):
    """From n to 2n there are as many calls more as from n / 2 to n, twice."""
    cost(server, *text_of(name, 120))  # logs its warnings
    half, one, two = (cost(server, *text_of(name, n)) for n in (120, 240, 480))
    assert {half.answer.status, one.answer.status, two.answer.status} <= {200, 400}
    assert two.calls - one.calls < 2.2 * (one.calls - half.calls) + CALLS
    assert two.calls < CALLS_PER_BYTE * two.size + 2 * CALLS


@pytest.mark.rest
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_memory_grows_as_the_body_does(server: Running, name):
    objects = text_of(name, 1000)[1].count(b"{")
    small, large = (cost(server, *text_of(name, n), traced=True) for n in (4, 1000))
    assert large.memory - small.memory < MEMORY_PER_BYTE * large.size + OBJECT_BYTES * objects + MEMORY


@pytest.mark.parametrize("prompt", ["a", [5, 5]])
def test_calls_grow_as_the_number_of_prompts_does(server: Running, prompt):
    """Each is a request of its own, of which the queue takes 256."""
    bodies = [{"prompt": [prompt] * n, "max_tokens": 1} for n in (30, 60, 120)]
    half, one, two = (cost(server, "/v1/completions", json.dumps(body).encode()) for body in bodies)
    assert half.answer.status == two.answer.status == 200
    assert two.calls - one.calls < 2.2 * (one.calls - half.calls)


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"choice": ["", "x" * 10**6]}},
        {"structured_outputs": {"json": "[" * 300_000}},
        {"structured_outputs": {"regex": "(" * 100_000}},
        {"structured_outputs": {"grammar": "root ::= " + "(" * 50_000}},
        {"structured_outputs": {"grammar": "start: " + "(" * 50_000}},
        {"structured_outputs": {"structural_tag": '{"format":' * 20_000}},
        {"structured_outputs": {"json": {"type": "x" * 50_000}}},
        {"response_format": {"type": "x" * 10**6}},
        {"stop": ["x" * 10**6]},
        {"n": "x" * 10**6},
        {"n": ["x" * 10**6]},
        {"n": {"x" * 10**6: 1}},
        {"model": "x" * 10**6},
        {"x" * 10**6: 1, "max_tokens": 0},
        {"tools": functions(200), "tool_choice": {"type": "function", "function": {"name": "none"}}},
    ],
    ids=lambda asked: "-".join(name[:9] for name in asked),
)
def test_no_error_holds_a_body(server: Running, asked):
    body = {**asked, "messages": message("q")}
    answer = cost(server, CHAT, json.dumps(body).encode()).answer
    assert answer.status in (400, 404)
    assert len(answer.body["error"]["message"]) < 2100


# Values of any field


def escaped(count: int) -> str:
    return "\\u00e9\\\\" * count


PAYLOADS: dict[str, Callable[[int], str]] = {
    "numbers": lambda n: f"[{'1,' * n}1]",
    "a wrong number at the end": lambda n: f"[{'1,' * n}{{}}]",
    "doubles": lambda n: f"[{'0.12345678901234567,' * (n // 8)}1]",
    "huge numbers": lambda n: f"[{('9' * 4000 + ',') * (n // 4000 + 1)}1]",
    "a huge number": lambda n: "9" * n,
    "texts": lambda n: f"[{chr(34)}{chr(34)}{(',' + chr(34) * 2) * (n // 3)}]",
    "a wrong text at the end": lambda n: f"[{(chr(34) + 'a' + chr(34) + ',') * (n // 4)}1]",
    "lists": lambda n: f"[{'[],' * (n // 3)}1]",
    "lists of lists": lambda n: f"[{'[[1]],' * (n // 6)}[[]]]",
    "objects": lambda n: f"[{'{},' * (n // 3)}1]",
    "objects of a type": lambda n: f"[{'{%stype%s:%sa%s},' % ((chr(34),) * 4) * (n // 13)}1]",
    "mapping": lambda n: "{" + ",".join(f'"k{i}": []' for i in range(n // 10)) + "}",
    "mapping of ids": lambda n: "{" + ",".join(f'"{i}": "a"' for i in range(n // 10)) + "}",
    "depth": lambda n: '{"a":[' * 90 + "1" + "]}" * 90,
    "too deep": lambda n: "[" * n + "]" * n,
    "a long text": lambda n: '"' + "a" * n + '"',
    "escapes": lambda n: '"' + escaped(n // 8) + '"',
    "pairs of surrogates": lambda n: '"' + "\\ud83d\\ude00" * (n // 12) + '"',
    "half a pair": lambda n: '"' + "a" * n + '\\ud800"',
    "nulls": lambda n: f"[{'null,' * (n // 5)}null]",
    "a truth": lambda n: "true",
}
REQUIRED: dict[str, Any] = {
    "prompt": "q",
    "messages": message("q"),
    "input": "q",
    "max_tokens": 1,
    "model_path": "a",
    "tokens": [5],
    "input_ids": [5],
}


def declared(kind: type[Body], name: str) -> type:
    """The class that gives a field its type."""
    return next(c for c in kind.__mro__ if name in getattr(c, "__annotations__", ()))


def fields() -> dict[tuple[type, str], type[Body]]:
    """A body for each field of any body, and for a field that it does not have."""
    found: dict[tuple[type, str], type[Body]] = {}
    for kind in {kind: None for route in ROUTES for kind in route.bodies}:
        found[kind, "unknown"] = kind
        for name in kind.model_fields:
            found.setdefault((declared(kind, name), name), kind)
    return found


FIELDS = fields()


def checked(runner: asyncio.Runner, kind: type[Body], text: bytes) -> tuple[int, str]:
    """(number of calls of Python's functions, the error's message) as a route reads a body."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": text, "more_body": False}

    message = ""
    request = Request({"type": "http", "headers": [], "state": {}}, receive)
    with counted() as calls:
        try:
            runner.run(read(SETTINGS, request, kind))
        except Exception as error:
            answer = as_api_error(error)
            assert answer.status in (400, 404, 413), answer
            message = answer.message
    return calls[0], message


@pytest.mark.parametrize("payload", PAYLOADS)
def test_any_value_in_any_field_costs_little(monkeypatch, payload):
    """Whatever a field holds: few errors, a short message, and twice the calls for twice as much."""
    told: list[int] = []
    of_validation = errors._of_validation
    monkeypatch.setattr(errors, "_of_validation", lambda e: told.append(e.error_count()) or of_validation(e))
    small, large = (PAYLOADS[payload](n) for n in SIZES)
    with asyncio.Runner() as runner:
        for (_, name), kind in FIELDS.items():
            field = kind.model_fields[name].alias if name in kind.model_fields else None
            rest = {k: v for k, v in REQUIRED.items() if k in kind.model_fields and k != name}
            texts = [
                f'{{"{field or name}": {value}, {json.dumps({**rest, "model": "tiny"})[1:]}'
                for value in (small, large)
            ]
            (one, _), (two, message) = (checked(runner, kind, text.encode()) for text in texts)
            assert two <= 2.2 * one, (kind, name, one, two)
            assert len(message) < LONGEST_MESSAGE
            assert max(told, default=0) <= ERRORS, (kind, name, message)


@pytest.mark.parametrize(
    ("kind", "part", "most"),
    [
        (ChatBody, {"type": "text", "text": "a"}, 7),
        (MessagesBody, {"type": "text", "text": "a"}, 7),
        (ResponsesBody, {"type": "input_text", "text": "a"}, 7),
    ],
)
def test_a_part_of_a_message_takes_few_calls(kind, part, most):
    """12,000 of them come in one body, while other requests wait."""

    def calls(parts: int) -> int:
        turns = [{"role": "user", "content": [part] * parts}]
        value = {"input": turns} if kind is ResponsesBody else {"messages": turns, "max_tokens": 1}
        with counted() as found:
            body = reading._checked(json.dumps(value).encode(), [kind])
            assert not list(body.unknown())
            conversation: Any = body if kind is ChatBody else body.conversation()
            assert conversation.characters >= parts
        return found[0]

    calls(10)
    assert calls(200) - calls(100) <= most * 100


@pytest.mark.rest
@pytest.mark.parametrize("field", ["metadata", "messages", "logit_bias"])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_body_at_the_limit_takes_bounded_memory(payload, field):
    value = PAYLOADS[payload](SETTINGS.max_body_bytes - 2_000)
    text = f'{{"model": "tiny", "{field}": {value}}}'.encode()[: SETTINGS.max_body_bytes]
    with asyncio.Runner() as runner:
        checked(runner, ChatBody, b"{}")
        tracemalloc.start()
        try:
            calls, _ = checked(runner, ChatBody, text)
            assert tracemalloc.get_traced_memory()[1] < MEMORY_PER_BYTE * len(text) + MEMORY
        finally:
            tracemalloc.stop()
    assert calls < CALLS
