"""A browser in front of the shared server, and what tests do with the page."""

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, Locator, Page, Request, Route, expect, sync_playwright

from tests.serve.conftest import Running

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


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A browser for one file, whose CPU time it is (tests/cpu_time.py)."""
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
