"""The chat page: its headers, and what it does in a real browser."""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from playwright.sync_api import Browser, Error, Locator, Page, Request, Route, expect, sync_playwright

from mtp_jax import LLM
from tests.serve.conftest import Running, start, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser_only = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
Opener = Callable[..., Page]
GO = {
    "type": "function",
    "function": {
        "name": "go",
        "parameters": {
            "type": "object",
            "properties": {"to": {"enum": ["here and there, " * 4]}},  # long enough to be seen to grow
            "required": ["to"],
            "additionalProperties": False,
        },
    },
}


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


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def problems() -> list[str]:
    """What the browser complains of. A test takes out what it provoked; anything left is a failure."""
    return []


@pytest.fixture
def opened(chromium: Browser, server: Running, problems: list[str]) -> Iterator[Opener]:
    """Opens the page, by default that of the shared server."""
    contexts = []

    def open_page(url: str = server.url, **options: Any) -> Page:
        contexts.append(context := chromium.new_context(**options))
        page = context.new_page()
        page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def body_of(request: Request) -> dict[str, Any]:
    return json.loads(request.post_data or "")


def change_requests(page: Page, **fields: Any) -> None:
    """Add to what the page sends."""

    def change(route: Route) -> None:
        route.continue_(post_data=json.dumps(body_of(route.request) | fields))

    page.route("**/v1/**", change)


def send(page: Page, text: str, **options: Any) -> Locator:
    """Send a prompt greedily; returns the answer."""
    for label, value in ({"Temperature": 0, "Max tokens": 40} | options).items():
        page.get_by_label(label).fill(str(value))
    prompt = page.get_by_role("textbox", name="Prompt")
    prompt.fill(text)
    prompt.press("Enter")
    return page.locator(".answer").last


def finished(page: Page) -> None:
    expect(page.get_by_role("button", name="Stop")).to_be_hidden(timeout=60_000)


def ask(client: httpx2.Client, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    """What the API answers, asked for the same as ``send`` asks for."""
    options = {
        "temperature": 0,
        "max_tokens": 40,
        "ignore_eos": True,
        "return_token_origins": True,
        "speculative": {"metrics": "summary"},
    }
    return client.post(path, json=options | body).json()


@browser_only
@pytest.mark.usefixtures("slow_steps")
def test_an_answer_grows_with_marks_and_figures(opened: Opener, client: httpx2.Client):
    page = opened()
    change_requests(page, ignore_eos=True)
    answer = send(page, "abc")
    text = answer.locator("> .text")
    expect(text).not_to_be_empty()
    early = text.text_content() or ""
    finished(page)
    expected = ask(client, messages=[{"role": "user", "content": "abc"}])
    (choice,) = expected["choices"]
    assert text.text_content() == choice["message"]["content"]
    assert 0 < len(early) < len(choice["message"]["content"])

    tokens = choice["token_origins"]
    steps = sum(not token["drafted"] for token in tokens) - 1 + tokens[-1]["drafted"]
    marks = text.locator("span").evaluate_all("spans => spans.map(s => s.className === 'drafted')")
    assert marks == [token["drafted"] for token in tokens if token["text"]]
    assert 0 < sum(marks) < len(marks)
    colour = "span => getComputedStyle(span).backgroundColor"
    assert text.locator(".drafted").first.evaluate(colour) != text.locator("span").first.evaluate(colour)

    figures = answer.locator(".figures").inner_text()
    shown = re.fullmatch(
        r"40 tokens · (\d+\.\d) tokens/s · first token after (\d+) ms · acceptance length (\d\.\d\d)"
        r" · (\d+) of (\d+) drafts accepted · length limit reached",
        figures,
    )
    assert shown, figures
    drafts = expected["metrics"]["speculative_decoding"]
    assert float(shown[1]) > 0
    assert int(shown[2]) >= 50
    assert float(shown[3]) == pytest.approx(39 / steps, abs=0.005)
    assert float(shown[3]) > 1.5
    assert [int(shown[4]), int(shown[5])] == [
        drafts["num_accepted_draft_tokens"],
        drafts["num_draft_tokens"],
    ]


@browser_only
@pytest.mark.usefixtures("slow_steps")
def test_stop_regenerate_go_on_and_clear(opened: Opener, server: Running):
    page, engine = opened(), server.allm.llm.engine
    aborts = engine.stats().finished.get("abort", 0)
    change_requests(page, ignore_eos=True)
    answer = send(page, "abc", **{"Max tokens": 200})
    expect(answer.locator("> .text")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(answer.locator(".figures")).to_contain_text("stopped")
    stopped = answer.locator("> .text").text_content() or ""
    finished(page)
    wait_until(lambda: engine.stats().finished.get("abort", 0) > aborts)  # the server has noticed, too
    page.get_by_label("Max tokens").fill("8")
    page.get_by_role("button", name="Regenerate").click()
    finished(page)
    expect(page.locator(".answer")).to_have_count(1)
    expect(page.locator(".figures")).to_contain_text("8 tokens")
    first = page.locator(".answer > .text").text_content() or ""
    assert first.startswith(stopped[: len(first)])
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "def", **{"Max tokens": 4})
    assert body_of(sent.value)["messages"] == [
        {"role": "user", "content": "abc"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "def"},
    ]
    finished(page)
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("article")).to_have_count(0)
    expect(page.get_by_role("textbox", name="Prompt")).to_be_focused()


