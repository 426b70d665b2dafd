"""The texts that a head is tuned on: prompts that the engine answers, and texts with their answers."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import MtpJaxError, RequestError
from mtp_jax.json_object import JsonMapping, JsonObject
from mtp_jax.options import declared
from mtp_jax.text.tokenizer import Tokenizer

_EXPECTED = 'expected an object with "messages", "prompt" or "text", or with a "body" that has one of them'
# Keys of a line, or of a batch's line, that say nothing about its text.
_IGNORED = {"custom_id", "method", "url", "model"}


@dataclass(frozen=True)
class PromptLine:
    """A line of the file.

    Attributes:
        prompt: ids that are given.
        answer: ids to draft; None: the engine writes them.
        sampling: options of ``SamplingParams`` that the line has.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...] | None
    sampling: JsonObject


def digest(path: Path) -> str:
    """sha256 of the file. Raises RequestError if it cannot be read."""
    return hashlib.sha256(_read(path)).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error


def read_prompts(path: Path, tokenizer: Tokenizer | None, longest: int) -> list[PromptLine]:
    """The texts of a file of JSON lines.

    longest: the most tokens of a text: ready texts are cut, a prompt must leave room for an answer.
    Raises RequestError that names the line.
    """
    if tokenizer is None:
        raise RequestError("tuning a head needs the model's tokenizer, which its folder lacks")
    texts = []
    for number, line in enumerate(_read(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            texts.append(_text(json.loads(line), tokenizer, longest))
        except MtpJaxError as error:
            raise RequestError(f"{path} line {number}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{path} line {number} is not JSON: {error}") from error
    if not texts:
        raise RequestError(f"{path} has no prompts; {_EXPECTED}, in each line")
    return texts


def _prompt_and_answer(
    kind: str, line: JsonObject, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Prompt and answer of a line of this kind, whose keys are taken out. Raises RequestError."""
    given, ready = line.pop(kind), line.pop("completion", None)
    if kind == "messages":
        return _conversation(given, line, tokenizer)
    if not isinstance(given, str) or not isinstance(ready, str | None):
        raise RequestError(f"{kind} and completion are strings; got {given!r:.40} and {ready!r:.40}")
    ids = tuple(tokenizer.encode(given))
    if kind == "text":
        return (), ids
    return ids, None if ready is None else tuple(tokenizer.encode(ready, add_special_tokens=False))


def _text(line: object, tokenizer: Tokenizer, longest: int) -> PromptLine:
    found: Any = line.get("body", line) if isinstance(line, Mapping) else None
    if not isinstance(found, Mapping):
        raise RequestError(f"got {line!r:.80}; {_EXPECTED}")
    rest = {key: value for key, value in found.items() if key not in _IGNORED}
    kinds = [key for key in ("messages", "prompt", "text") if key in rest]
    if len(kinds) != 1:
        raise RequestError(f"got the keys {', '.join(map(str, found)) or 'none'}; {_EXPECTED}")
    prompt, answer = _prompt_and_answer(kinds[0], rest, tokenizer)
    known = declared(SamplingParams).keys() - {"n"}
    if wrong := [key for key in rest if key not in known]:
        raise RequestError(f"{wrong[0]!r:.40} is no option here; leave it out")
    SamplingParams(**rest)  # refuses values out of range before a model is loaded
    if len(prompt) >= longest:
        raise RequestError(
            f"{len(prompt)} tokens leave no room for an answer; shorten it or raise max_model_len = {longest}"
        )
    if not prompt and not answer:
        raise RequestError("the text is empty; give one, or leave the line out")
    return PromptLine(prompt, answer and answer[: longest - len(prompt)], rest)


def _conversation(
    messages: Any, rest: JsonObject, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The conversation by the chat template; the last message, if it is the assistant's, is the answer."""
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages) or not messages:
        raise RequestError(f"messages = {messages!r:.80}; expected a list of objects with role and content")
    tools, variables = rest.pop("tools", None), rest.pop("chat_template_kwargs", {})

    def ids(these: list[JsonMapping], **how: Any) -> tuple[int, ...]:
        text = tokenizer.apply_chat_template(these, tools, **how, **variables)
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    if messages[-1].get("role") != "assistant":
        return ids(messages), None
    prompt, whole = ids(messages[:-1]), ids(messages, add_generation_prompt=False)
    pairs = enumerate(zip(prompt, whole, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(whole)))
    return whole[:start], whole[start:]
