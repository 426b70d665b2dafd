"""Tools on the page: which may be called, which is forced, and what came of a call."""

import json

import httpx2
import pytest
from playwright.sync_api import expect

from tests.serve.page.conftest import GO, Opener, ask, body_of, browser_only, finished, send


@browser_only
@pytest.mark.usefixtures("slow_steps")
def test_a_call_grows_and_its_result_is_sent(opened: Opener, client: httpx2.Client):
    page = opened()
    choice = {"type": "function", "function": {"name": "go"}}
    forced = {"tools": [GO], "tool_choice": choice, "parallel_tool_calls": False}
    page.get_by_label("Tools that it may call").fill(json.dumps([GO]))
    page.get_by_label("Tool choice").select_option("go")
    with page.expect_request("**/v1/chat/completions") as sent:
        answer = send(page, "abc", **{"Max tokens": 190})
    body = body_of(sent.value)
    assert {name: body[name] for name in forced} == forced
    call = answer.get_by_role("region", name="Call")
    arguments = call.locator(".text")
    expect(arguments).not_to_be_empty()
    early = arguments.text_content() or ""
    finished(page)
    user = {"role": "user", "content": "abc"}
    told = ask(client, messages=[user], max_tokens=190, ignore_eos=False, **forced)
    message = told["choices"][0]["message"]
    expected = message["tool_calls"][0]["function"]
    expect(call.locator("code")).to_have_text("go")
    written = arguments.text_content() or ""
    assert written.strip() == expected["arguments"]
    assert len(early) < len(written)
    expect(answer.locator(".figures")).to_contain_text("waits for results")
    expect(page.get_by_role("button", name="Send results")).to_be_in_viewport()

    page.reload()  # the calls are kept, and their results still asked for
    expect(page.get_by_label("Tool choice")).to_have_value("tool:go")
    page.get_by_label("Max tokens").fill("8")
    page.get_by_label("Result of go").fill("<b>warm</b>")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send results").click()
    body = body_of(sent.value)
    assert body["tools"] == [GO]
    assert "tool_choice" not in body  # or calls would follow for ever
    (made,) = body["messages"][1].pop("tool_calls")
    assert made["function"] == {"name": "go", "arguments": written}
    text = answer.locator("> .text").text_content()
    assert body["messages"] == [
        user,
        {"role": "assistant", "content": text},
        {"role": "tool", "tool_call_id": made["id"], "content": "<b>warm</b>"},
    ]
    finished(page)
    expect(page.get_by_label("Result", exact=True)).to_have_text("<b>warm</b>")
    expect(page.get_by_label("Result of go")).to_have_count(0)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator(".answer")).to_have_count(2)


@browser_only
@pytest.mark.rest
def test_calls_without_results_are_not_told_again(opened: Opener):
    page = opened()
    page.get_by_label("Tool choice").select_option("some tool")
    tools = page.get_by_label("Tools that it may call")
    tools.fill("{}")
    send(page, "abc", **{"Max tokens": 190})
    expect(page.locator("article")).to_have_count(0)
    assert "this is no list" in tools.evaluate("field => field.validationMessage")
    tools.fill(json.dumps([GO]))
    send(page, "abc", **{"Max tokens": 190})
    finished(page)
    expect(page.get_by_label("Result of go")).to_be_visible()
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "def", **{"Max tokens": 190})
    assert body_of(sent.value)["messages"][-1] == {"role": "user", "content": "def"}
    assert not any("tool_calls" in message for message in body_of(sent.value)["messages"])
    finished(page)
    expect(page.get_by_label("Result of go")).to_have_count(1)  # of the new call


@browser_only
@pytest.mark.rest
def test_a_choice_of_tools_follows_the_list(opened: Opener):
    page = opened()
    tools, choice = page.get_by_label("Tools that it may call"), page.get_by_label("Tool choice")
    named = [{"type": "function", "function": {"name": name}} for name in ("auto", "<b>")]
    tools.fill(json.dumps(named))
    assert choice.locator("option").all_text_contents() == ["auto", "some tool", "no tool", "auto", "<b>"]
    choice.select_option("<b>")
    tools.fill(json.dumps(named[1:]))
    expect(choice).to_have_value("tool:<b>")
    tools.fill("[")
    expect(choice).to_have_value("auto")
    tools.fill(json.dumps([GO]))
    choice.select_option("no tool")
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "abc", **{"Max tokens": 4})
    body = body_of(sent.value)
    assert (body["tool_choice"], body["tools"]) == ("none", [GO])
    finished(page)