@browser_only
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
def test_what_a_model_writes_is_text_and_its_thoughts_fold(
    opened: Opener, problems: list[str], monkeypatch: pytest.MonkeyPatch
):
    page = opened()
    thought, markup = "<i>so</i>", "<img src=x onerror=alert(1)><script>alert(2)</script>"
    # The grammar writes the thought, too: this model would not end one.
    monkeypatch.setattr("mtp_jax.text.grammar._behind_thought", lambda grammar, _: grammar)
    change_requests(page, structured_outputs={"choice": [f"{thought}</think>{markup}"]})
    page.get_by_label("Think first").check()
    answer = send(page, "<b>abc</b>", **{"Max tokens": 200})
    finished(page)
    expect(page.locator(".prompt")).to_have_text("<b>abc</b>")
    expect(answer.locator("> .text")).to_have_text(markup)
    expect(answer.locator("details .text")).to_have_text(thought)
    expect(answer.locator("details")).not_to_have_attribute("open", "")
    assert page.locator("article").locator("b, i, img, script").count() == 0
    assert answer.locator("span[title]").count() == len(thought) + len(markup)  # one token per character
    with pytest.raises(Error, match="TrustedHTML"):
        page.locator("#log").evaluate("log => { log.innerHTML = '<b>x</b>' }")
    problems[:] = [p for p in problems if "TrustedHTML" not in p]


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


CODE = """So <b>this</b>:
```python
x = "<i>`` ~~~"
    ```
```
and ` ~~ ``that``
~~~
y
```
~~~~
done"""


