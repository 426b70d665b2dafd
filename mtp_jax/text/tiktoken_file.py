"""tiktoken.model, the tokenizer of Kimi-K2 and Moonlight, as a ``tokenizers.Tokenizer``.

The file has tokens and their ranks, which are their ids. The expression that first splits a text is in Python
code of these releases, the special tokens are in tokenizer_config.json.
"""

import base64
import re
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from mtp_jax.errors import CheckpointError
from mtp_jax.json_object import JsonMapping
from mtp_jax.text.added_tokens import MOST
from mtp_jax.text.byte_level import written

FILE = "tiktoken.model"
CLASS = "TikTokenTokenizer"
"""tokenizer_class of the releases whose tokenization_kimi.py or tokenization_moonshot.py has ``SPLIT``."""

_WORD_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_WORD_END}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_WORD_END}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def read_tiktoken(file: Path, config: JsonMapping) -> tokenizers.Tokenizer:
    """The tokenizer of a file; ``config``: tokenizer_config.json beside it, with the special tokens.

    Raises CheckpointError for a damaged file, or a release whose split is unknown.
    """
    kind = config.get("tokenizer_class")
    if kind != CLASS:
        raise CheckpointError(
            f"{file} does not say how text is split, and tokenizer_config.json has tokenizer_class = "
            f"{kind!r:.80}; only {CLASS}, as in Kimi-K2 and Moonlight, is known: convert it to "
            "tokenizer.json"
        )
    ranks = _ranks(file)
    vocab = {written(token): rank for token, rank in ranks.items()}
    added = _added(file, config.get("added_tokens_decoder"), len(ranks))
    # Added tokens are in the vocabulary, too, where they keep their ids.
    model = models.BPE(
        vocab | {token.content: i for i, token in added.items()}, _merges(ranks), ignore_merges=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(added.values()))
    return tokenizer


def _ranks(file: Path) -> dict[bytes, int]:
    """Read the rank of each token: 0, 1, 2, ...; each of the 256 bytes must be a token."""
    ranks: dict[bytes, int] = {}
    try:
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            token, rank = line.split()
            if int(rank) != len(ranks):
                raise ValueError(f"line {number} has rank {int(rank)}; expected {len(ranks)}")
            ranks[base64.b64decode(token, validate=True)] = len(ranks)
            if len(ranks) != number:
                raise ValueError(f"line {number} repeats a token")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged: {error}; copy it again from the release") from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(f"{file} is damaged: it has no token for byte {missing[0]}; copy it again")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """The merges by which BPE makes the tokens: pairs that give a token, ordered by that token's rank."""
    merges = []
    for token in ranks:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(written(a), written(b)) for a, b in known]
    return merges


def _added(file: Path, entries: object, first: int) -> dict[int, AddedToken]:
    """Special tokens by id, which follow the ``first`` ranks."""
    found: dict[int, AddedToken] = {}
    for key, entry in (entries if isinstance(entries, Mapping) else {}).items():
        content = entry.get("content") if isinstance(entry, Mapping) else None
        token = int(key) if re.fullmatch("[0-9]{1,9}", key) else -1
        if not (isinstance(content, str) and content and first <= token < first + MOST):
            raise CheckpointError(
                f"added_tokens_decoder of tokenizer_config.json has {key:.20}: {entry!r:.200}; expected an "
                f"id from {first} to {first + MOST - 1}, as {file.name} has the ones below, and an "
                "object with content"
            )
        found[token] = AddedToken(content, special=entry.get("special") is True, normalized=False)
    return found
