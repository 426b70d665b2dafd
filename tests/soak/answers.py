"""What a soak gets, and what can be wrong with it."""

import asyncio
import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2
import jsonschema

from tests.soak.requests import Asked


@dataclass(frozen=True)
class Got:
    """What came of a request.

    Attributes:
        status: of HTTP; None if the client disconnected.
        choices, texts, reasons: token ids, text and finish reason by index.
        refusal: the message of an error.
        error: what was wrong with the answer itself.
    """

    status: int | None
    choices: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    refusal: str = ""
    error: str | None = None


async def ask(http: httpx2.AsyncClient, asked: Asked) -> Got:
    """Send it; disconnect when its patience ends."""
    try:
        async with asyncio.timeout(asked.patience):
            async with http.stream("POST", asked.url, content=asked.body) as response:
                if "text/event-stream" in response.headers.get("content-type", ""):
                    return await _stream(response)
                body = json.loads(await response.aread())
                return _answer(response.status_code, body)
    except TimeoutError:
        return Got(None)
    except (httpx2.HTTPError, ValueError) as error:
        return Got(None, error=f"{type(error).__name__}: {error}")


def _answer(status: int, body: dict[str, Any]) -> Got:
    refusal = body.get("error", {}).get("message", "")
    got = Got(status, refusal=refusal, error=None if status == 200 or refusal else "no error object")
    for choice in body.get("choices", ()):
        _add(got, choice, choice.get("message", choice))
    return got


async def _stream(response: httpx2.Response) -> Got:
    got, ended, error = Got(response.status_code), False, None
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            ended = True
        elif line.startswith("data: "):
            chunk = json.loads(line.removeprefix("data: "))
            error = error or chunk.get("error")
            for choice in chunk.get("choices", ()):
                _add(got, choice, choice.get("delta", choice))
    wrong = str(error) if error else None if ended else "the stream ended without [DONE]"
    return replace(got, error=wrong)


def _add(got: Got, choice: dict[str, Any], said: dict[str, Any]) -> None:
    index = choice["index"]
    got.choices.setdefault(index, []).extend(choice.get("token_ids") or [])
    text = said.get("text") or said.get("content") or ""
    got.texts[index] = got.texts.get(index, "") + text
    if choice.get("finish_reason"):
        got.reasons[index] = choice["finish_reason"]


def faults(asked: Asked, got: Got) -> list[str]:
    """What is wrong with an answer, as far as the answer shows it."""
    shown = asked.body[:200].decode(errors="replace")
    if got.error:
        return [f"{got.error}: {shown}"]
    if asked.kind == "invalid":
        ok = got.status is not None and 400 <= got.status < 500
        return [] if ok else [f"invalid, but status {got.status}: {shown}"]
    if got.status is None:
        return [] if asked.kind == "aborted" else [f"lost: {shown}"]
    if got.status != 200:
        return [f"valid, but status {got.status}, {got.refusal!r}: {shown}"]
    body, found = asked.options, []
    if set(got.reasons) != set(range(body["n"])):
        found.append(f"{len(got.reasons)} of {body['n']} completions: {shown}")
    if not set(got.reasons.values()) <= {"stop", "length"}:
        found.append(f"finish reasons {sorted(set(got.reasons.values()))}: {shown}")
    if any(not 1 <= len(ids) <= body["max_tokens"] for ids in got.choices.values()):
        found.append(f"lengths {[len(ids) for ids in got.choices.values()]}: {shown}")
    structured = body.get("structured_outputs", {})
    for index, text in got.texts.items():
        if got.reasons.get(index) == "stop" and "stop" not in body and not _follows(structured, text):
            found.append(f"{text!r} is not as {structured} asks")
    return found


def _follows(structured: dict[str, Any], text: str) -> bool:
    """Whether a completed text has the form."""
    if "choice" in structured:
        return text in structured["choice"]
    if "regex" in structured:
        return re.fullmatch(structured["regex"], text) is not None
    if "json" in structured:
        try:
            jsonschema.validate(json.loads(text), structured["json"])
        except (ValueError, jsonschema.ValidationError):
            return False
    return True
