"""Requests to an ASGI application in this process: the head, the pieces, the end, and a client that goes."""

import asyncio
from contextlib import aclosing

import pytest

from serve.http.in_process import AnswerHead, SentRequest, stream

CALL = SentRequest("POST", "/a", [(b"x-a", b"1")], b"body", b"q=1", ("h", 1))


def collect(app, call=CALL):
    async def run():
        async with aclosing(stream(app, call)) as parts:
            return [part async for part in parts]

    return asyncio.run(run())


async def start(send, status=200):
    await send({"type": "http.response.start", "status": status, "headers": [(b"x-b", b"2")]})


async def echo(scope, receive, send):
    message = await receive()
    assert (message["body"], message["more_body"]) == (b"body", False)
    assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/a", b"q=1")
    assert (scope["headers"], scope["client"]) == ([(b"x-a", b"1")], ("h", 1))
    await start(send)
    for piece in (b"one", b"", b"two"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def test_head_and_pieces():
    assert collect(echo) == [AnswerHead(200, [(b"x-b", b"2")]), b"one", b"two"]


def test_an_answer_that_breaks_off_raises_and_a_whole_one_does_not():
    async def breaks(scope, receive, send):
        await start(send)
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        raise RuntimeError("broken")

    async def raises_afterwards(scope, receive, send):
        await start(send, 500)
        await send({"type": "http.response.body", "body": b"sorry"})
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        collect(breaks)
    assert collect(raises_afterwards) == [AnswerHead(500, [(b"x-b", b"2")]), b"sorry"]


def test_to_end_the_iteration_is_to_disconnect():
    seen = []

    async def endless(scope, receive, send):
        await receive()
        await start(send)
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        seen.append((await receive())["type"])

    async def run():
        async with aclosing(stream(endless, CALL)) as parts:
            assert [await anext(parts), await anext(parts)] == [AnswerHead(200, [(b"x-b", b"2")]), b"one"]
            assert not seen
        for _ in range(3):
            await asyncio.sleep(0)
        assert seen == ["http.disconnect"]

    asyncio.run(run())
