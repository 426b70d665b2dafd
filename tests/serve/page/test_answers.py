"""Answers on the page: how they grow, what is text, code blocks, and the same again without drafts."""

import random
import re
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Error, expect

from tests.serve.conftest import Running, wait_until
from tests.serve.page.conftest import Opener, ask, body_of, browser_only, change_requests, finished, send


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
@pytest.mark.rest
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
@pytest.mark.rest
def test_what_a_model_writes_is_text_and_its_thoughts_fold(
    opened: Opener, problems: list[str], monkeypatch: pytest.MonkeyPatch
):
    page = opened()
    thought, markup = "<i>so</i>", "<img src=x onerror=alert(1)><script>alert(2)</script>"
    # The grammar writes the thought, too: this model would not end one.
    monkeypatch.setattr("mtp_jax.text.grammar._behind_thought", lambda grammar, *_: grammar)
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
@pytest.mark.rest
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
@pytest.mark.rest
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
@pytest.mark.rest
def test_again_without_drafts_stands_beside_the_answer_with_its_seed(opened: Opener):
    page = opened(viewport={"width": 1200, "height": 700})
    change_requests(page, ignore_eos=True)
    with page.expect_request("**/v1/chat/completions") as sent:
        answer = send(page, "abc")
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
@pytest.mark.rest
def test_a_sampled_answer_is_compared_by_two_greedy_ones(opened: Opener, server: Running):
    page = opened()
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda sent: bodies.append(body_of(sent)) if sent.method == "POST" else None)
    change_requests(page, ignore_eos=True)
    send(page, "abc", Temperature=0.8)
    finished(page)
    page.get_by_role("button", name="Again without MTP").click()
    compared = re.compile(r"^With MTP: \d+\.\d\d times the tokens/s, the same text$")
    expect(page.locator(".compared")).to_have_text(compared)
    assert [body["temperature"] for body in bodies] == [0.8, 0, 0]
    assert [body["speculative"].get("enabled", True) for body in bodies] == [True, True, False]
    greedy, plain = (page.get_by_label(f"Greedy answer{own}", exact=True) for own in ("", " without MTP"))
    text = greedy.locator("> .text").text_content()
    assert text
    expect(plain.locator("> .text")).to_have_text(text, use_inner_text=False)
    page.reload()
    expect(page.locator(".compared")).to_have_text(compared)

    info = server.variant().get("/server_info").json()  # by one seed a coupled verifier writes one text
    page.route("**/server_info", lambda route: route.fulfill(json=info | {"verifier": "coupled"}))
    page.reload()
    expect(page.locator("#model")).to_have_text("tiny")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Again without MTP").click()
    assert body_of(sent.value)["temperature"] == 0.8
    finished(page)
    expect(page.locator("article.answer")).to_have_count(2)