@browser_only
def test_fences_make_blocks_of_text_that_can_be_copied(opened: Opener):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    change_requests(page, structured_outputs={"choice": [CODE]})
    answer = send(page, "abc", **{"Max tokens": 200})
    finished(page)
    blocks = answer.locator("pre code")
    assert blocks.all_text_contents() == ['x = "<i>`` ~~~"\n    ```\n', "y\n```\n"]
    assert answer.locator(".code-bar span").all_text_contents() == ["python", ""]
    assert answer.locator("b, i").count() == 0
    assert blocks.locator(".drafted").count() > 0
    around = "body => [...body.children].filter(e => e.tagName === 'SPAN').map(e => e.textContent).join('')"
    assert answer.locator("> .text").evaluate(around) == "So <b>this</b>:\nand ` ~~ ``that``\ndone"
    blocks.nth(1).locator("xpath=../..").get_by_role("button", name="Copy").click()
    expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "y\n```\n"
    answer.locator("> .actions").get_by_role("button", name="Copy").click()
    expect(answer.locator("> .actions").get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == CODE


LAYOUT = """async texts => {
  const { Blocks } = await import("/web/blocks.js");
  return texts.map(pieces => {
    const shown = document.createElement("div");
    const blocks = new Blocks(shown);
    for (const piece of pieces) blocks.push(piece, text => document.createTextNode(text));
    blocks.close();
    const parts = [];
    for (const node of shown.childNodes) {
      const code = node.nodeType === 1;
      const text = code ? node.querySelector("code").textContent : node.textContent;
      if (!code && parts.length && !parts.at(-1)[0]) parts.at(-1)[1] += text;
      else parts.push([code, text]);
    }
    return parts;
  });
}"""


@browser_only
def test_blocks_do_not_depend_on_where_the_text_was_cut(opened: Opener):
    """As CommonMark's section on fenced code blocks has them."""
    cases: list[tuple[str, list[list[Any]]]] = [
        ("no\n``\nfence ```", [[False, "no\n``\nfence ```"]]),
        ("```\na\n```", [[True, "a\n"]]),
        ("   ````x y\na\n```\n  `````  \nb", [[True, "a\n```\n"], [False, "b"]]),
        ("    ```\na", [[False, "    ```\na"]]),
        ("``` a`b\nc", [[False, "``` a`b\nc"]]),
        ("~~~ a`b\nc\n\n", [[True, "c\n\n"]]),
        ("```\na\n``` b\n", [[True, "a\n``` b\n"]]),
        ("a\n```", [[False, "a\n"], [True, ""]]),
        ("```\n```\n\n~~~\n~~~\n", [[True, ""], [False, "\n"], [True, ""]]),
    ]
    rng = random.Random(0)
    given, expected = [], []
    for text, parts in cases:
        cuts = [sorted(rng.sample(range(1, len(text)), rng.randint(0, len(text) - 1))) for _ in range(20)]
        for cut in ([], list(range(1, len(text))), *cuts):
            given.append([text[a:b] for a, b in pairwise([0, *cut, len(text)])])
            expected.append(parts)
    assert opened().evaluate(LAYOUT, given) == expected


@browser_only
def test_again_without_drafts_stands_beside_the_answer_with_its_seed(opened: Opener):
    page = opened(viewport={"width": 1200, "height": 700})
    change_requests(page, ignore_eos=True)
    with page.expect_request("**/v1/chat/completions") as sent:
        answer = send(page, "abc", Temperature=0.8)
    first = body_of(sent.value)
    finished(page)
    page.get_by_label("Temperature").fill("0.1")  # what is asked again does not change
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Again without MTP").click()
    again = body_of(sent.value)
    assert again.pop("speculative") == {"metrics": "summary", "enabled": False}
    assert first.pop("speculative") == {"metrics": "summary"}
    assert again == first
    assert 0 <= first["seed"] < 2**32
    finished(page)
    answer, twin = page.get_by_label("Answer", exact=True), page.get_by_label("Answer without MTP")
    text = answer.locator("> .text").text_content()
    assert text
    expect(twin.locator("> .text")).to_have_text(text, use_inner_text=False)
    expect(answer.locator(".drafted")).not_to_have_count(0)
    expect(twin.locator(".drafted")).to_have_count(0)
    expect(twin.locator(".figures")).not_to_contain_text("acceptance")
    expect(page.locator(".compared")).to_have_text(
        re.compile(r"^With MTP: \d+\.\d\d times the tokens/s, the same text$")
    )
    left, right = answer.bounding_box(), twin.bounding_box()
    assert left
    assert right
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]

    with page.expect_request("**/v1/chat/completions") as sent:  # only the answer is told on
        send(page, "def", **{"Max tokens": 4})
    assert [m["role"] for m in body_of(sent.value)["messages"]] == ["user", "assistant", "user"]
    finished(page)
    page.get_by_role("button", name="Again without MTP").first.click()
    finished(page)
    expect(page.locator("article.answer")).to_have_count(3)


