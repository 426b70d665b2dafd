"""The tokenizer in a GGUF file, as tokenizer.json and tokenizer_config.json have it.

The file has tokens, merges, and the name of the way in which text is first split; the expressions of these
ways are here, as the releases' own tokenizer.json have them (llama.cpp: src/llama-vocab.cpp). Keys:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from mtp_jax.errors import CheckpointError
from mtp_jax.json_object import JsonObject
from mtp_jax.text.damages import damages

_T = TypeVar("_T")
_BPE = "gpt2"
# Types of tokens.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_TYPES = (_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED)
# The expression of GPT-2 is that of ``pre_tokenizers.ByteLevel``.
_GPT_2 = (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),)
_LLAMA_3 = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_WAYS = {
    "gpt-2": _GPT_2,
    "smollm": (pre_tokenizers.Digits(individual_digits=True), *_GPT_2),
    "llama-bpe": (
        pre_tokenizers.Split(Regex(_LLAMA_3), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
}
_WHOLE = ("llama-bpe",)
"""Ways whose tokenizers take a piece of text that is a token as it is, without its merges, and begin a text
with bos unless the file says otherwise."""
_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


class GgufTokens:
    """A tokenizer, from the keys of a file. Raises CheckpointError for a tokenizer of another kind.

    Attributes:
        backend: the tokenizer.
        config: tokenizer_config.json.
        bos: id of the token that begins a text; None where the file names none.
        ends: ids of the tokens that end an answer.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        way = _way(facts)
        tokens, merges = (_list(f"tokenizer.ggml.{name}", facts, str) for name in ("tokens", "merges"))
        types = _list("tokenizer.ggml.token_type", facts, int)
        if len(types) != len(tokens):
            raise CheckpointError(
                f"tokenizer.ggml.token_type has {len(types)} entries; expected one for each of "
                f"{len(tokens)} tokens"
            )
        template = facts.get("tokenizer.chat_template")
        if not isinstance(template, str | None):
            raise CheckpointError(f"tokenizer.chat_template = {template!r:.80}; expected text")
        self.backend = _backend(tokens, types, merges, way)
        self.bos = _id("tokenizer.ggml.bos_token_id", facts, len(tokens))
        ends = (_id(key, facts, len(tokens)) for key in _ENDS)
        self.ends = tuple(dict.fromkeys(token for token in ends if token is not None))
        self.config: JsonObject = {
            "bos_token": None if self.bos is None else tokens[self.bos],
            "eos_token": tokens[self.ends[0]] if self.ends else None,
            "add_bos_token": facts.get("tokenizer.ggml.add_bos_token", way in _WHOLE) is True,
            "chat_template": template,
        }


def _way(facts: Mapping[str, Any]) -> str:
    """The way in which text is first split. Raises CheckpointError for an unknown way."""
    for key, known in (("tokenizer.ggml.model", (_BPE,)), ("tokenizer.ggml.pre", tuple(_WAYS))):
        if (got := facts.get(key)) not in known:
            raise CheckpointError(f"{key} = {got!r:.80} is not supported; expected {' or '.join(known)}")
    if facts.get("tokenizer.ggml.add_eos_token"):
        raise CheckpointError("tokenizer.ggml.add_eos_token = True is not supported: it ends every prompt")
    return facts["tokenizer.ggml.pre"]


def _list(key: str, facts: Mapping[str, Any], kind: type[_T]) -> list[_T]:
    """A list of values of one type. Raises CheckpointError where the file has another value."""
    found = facts.get(key)
    if not isinstance(found, list) or not found or not all(type(value) is kind for value in found):
        raise CheckpointError(f"{key} = {found!r:.80}; expected a list of {kind.__name__}")
    return found


def _id(key: str, facts: Mapping[str, Any], count: int) -> int | None:
    """A token's id, None where the file has none. Raises CheckpointError for an id of no token."""
    found = facts.get(key)
    if found is not None and not (type(found) is int and 0 <= found < count):
        raise CheckpointError(f"{key} = {found!r:.80}; expected an id below {count}")
    return found


def _backend(tokens: list[str], types: list[int], merges: list[str], way: str) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise CheckpointError(f"tokenizer.ggml.tokens has {twice!r:.80} twice")
    other = next((i for i, kind in enumerate(types) if kind not in _TYPES), None)
    if other is not None:
        raise CheckpointError(
            f"tokenizer.ggml.token_type of {tokens[other]!r:.80} is {types[other]}; expected one of {_TYPES}"
        )
    # A token in the characters of byte-level BPE has no space.
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    with damages("tokenizer.ggml.merges do not fit the tokens: {}".format):
        backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=way in _WHOLE))
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(_WAYS[way]))
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    return backend
