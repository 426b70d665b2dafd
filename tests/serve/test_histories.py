"""Histories with parts that the model cannot read: no conversation ends of its past."""

from typing import Any

import httpx2
import pytest

from serve.bodies.unread import Unread
from tests.serve.conftest import Running

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COUNT = f"{MESSAGES}/count_tokens"
MOST = {CHAT: {"max_tokens": 2}, MESSAGES: {"max_tokens": 2}, RESPONSES: {"max_output_tokens": 2}}
SEEN = "[an image, which this model cannot read]"
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
IMAGE = {"type": "image", "source": PNG}
URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
INPUT = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
HELLO = {"role": "user", "content": "say hello"}


def text(said: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": said}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def answer(said: str) -> dict[str, Any]:
    return {"role": "assistant", "content": said}


def history(route: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
    return {"input" if route == RESPONSES else "messages": turns, **MOST[route]}


def asked(client: httpx2.Client, route: str, turns: list[dict[str, Any]]) -> httpx2.Response:
    found = client.post(route, json=history(route, turns))
    assert found.status_code == 200, found.text
    return found


def count(client: httpx2.Client, route: str, turns: list[dict[str, Any]]) -> int:
    """Number of the prompt's tokens."""
    usage = asked(client, route, turns).json()["usage"]
    if route == MESSAGES:
        counted = client.post(COUNT, json={"messages": turns}).json()["input_tokens"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
        return counted
    return next(usage[name] for name in ("prompt_tokens", "input_tokens") if name in usage)


def tool_use(*content: dict[str, Any]) -> list[dict[str, Any]]:
    """A call and its result in Anthropic's shapes."""
    use = {"type": "tool_use", "id": "t", "name": "Read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [*content]}
    return [HELLO, {"role": "assistant", "content": [use]}, user(result)]


def tool_call(content: Any) -> list[dict[str, Any]]:
    """The same in OpenAI's."""
    call = {"id": "t", "type": "function", "function": {"name": "Read", "arguments": "{}"}}
    turns = [HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    return [*turns, {"role": "tool", "tool_call_id": "t", "content": content}]


def items(output: Any) -> list[dict[str, Any]]:
    """The same as items."""
    call = {"type": "function_call", "call_id": "t", "name": "Read", "arguments": "{}"}
    return [HELLO, call, {"type": "function_call_output", "call_id": "t", "output": output}]


@pytest.mark.parametrize(
    ("route", "turns", "plain", "path"),
    [
        (MESSAGES, tool_use(IMAGE), tool_use(text(SEEN)), "messages.2.content.0.content.0.image"),
        (
            MESSAGES,
            [user(IMAGE, text("?")), answer("a"), HELLO],
            [user(text(f"{SEEN}?")), answer("a"), HELLO],
            "messages.0.content.0.image",
        ),
        (MESSAGES, [user(IMAGE), HELLO], [user(text(SEEN)), HELLO], "messages.0.content.0.image"),
        # A message that was refused, and the next one, which Claude Code joins.
        (
            MESSAGES,
            [user(text("?"), IMAGE, text("never mind"))],
            [user(text(f"?{SEEN}never mind"))],
            "messages.0.content.1.image",
        ),
        # A tool's picture may stand beside its result.
        (
            MESSAGES,
            [*tool_use(text("r"))[:-1], user(*tool_use(text("r"))[-1]["content"], IMAGE)],
            [*tool_use(text("r"))[:-1], user(*tool_use(text("r"))[-1]["content"], text(SEEN))],
            "messages.2.content.1.image",
        ),
        (
            MESSAGES,
            [*tool_use(text("r")), user(IMAGE)],
            [*tool_use(text("r")), user(text(SEEN))],
            "messages.3.content.0.image",
        ),
        (RESPONSES, items([INPUT]), items(SEEN), "input.2.output.0.input_image"),
        (
            RESPONSES,
            [user(text("?", "input_text"), INPUT), answer("a"), HELLO],
            [user(text(f"?{SEEN}", "input_text")), answer("a"), HELLO],
            "input.0.content.1.input_image",
        ),
        (
            RESPONSES,
            [*items("r"), user(INPUT)],
            [*items("r"), user(text(SEEN, "input_text"))],
            "input.3.content.0.input_image",
        ),
        (CHAT, tool_call([text("done"), URL]), tool_call(f"done{SEEN}"), "messages.2.content.1.image_url"),
        (CHAT, [user(URL), answer("a"), HELLO], [user(text(SEEN)), answer("a"), HELLO], "messages.0"),
        (
            CHAT,
            [*tool_call("r"), user(text("shot"), URL)],
            [*tool_call("r"), user(text(f"shot{SEEN}"))],
            "messages.3.content.1.image_url",
        ),
    ],
)  # fmt: skip
def test_a_text_stands_in_the_place_of_a_picture(client, server: Running, route, turns, plain, path):
    assert count(client, route, turns) == count(client, route, plain)
    assert path in asked(client, route, turns).headers["warning"]
    refused = server.variant(strict=True).post(route, json=history(route, turns))
    assert (refused.status_code, path in refused.text) == (400, True)
    assert server.variant(strict=True).post(route, json=history(route, plain)).status_code == 200


@pytest.mark.parametrize(
    ("route", "turns", "says"),
    [
        (CHAT, [user(text("?"), URL)], "messages.0.content.1: is not text; this server takes no images"),
        (CHAT, [user(URL), answer("a"), user(URL)], "messages.2.content.0: is not text"),
        (MESSAGES, [HELLO, answer("a"), user(text("?"), IMAGE)], "messages.2.content.1: is not text"),
        (RESPONSES, [HELLO, user(text("?", "input_text"), INPUT)], "input.1.content.1: is not text"),
        (
            RESPONSES,
            [user(INPUT), {"type": "additional_tools", "role": "developer", "tools": []}],
            "input.0.content.0: is not text",
        ),
    ],
)
def test_a_picture_in_the_newest_message_of_the_user_is_refused(client, route, turns, says):
    refused = client.post(route, json=history(route, turns))
    assert refused.status_code == 400
    assert says in refused.json()["error"]["message"]
    if route == MESSAGES:
        assert client.post(COUNT, json={"messages": turns}).status_code == 400


@pytest.mark.parametrize(
    ("route", "part", "place"),
    [
        (MESSAGES, {"type": "document", "source": {"type": "base64", "data": "JVBERi0="}}, "a document"),
        (MESSAGES, {"type": "document", "source": {"type": "url", "url": "u"}}, "a document"),
        (MESSAGES, {"type": "document", "source": {"type": "file", "file_id": "f"}}, "a document"),
        (MESSAGES, {"type": "container_upload", "file_id": "f"}, "a file"),
        (RESPONSES, {"type": "input_file", "file_data": "data:,"}, "a file"),
        (RESPONSES, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "a recording"),
        (RESPONSES, {"type": "input_video", "video_url": "u"}, "a video"),
        (CHAT, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "a recording"),
        (CHAT, {"type": "file", "file": {"file_id": "f"}}, "a file"),
        (CHAT, {"type": "video_url", "video_url": {"url": "u"}}, "a video"),
        (CHAT, {"type": "image", "image": "u"}, "an image"),
    ],
)
def test_other_things_that_a_model_of_text_cannot_read(client, route, part, place):
    before = [user(part), answer("a"), HELLO]
    plain = [{"role": "user", "content": f"[{place}, which this model cannot read]"}, answer("a"), HELLO]
    assert count(client, route, before) == count(client, route, plain)
    refused = client.post(route, json=history(route, [user(part)]))
    assert refused.status_code == 400
    assert "is not text" in refused.json()["error"]["message"]


def test_a_megabyte_of_a_picture_weighs_nothing():
    assert Unread.model_validate({**IMAGE, "data": "A" * 2**20}).model_dump_json() == (
        '{"type":"image","said":null}'
    )


def test_text_in_documents_and_results_stays(client):
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "one"}}
    parts = {"type": "document", "source": {"type": "content", "content": [text("two"), IMAGE]}}
    found = {"type": "search_result", "title": "t", "source": "s", "content": [text("three")]}
    reference = {"type": "tool_reference", "tool_name": "Edit"}
    plain = tool_use(text(f"onetwo{SEEN}three[the tool Edit]"))
    turns = tool_use(document, parts, found, reference)
    assert count(client, MESSAGES, turns) == count(client, MESSAGES, plain)
    assert "warning" not in asked(client, MESSAGES, turns).headers


def test_parts_of_unknown_types_are_left_out_or_read_by_their_text(client):
    later = {"type": "of_next_year", "data": "x"}
    for route in (CHAT, MESSAGES, RESPONSES):
        told = asked(client, route, [user(text("a"), later, text("b", "new_text"))])
        assert "content.1.of_next_year" in told.headers["warning"]
        assert "new_text" not in told.headers["warning"]
        assert count(client, route, [user(text("a"), later, text("b", "new_text"))]) == count(
            client, route, [user(text("ab"))]
        )


def test_a_thought_with_a_part_of_an_unknown_type(client):
    thought = {"type": "reasoning", "summary": [text("s", "summary_text"), {"type": "of_next_year"}]}
    plain = {**thought, "summary": thought["summary"][:1]}
    turns = [[HELLO, one, answer("a"), HELLO] for one in (thought, plain)]
    assert count(client, RESPONSES, turns[0]) == count(client, RESPONSES, turns[1])


@pytest.mark.parametrize(
    "item",
    [
        {"type": "context_compaction", "id": "c", "encrypted_content": "AA"},
        {"type": "compaction", "id": "c", "encrypted_content": "AA"},
        {"type": "some_item_of_next_year", "id": "c"},
        {"type": "program_output", "call_id": "c", "result": "r", "status": "completed"},
    ],
)
def test_items_that_nobody_here_can_read_are_left_out(client, server: Running, item):
    turns = [HELLO, item, HELLO]
    told = asked(client, RESPONSES, turns)
    assert told.headers["warning"] == f'299 mtp-jax "ignored: input.1.{item["type"]}"'
    assert count(client, RESPONSES, turns) == count(client, RESPONSES, [HELLO, HELLO])
    assert server.variant(strict=True).post(RESPONSES, json=history(RESPONSES, turns)).status_code == 400


def test_what_is_nowhere_is_refused(client):
    for body in (
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": "q", "previous_response_id": "r"},
    ):
        assert client.post(RESPONSES, json=body).status_code == 400


def summary(content: str | None, *more: dict[str, Any], **fields: Any) -> dict[str, Any]:
    block = {"type": "compaction", "content": content, "encrypted_content": "AA", **fields}
    return {"role": "assistant", "content": [*more, block]}


PLAN = {"role": "user", "content": "Summary of the conversation before:\n\nplan B"}


@pytest.mark.parametrize(
    ("turns", "plain"),
    [
        ([HELLO, summary("plan B"), HELLO], [PLAN, HELLO]),
        ([HELLO, summary("plan A"), HELLO, summary("plan B"), HELLO], [PLAN, HELLO]),
        ([HELLO, summary("plan B", text("before")), HELLO], [PLAN, HELLO]),
        ([HELLO, summary(None), HELLO], [HELLO, HELLO]),
        ([HELLO, summary("plan B")], [PLAN]),
        # Calls go with their results.
        ([*tool_use(text("r"))[:-1], summary("plan B"), tool_use(text("r"))[-1], HELLO], [PLAN, HELLO]),
        (
            [
                HELLO,
                {**summary("plan B"), "content": [*summary("plan B")["content"], *tool_use()[1]["content"]]},
                tool_use(text("r"))[-1],
            ],
            [PLAN, *tool_use(text("r"))[1:]],
        ),
    ],
)
def test_a_summary_stands_for_all_before_it(client, turns, plain):
    told = client.post(MESSAGES, json={**history(MESSAGES, turns), "system": "s"})
    assert told.status_code == 200, told.text
    assert "warning" not in told.headers
    bodies = [{"messages": one, "system": "s"} for one in (turns, plain)]
    first, second = (client.post(COUNT, json=body).json() for body in bodies)
    assert first == second


def test_a_summary_changes_the_tools(client):
    """Those that messages before it had added."""
    tool = {"type": "tool_definition", "definition": {"name": "go", "input_schema": {}}}
    turns = [HELLO, summary("s", tool_changes=[{"type": "tool_addition", "tool": tool}]), HELLO]
    choice = {"tool_choice": {"type": "tool", "name": "go"}}
    told = client.post(MESSAGES, json={"messages": turns, **choice, "max_tokens": 60, "temperature": 0})
    assert [block["name"] for block in told.json()["content"]] == ["go"]