@browser_only
def test_a_conversation_is_kept_until_it_is_cleared(opened: Opener):
    page = opened()
    change_requests(page, ignore_eos=True)
    page.get_by_label("System message").fill("be <b>brief</b>")
    answer = send(page, "abc")
    finished(page)
    page.get_by_role("button", name="Again without MTP").click()
    finished(page)
    shown = "log => [log.innerHTML.replaceAll(/Copied/g, 'Copy'), log.querySelectorAll('.drafted').length]"
    before = page.locator("#log").evaluate(shown)
    assert before[1] > 0
    text = answer.locator("> .text").text_content()
    page.reload()
    assert page.locator("#log").evaluate(shown) == before
    page.unroute_all()
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "def", **{"Max tokens": 4})
    assert body_of(sent.value)["messages"] == [
        {"role": "system", "content": "be <b>brief</b>"},
        {"role": "user", "content": "abc"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "def"},
    ]
    finished(page)
    page.get_by_label("System message").fill("")
    page.get_by_role("button", name="Clear").click()
    page.reload()
    expect(page.locator("article")).to_have_count(0)
    assert page.evaluate("localStorage.length") == 0


@browser_only
@pytest.mark.usefixtures("slow_steps")
def test_an_answer_that_a_reload_cut_is_kept_as_far_as_it_came(opened: Opener):
    page = opened()
    change_requests(page, ignore_eos=True)
    answer = send(page, "abc", **{"Max tokens": 200})
    expect(answer.locator("> .text")).not_to_be_empty()
    page.reload()
    expect(answer.locator(".figures")).to_contain_text("interrupted")
    expect(answer.locator("> .text")).not_to_be_empty()
    page.get_by_label("Max tokens").fill("4")
    page.get_by_role("button", name="Regenerate").click()
    finished(page)
    expect(answer.locator(".figures")).to_contain_text("length limit reached")


@browser_only
def test_where_storage_is_full_or_holds_something_else_the_page_goes_on(opened: Opener):
    page = opened()
    script = """async () => {
      const { keep, kept } = await import("/web/kept.js");
      keep({ exchanges: ["a".repeat(4e6), "b".repeat(4e6), "c"] });
      const [first, second] = kept().exchanges;
      return [first.slice(0, 1), second];
    }"""
    assert page.evaluate(script) == ["b", "c"]
    for text in ("{", "null", '{"form": 0, "exchanges": [1]}'):
        page.evaluate("text => localStorage.setItem('conversation', text)", text)
        page.reload()
        expect(page.locator("#model")).to_have_text("tiny")


@browser_only
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
def test_the_key_is_asked_for(opened: Opener, fresh: LLM, problems: list[str]):
    running = start(fresh, api_keys=("secret-key",))
    try:
        page = opened(running.url)
        expect(page.locator("#notice")).to_contain_text("a valid API key is needed")
        expect(page.get_by_label("API key")).to_be_focused()
        assert "401" in problems.pop()
        page.get_by_label("API key").fill("secret-key")
        answer = send(page, "abc", **{"Max tokens": 4})
        finished(page)
        expect(page.locator("#notice")).to_be_hidden()
        expect(page.locator("#model")).to_have_text("tiny")
        expect(answer.locator("> .text")).not_to_be_empty()
        page.reload()
        expect(page.locator("article")).to_have_count(2)  # the browser keeps all but the key
        assert "401" in problems.pop()
        kept = page.evaluate(
            "() => JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
        )
        assert "conversation" in kept
        assert "secret" not in kept
        expect(page.get_by_label("API key")).to_have_value("")
    finally:
        running.stop()


@browser_only
def test_an_enter_that_ends_a_composition_sends_nothing(opened: Opener):
    page = opened()
    prompt = page.get_by_role("textbox", name="Prompt")
    prompt.fill("abc")
    enter = {"key": "Enter", "keyCode": 229, "bubbles": True, "cancelable": True}  # Safari's
    prompt.dispatch_event("keydown", enter)
    expect(page.locator("article")).to_have_count(0)
    expect(prompt).to_have_value("abc")


@browser_only
def test_without_storage_the_theme_changes_all_the_same(opened: Opener):
    page = opened(color_scheme="dark")
    refuse = "{ get() { throw new DOMException('blocked', 'SecurityError'); } }"
    page.add_init_script(f"Object.defineProperty(window, 'localStorage', {refuse})")
    page.reload()
    page.get_by_role("button", name="Dark or light").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")


@browser_only
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
