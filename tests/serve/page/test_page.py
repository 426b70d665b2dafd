"""The chat page: its headers, its settings, and its looks."""

import re
from urllib.parse import urlsplit

import httpx2
import pytest
from playwright.sync_api import expect

from tests.serve.conftest import Running
from tests.serve.page.conftest import Opener, ask, body_of, browser_only, change_requests, finished, send


def test_nothing_comes_from_elsewhere_or_inline(client: httpx2.Client):
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>|javascript:", page.text)
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(links) >= 4
    for link in links:
        assert not urlsplit(link).netloc
        asset = client.get(link)
        assert asset.status_code == 200
        assert asset.headers["content-security-policy"] == page.headers["content-security-policy"]


def test_only_the_page_is_open_without_the_key(server: Running):
    guarded = server.variant(api_keys=("k",))
    assert guarded.get("/").status_code == guarded.get("/web/page.js").status_code == 200
    for path in (
        "/web",
        "/web/",
        "/web/index.html",
        "/web/../server_info",
        "/web//page.js",
        "/server_info",
    ):
        assert guarded.get(path).status_code == 401, path
    assert guarded.get("/", host="elsewhere.example").status_code == 403
    assert guarded.post("/").status_code == 401


@browser_only
@pytest.mark.rest
def test_options_are_sent_as_set(opened: Opener):
    page = opened()
    options = {"Top p": 0.9, "Top k": 20, "Min p": 0.05, "Seed": 7, "Depth": 2, "Temperature": 0.5}
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "abc", **{"Max tokens": 4}, **options)
    body = body_of(sent.value)
    set_to = {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 7, "temperature": 0.5, "max_tokens": 4}
    assert {name: body[name] for name in set_to} == set_to
    assert body["speculative"] == {"metrics": "summary", "max_tokens": 2}
    finished(page)
    page.get_by_label("Draft with MTP").uncheck()
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Regenerate").click()
    assert body_of(sent.value)["speculative"] == {"metrics": "summary", "enabled": False}
    finished(page)
    expect(page.locator(".answer .drafted")).to_have_count(0)
    # Without drafts nothing was accepted, and nothing is said of it.
    expect(page.locator(".figures")).to_have_text(
        re.compile(r"^4 tokens · \S+ tokens/s · first [^·]+ · length")
    )
    expect(page.get_by_role("button", name="Again without MTP")).to_have_count(0)


@browser_only
@pytest.mark.rest
def test_without_a_chat_template_it_completes_text(
    opened: Opener,
    server: Running,
    client: httpx2.Client,
    problems: list[str],
    monkeypatch: pytest.MonkeyPatch,
):
    tokenizer = server.allm.llm.tokenizer
    assert tokenizer is not None
    monkeypatch.setattr(tokenizer._template, "sources", {})
    page = opened()
    change_requests(page, ignore_eos=True)
    expect(page.get_by_label("Text completion")).to_be_checked()
    expect(page.get_by_label("Chat", exact=True)).to_be_disabled()
    answer = send(page, "abc")
    finished(page)
    expected = ask(client, "/v1/completions", prompt="abc")["choices"][0]["text"]
    assert answer.locator("> .text").text_content() == expected

    long = "a" * 300  # more than the model takes
    answer = send(page, long)
    refusal = ask(client, "/v1/completions", prompt=long)["error"]["message"]
    expect(answer.get_by_role("alert")).to_have_text(refusal)
    expect(page.get_by_role("button", name="Regenerate")).to_be_enabled()
    assert "400" in problems.pop()


@browser_only
@pytest.mark.rest
def test_a_model_without_a_chat_template_completes_text_alone(opened: Opener, server: Running):
    page = opened()
    expect(page.locator("#model")).to_have_text("tiny")
    expect(page.get_by_label("Chat", exact=True)).to_be_checked()
    info = server.variant().get("/server_info").json()
    assert info["has_chat_template"] is True
    page.route("**/server_info", lambda route: route.fulfill(json=info | {"has_chat_template": False}))
    page.reload()
    expect(page.get_by_label("Text completion")).to_be_checked()
    expect(page.get_by_label("Chat", exact=True)).to_be_disabled()


@browser_only
@pytest.mark.rest
def test_an_empty_page_introduces_the_model_and_offers_messages(opened: Opener, server: Running):
    page = opened()
    expect(page.locator("#about")).to_have_text("")
    told = {"introduction": {"about": "It <b>answers</b>.", "prompts": ["abc", "def"]}}
    info = server.variant().get("/server_info").json() | told
    page.route("**/server_info", lambda route: route.fulfill(json=info))
    page.reload()
    expect(page.locator("#about")).to_have_text("It <b>answers</b>.")
    page.get_by_label("Max tokens").fill("4")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="def").click()
    assert body_of(sent.value)["messages"] == [{"role": "user", "content": "def"}]
    finished(page)
    expect(page.locator("#welcome")).to_be_hidden()


@browser_only
@pytest.mark.rest
def test_an_enter_that_ends_a_composition_sends_nothing(opened: Opener):
    page = opened()
    prompt = page.get_by_role("textbox", name="Prompt")
    prompt.fill("abc")
    enter = {"key": "Enter", "keyCode": 229, "bubbles": True, "cancelable": True}  # Safari's
    prompt.dispatch_event("keydown", enter)
    expect(page.locator("article")).to_have_count(0)
    expect(prompt).to_have_value("abc")


@browser_only
@pytest.mark.rest
def test_dark_light_and_narrow(opened: Opener):
    page = opened(color_scheme="dark", viewport={"width": 360, "height": 640})

    def brightness() -> int:
        colour = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) // 3

    assert brightness() < 64
    page.get_by_role("button", name="Dark or light").click()
    assert brightness() > 192
    page.reload()
    assert brightness() > 192
    expect(page.get_by_role("complementary", name="Settings")).to_be_hidden()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Temperature")).to_be_visible()
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360
