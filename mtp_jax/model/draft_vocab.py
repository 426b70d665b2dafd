"""Lists of the tokens that drafts choose among, without jax: ``draft_vocab.json``, the commonest first."""

import json
from collections.abc import Sequence
from pathlib import Path

from mtp_jax.errors import ConfigError

FILE = "draft_vocab.json"

AskedVocab = int | str | Path | Sequence[int] | None
"""The option ``draft_vocab``: a number of tokens, a file, or tokens; None: the file beside the weights."""


def listed(asked: AskedVocab, folders: Sequence[str | Path], vocab: int) -> tuple[int, ...] | None:
    """The tokens that are asked for; None: all.

    folders: the model's, and the drafter's if it has its own, whose list goes first. vocab: number of the
    model's tokens. Raises ConfigError for a list that is damaged, or has fewer tokens than asked for.
    """
    if isinstance(asked, str | Path):
        return read(asked, vocab)
    if isinstance(asked, Sequence):
        check_ids("draft_vocab", asked, vocab)
        return tuple(asked)
    if asked is not None and type(asked) is not int:
        raise ConfigError(
            f"draft_vocab = {asked!r:.80}; expected a number of tokens, a file that lists them, or token ids"
        )
    if asked == 0:
        return None
    files = (Path(folder) / FILE for folder in reversed(folders))
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        if asked is None:
            return None
        raise ConfigError(
            f"draft_vocab = {asked}, but {folders[-1]} has no {FILE}, which lists tokens, the commonest "
            "first; `mtp-jax bench vocabulary` makes one"
        )
    ids = read(found, vocab)
    if asked is None:
        return ids
    if not 0 < asked <= len(ids):
        raise ConfigError(
            f"draft_vocab = {asked}; expected 0 to {len(ids)}, the number of tokens that {found} lists"
        )
    return ids[:asked]


def read(path: str | Path, vocab: int) -> tuple[int, ...]:
    """A list of tokens from a file. Raises ConfigError for a file that has none."""
    try:
        ids = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no readable list of tokens: {error}") from error
    if not isinstance(ids, list):
        raise ConfigError(f"{path} holds {ids!r:.80}; expected a list of token ids, the commonest first")
    check_ids(str(path), ids, vocab)
    return tuple(ids)


def check_ids(name: str, ids: Sequence[object], vocab: int) -> None:
    """Check that these are different tokens of the vocabulary. Raises ConfigError, with the list's name."""
    if not ids:
        raise ConfigError(f"{name} names no token; expected a list of token ids, the commonest first")
    seen: set[int] = set()
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab:
            raise ConfigError(f"{name} names token {token!r:.80}; expected ids from 0 to {vocab - 1}")
        if token in seen:
            raise ConfigError(f"{name} names token {token} twice; expected each token once")
        seen.add(token)


def write(path: Path, ids: Sequence[int]) -> None:
    """Write a list of tokens."""
    path.write_text(json.dumps(list(ids)) + "\n", encoding="utf-8")
