"""Requests and their times: prompts from files or at random, and arrivals that wait for no answer."""

import json
import math
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject

ChatMessage = dict[str, str]
TrafficPrompt = str | list[int] | list[ChatMessage]
Arrivals = Literal["poisson", "fixed"]
_USERS = ("human", "user")
_SHOWN = 400  # characters of a file's categories in a message: five lines of a terminal
_WORD_LETTERS = 5  # letters of an English word, about (Norvig, "English Letter Frequency Counts", 2012: 4.79)


@dataclass(frozen=True)
class Traffic:
    """Prompts, and a description of their origin.

    Attributes:
        all: text, token ids, or messages.
        source: the origin of the prompts.
    """

    all: Sequence[TrafficPrompt]
    source: str

    def take(self, count: int, seed: int) -> list[TrafficPrompt]:
        """``count`` prompts in a random order; a file with fewer begins again, in another order."""
        rng, taken = random.Random(seed), []
        while len(taken) < count:
            taken += rng.sample(self.all, len(self.all))
        return taken[:count]


def schedule(count: int, rate: float, arrivals: Arrivals, seed: int) -> list[float]:
    """Seconds after the first request at which each is due, ``rate`` per second on average; inf: all at once.

    "poisson" has independent, exponentially distributed gaps, "fixed" equal gaps.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng, at, due = random.Random(seed), 0.0, []
    for _ in range(count):
        due.append(at)
        at += rng.expovariate(rate) if arrivals == "poisson" else 1 / rate
    return due


def random_prompts(count: int, length: int, spread: float, vocab: int | None, seed: int) -> Traffic:
    """Prompts of random token ids below ``vocab``, or of random words where ``vocab`` is None.

    Lengths in ids or words are uniform from ``length * (1 - spread)`` to ``length * (1 + spread)``.
    """
    rng = random.Random(seed)
    low, high = max(1, round(length * (1 - spread))), max(1, round(length * (1 + spread)))

    def word() -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=_WORD_LETTERS))

    def prompt() -> TrafficPrompt:
        size = rng.randint(low, high)
        if vocab is None:
            return " ".join(word() for _ in range(size))
        return [rng.randrange(vocab) for _ in range(size)]

    lengths = f"{low}" if low == high else f"{low} to {high}"
    what = "random words" if vocab is None else f"random token ids below {vocab}"
    return Traffic([prompt() for _ in range(count)], f"{lengths} {what}")


def sharegpt(path: Path) -> Traffic:
    """The user's first message of every conversation, of a JSON list as ShareGPT's is.

    Raises ConfigError for a file of another form.
    """
    try:
        entries = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}; expected ShareGPT's list of conversations") from None
    if not isinstance(entries, list):
        raise ConfigError(f"{path} holds {type(entries).__name__}; expected ShareGPT's list of conversations")
    return _from_file(
        path, entries, _first_of_conversation, '"conversations": [{"from": "human", "value": ...}]'
    )


def speed_bench(path: Path, category: str | None = None) -> Traffic:
    """The first turn of every line: JSON with ``turns``, a list of texts, or ``messages``.

    category: take the lines with this one alone; None: all. Raises ConfigError for a file of another form, or
    without the category.
    """
    entries = []
    for number, line in enumerate(_text(path).split("\n"), 1):  # a text in JSON may hold other line ends
        try:
            entries += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path}, line {number} is not JSON: {error}; expected one object a line"
            ) from None
    if category is not None:
        of = [entry.get("category") if isinstance(entry, dict) else None for entry in entries]
        if category not in of:
            known = ", ".join(sorted({name for name in of if isinstance(name, str)})) or "none"
            raise ConfigError(f"--category {category}; {path} has {known[:_SHOWN]}")
        entries = [entry for entry, own in zip(entries, of, strict=True) if own == category]
    return _from_file(path, entries, _first_turn, '"turns": ["...", ...] or "messages": [...]')


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; name a file of prompts") from None


def _from_file(
    path: Path,
    entries: Sequence[JsonObject],
    first: Callable[[JsonObject], TrafficPrompt | None],
    expected: str,
) -> Traffic:
    """Read prompts of a file. Entries without a user's text are left out; another form is an error."""
    found: list[TrafficPrompt] = []
    for number, entry in enumerate(entries, 1):
        try:
            prompt = first(entry)
        except (LookupError, TypeError, AttributeError):
            raise ConfigError(f"{path}, entry {number}: expected an object with {expected}") from None
        if prompt:
            found.append(prompt)
    if not found:
        raise ConfigError(f"{path} has no prompts; expected objects with {expected}")
    return Traffic(found, f"{path.name}, {len(found)} prompts")


def _first_of_conversation(entry: JsonObject) -> TrafficPrompt | None:
    said = entry["conversations"]
    return next((_said(turn["value"]) for turn in said if turn["from"] in _USERS and turn["value"]), None)


def _first_turn(entry: JsonObject) -> TrafficPrompt | None:
    if "turns" in entry:
        turns = entry["turns"]
        return _said(turns[0]) if turns else None
    messages = [{"role": _said(m["role"]), "content": _said(m["content"])} for m in entry["messages"]]
    first = next((i for i, m in enumerate(messages) if m["role"] in _USERS), None)
    return None if first is None else messages[: first + 1]


def _said(value: object) -> str:
    """A text. Raises TypeError for another value."""
    if not isinstance(value, str):
        raise TypeError
    return value
