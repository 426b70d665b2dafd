"""Tokens that files beside tokenizer.json add to it, as transformers reads them."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping

import tokenizers
from tokenizers import AddedToken

from mtp_jax.errors import CheckpointError
from mtp_jax.json_object import JsonMapping, JsonObject

FILE = "added_tokens.json"
MOST = 2**16
"""Most ids behind the vocabulary: releases add hundreds, and a table has a row for each id."""

_IDS = 10**9  # ids of nine digits at most, as in tokenizer_config.json
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LISTS = ("additional_special_tokens", "extra_special_tokens")


def with_added(backend: tokenizers.Tokenizer, config: JsonMapping, ids: JsonMapping) -> tokenizers.Tokenizer:
    """The tokenizer with tokens that other files add. config: tokenizer_config.json. ids: added_tokens.json.

    A token keeps the id that a file gives, or gets the next free one. Raises CheckpointError where the files
    disagree about a token or an id.
    """
    wanted: dict[str, JsonObject] = {}
    for content, token, entry in (*_of_decoder(config), *_of_ids(ids), *_of_lists(config)):
        known = wanted.setdefault(content, {"id": token, **entry})
        known["id"] = token if known["id"] is None else known["id"]
        if token is not None and known["id"] != token:
            raise _disagree(content, f"the ids {known['id']} and {token}")
    if not wanted:
        return backend
    own = {entry.content for entry in backend.get_added_tokens_decoder().values()}
    given = (entry["id"] for entry in wanted.values() if entry["id"] is not None)
    free = itertools.count(max([*backend.get_vocab().values(), *given], default=-1) + 1)
    missing: list[JsonObject] = []
    for content, entry in wanted.items():
        token = _known_id(backend, content, entry["id"])
        if content not in own:
            missing.append({**entry, "content": content, "id": next(free) if token is None else token})
    return _with(backend, missing) if missing else backend


def _known_id(backend: tokenizers.Tokenizer, content: str, given: int | None) -> int | None:
    """The id of a token, in the tokenizer's own file or ``given`` by another; None where no file has it.

    Raises CheckpointError where they disagree.
    """
    has = backend.token_to_id(content)
    if given is None:
        return has
    if has not in (None, given):
        raise _disagree(content, f"the id {given}, in the tokenizer's own file {has}")
    if has is None and (other := backend.id_to_token(given)) is not None:
        raise _disagree(content, f"the id {given}, which is {other!r:.80} in the tokenizer's own file")
    return given


def _with(backend: tokenizers.Tokenizer, entries: list[JsonObject]) -> tokenizers.Tokenizer:
    """The tokenizer with further tokens. Tokens that are in the vocabulary, too, keep their ids.

    Raises CheckpointError for an id that is too large, and for a model without BPE's table.
    """
    size = backend.get_vocab_size()
    if wrong := next((e for e in entries if not 0 <= e["id"] < size + MOST), None):
        raise CheckpointError(
            f"the token {wrong['content']!r:.80} has the id {wrong['id']}; expected ids below {size + MOST}, "
            f"as the vocabulary has {size} tokens"
        )
    value = json.loads(backend.to_str())
    if not isinstance(value["model"]["vocab"], dict):
        raise CheckpointError(
            f"tokenizer.json has a model of the type {value['model']['type']}; only byte-level BPE is "
            "supported: convert the tokenizer"
        )
    value["model"]["vocab"] |= {entry["content"]: entry["id"] for entry in entries}
    found = tokenizers.Tokenizer.from_str(json.dumps(value))
    found.add_tokens(
        [AddedToken(e["content"], **{flag: bool(e.get(flag)) for flag in _FLAGS}) for e in entries]
    )
    return found


_Declared = Iterator[tuple[str, int | None, JsonObject]]
"""The tokens that a file declares: text, id or None, and properties."""


def _of_decoder(config: JsonMapping) -> _Declared:
    """Raises CheckpointError, as the other two do."""
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, Mapping):
        raise _wrong("added_tokens_decoder", decoder, "an object")
    for key, entry in decoder.items():
        if not re.fullmatch("[0-9]{1,9}", key) or not isinstance(entry, Mapping) or not _text(entry):
            raise _wrong(f"added_tokens_decoder.{key}", entry, "an id, and an object with content")
        yield _text(entry), int(key), {flag: entry.get(flag) for flag in _FLAGS}


def _of_ids(ids: JsonMapping) -> _Declared:
    for content, token in ids.items():
        if type(token) is not int or not 0 <= token < _IDS or not content:
            raise CheckpointError(
                f"{FILE}: {content!r:.80} has the id {token!r:.80}; expected an integer from 0 to {_IDS - 1}"
            )
        yield content, token, {}


def _of_lists(config: JsonMapping) -> _Declared:
    for name in _LISTS:
        listed = config.get(name) or ()
        if isinstance(listed, Mapping):
            listed = list(listed.values())
        if not isinstance(listed, list | tuple):
            raise _wrong(name, listed, "a list of tokens")
        for entry in listed:
            if not _text(entry):
                raise _wrong(name, entry, "tokens: strings, or objects with content")
            yield _text(entry), None, {"special": True}


def _text(entry: object) -> str:
    value = entry.get("content") if isinstance(entry, Mapping) else entry
    return value if isinstance(value, str) else ""


def _disagree(content: str, about: str) -> CheckpointError:
    return CheckpointError(
        f"the files of the tokenizer disagree: {content!r:.80} has {about}; copy tokenizer.json, "
        f"tokenizer_config.json and {FILE} again, from one release"
    )


def _wrong(name: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(f"tokenizer_config.json: {name:.80} is {value!r:.80}; expected {expected}")
