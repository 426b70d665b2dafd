"""What the browser keeps when the page is loaded again."""

import pytest
from playwright.sync_api import expect

from mtp_jax import LLM
from tests.serve.conftest import start
from tests.serve.page.conftest import Opener, body_of, browser_only, change_requests, finished, send


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
    expect(page.get_by_label("Temperature")).to_have_value("0")
    for label, value in (("Temperature", ""), ("Max tokens", "512")):  # as at the beginning
        page.get_by_label(label).fill(value)
        page.get_by_label(label).press("Tab")
    assert page.evaluate("localStorage.length") == 0


@browser_only
@pytest.mark.rest
def test_settings_are_kept_and_ask_as_before(opened: Opener):
    page = opened()
    page.get_by_label("Text completion").check()
    page.get_by_label("Depth").fill("2")
    page.get_by_label("Mark drafted tokens").uncheck()
    with page.expect_request("**/v1/completions") as sent:
        send(page, "abc", **{"Seed": 7, "Top p": 0.5, "Max tokens": 4})
    finished(page)
    page.reload()
    expect(page.get_by_label("Text completion")).to_be_checked()
    expect(page.get_by_label("Mark drafted tokens")).not_to_be_checked()
    with page.expect_request("**/v1/completions") as again:
        page.get_by_role("button", name="Regenerate").click()
    assert body_of(again.value) == body_of(sent.value)
    finished(page)


@browser_only
@pytest.mark.rest
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
@pytest.mark.rest
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
@pytest.mark.rest
def test_the_key_is_asked_for(opened: Opener, fresh: LLM, problems: list[str]):
    with start(fresh, api_keys=("secret-key",)) as running:
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


@browser_only
@pytest.mark.rest
def test_without_storage_the_theme_changes_all_the_same(opened: Opener):
    page = opened(color_scheme="dark")
    refuse = "{ get() { throw new DOMException('blocked', 'SecurityError'); } }"
    page.add_init_script(f"Object.defineProperty(window, 'localStorage', {refuse})")
    page.reload()
    page.get_by_role("button", name="Dark or light").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
