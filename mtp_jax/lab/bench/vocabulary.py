"""The share of a text that the commonest tokens have, and a list of them for drafts to choose among."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from mtp_jax.api.demo import DEMO, path_of
from mtp_jax.errors import ConfigError
from mtp_jax.lab.bench import corpus
from mtp_jax.lab.bench.dialogues import dialogues
from mtp_jax.lab.bench.report import Report, check
from mtp_jax.model.draft_vocab import write
from mtp_jax.model.family import config_of_file
from mtp_jax.text.tokenizer import Tokenizer

_FEWEST = 128  # tokens in the table's first row: a copy of fewer rows is padded to this number


def run(model: str, files: Sequence[Path], most: int | None, to: Path | None) -> Report:
    """Count the tokens of texts.

    files: the texts; none: the text that "demo" is trained on. most: number of tokens to list; None: a
    quarter of the vocabulary. to: file for the list. Raises ConfigError for a model without a tokenizer and
    for texts that cannot be counted.
    """
    directory = path_of(model)
    cfg, tokenizer = config_of_file(directory / "config.json"), Tokenizer.from_dir(directory)
    if tokenizer is None:
        raise ConfigError(f"{directory} has no tokenizer to count tokens with; expected tokenizer.json")
    if to is not None:
        check(to)
    texts, source = _texts(model, files)
    counts = count(tokenizer, texts, cfg.vocab_size)
    ids = commonest(counts, most or cfg.vocab_size // 4, cfg.eos_token_ids or tokenizer.eos_ids)
    if to is not None:
        write(to, ids)
    figures, total = [], int(counts.sum())
    for some in _sizes(len(ids)):
        share, nbytes = counts[list(ids[:some])].sum() / total, some * cfg.hidden_size * 2
        figures.append({"tokens": some, "share": float(share), "bytes": nbytes})
    rows = [(f"{f['tokens']:,}", f"{f['share']:.1%}", f"{f['bytes'] / 1e6:.2f}") for f in figures]
    headers = "commonest tokens", "share of the text", "their rows in bfloat16, MB"
    whole = cfg.vocab_size * cfg.hidden_size * 2 / 1e6
    notes = [f"{source}: {total:,} tokens. All {cfg.vocab_size:,} rows: {whole:.2f} MB."]
    notes += [f"{len(ids):,} tokens -> {to}"] if to else []
    return Report(f"Commonest tokens: {model}", headers, rows, notes, {"source": source, "sizes": figures})


def _texts(model: str, files: Sequence[Path]) -> tuple[list[str], str]:
    """The texts, and their origin in words. Raises ConfigError for a file that is no text, or no file."""
    if not files:
        if model != DEMO:
            raise ConfigError(f"--text is missing; name texts such as {model}'s own answers")
        library = corpus.read_files()
        own = corpus.split(library).train
        name = "standard library without held-out files, and dialogues of it, corpus "
        return [file.text for file in (*own, *dialogues(own))], name + corpus.fingerprint(library)[:12]
    texts = []
    for path in files:
        try:
            text = corpus.as_text(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        if text is None:
            raise ConfigError(f"{path} is no text in UTF-8, or empty")
        texts.append(text)
    return texts, f"{len(texts)} files"


def count(tokenizer: Tokenizer, texts: Iterable[str], vocab: int) -> Int[np.ndarray, " V"]:
    """The number of times that each token occurs in texts."""
    counts = np.zeros(vocab, np.int64)
    for text in texts:
        ids = np.asarray(tokenizer.encode(text), np.int64)
        counts += np.bincount(ids[ids < vocab], minlength=vocab)
    return counts


def commonest(counts: Int[np.ndarray, " V"], most: int, ends: Sequence[int]) -> tuple[int, ...]:
    """The ``most`` commonest tokens, the lower id first among equals, without tokens that never occur.

    ends: tokens that end a text, listed in any case, as the last where they are rare. Raises ConfigError for
    fewer than two tokens.
    """
    order = np.lexsort((np.arange(len(counts)), -counts))
    common = [int(i) for i in order[:most] if counts[i]]
    rare = [i for i in ends if i < len(counts) and i not in common]
    found = (*common[: max(most - len(rare), 0)], *rare)
    if len(found) < 2:
        raise ConfigError(f"{len(found)} tokens to choose among; expected texts and a count with 2 or more")
    return found


def _sizes(most: int) -> list[int]:
    """Lengths of a list's beginnings: doubling, and the whole."""
    found, size = [], _FEWEST
    while size < most:
        found.append(size)
        size *= 2
    return [*found, most]
