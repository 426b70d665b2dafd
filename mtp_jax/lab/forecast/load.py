"""A load: arrivals, prompt and output lengths, read from a file of one's own or from a public trace."""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from mtp_jax.decode.law import GOLDEN, golden_rates
from mtp_jax.errors import ConfigError

_BLOCK = 512
"""Tokens of a block that ``hash_ids`` name (Mooncake's FAST25-release/traces)."""


@dataclass(frozen=True)
class Arrival:
    """A request to come.

    Attributes:
        line: number of its line in the file.
        at: seconds after the first arrival.
        prompt, output: number of tokens.
        rates: chance that each draft is accepted, once all before it were; None: as all requests have.
        blocks: names of the prompt's blocks of 512 tokens; blocks of one name are alike.
    """

    line: int
    at: float
    prompt: int
    output: int
    rates: tuple[float, ...] | None = None
    blocks: tuple[int, ...] = ()

    def tokens(self, vocab: int, seed: int) -> list[int]:
        """A prompt of random tokens: blocks of one name are alike, and everything else differs."""
        blocks = self.blocks[: -(-self.prompt // _BLOCK)]
        names = [(0, block) for block in blocks] + [(1, self.line)]
        sizes = [_BLOCK] * len(blocks) + [max(self.prompt - _BLOCK * len(blocks), 0)]
        parts = zip(names, sizes, strict=True)
        drawn = [np.random.default_rng((seed, *name)).integers(vocab, size=size) for name, size in parts]
        return np.concatenate(drawn)[: self.prompt].tolist()


@dataclass(frozen=True)
class _Form:
    """Names of fields, and seconds of a unit of the arrival; None: dates."""

    at: str
    prompt: str
    output: str
    unit: float | None

    @property
    def names(self) -> tuple[str, str, str]:
        return self.at, self.prompt, self.output


_FORMS = (
    _Form("arrival", "prompt_tokens", "output_tokens", 1.0),
    # Mooncake (FAST 2025), and traces in its form
    _Form("timestamp", "input_length", "output_length", 1e-3),
    # Azure's LLM inference traces of 2023 (Splitwise, ISCA 2024) and 2024 (DynamoLLM, HPCA 2025)
    _Form("TIMESTAMP", "ContextTokens", "GeneratedTokens", None),
    # BurstGPT (arXiv 2401.17644)
    _Form("Timestamp", "Request tokens", "Response tokens", 1.0),
)


def read(path: Path) -> list[Arrival]:
    """The requests of a file in order of arrival. Raises ConfigError, with the number of a bad line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--load {path} cannot be read: {error}; name a file of arrivals") from None
    found: list[Arrival] = []
    for line, fields in _lines(path, text):
        try:
            found.append(_arrival(line, fields))
        except ValueError as error:
            raise ConfigError(f"{path}, line {line}: {error}") from None
    if not found:
        raise ConfigError(f"{path} has no arrivals; expected a line for each request")
    first = min(a.at for a in found)
    return sorted((replace(a, at=a.at - first) for a in found), key=lambda a: a.at)


def _lines(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The number and the fields of each line: JSON, or CSV below a line of names."""
    if not text.lstrip().startswith("{"):
        rows = csv.DictReader(text.splitlines())
        try:
            yield from ((rows.line_num, row) for row in rows)
        except csv.Error as error:
            raise ConfigError(f"{path}, line {rows.line_num + 1} is not CSV: {error}") from None
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number} is not JSON: {error}") from None
            if not isinstance(fields, dict):
                raise ConfigError(f"{path}, line {number}: {line!r:.80}; expected a JSON object")
            yield number, fields


def _arrival(line: int, fields: Mapping[str, Any]) -> Arrival:
    """Raises ValueError."""
    form = next((form for form in _FORMS if all(name in fields for name in form.names)), None)
    if form is None:
        known = " or ".join(", ".join(form.names) for form in _FORMS)
        raise ValueError(f"{', '.join(map(str, fields))!r:.80} lacks fields; expected {known}")
    prompt, output = (_count(name, fields[name]) for name in (form.prompt, form.output))
    blocks = fields.get("hash_ids") or ()
    if not (isinstance(blocks, list | tuple) and all(isinstance(b, int) and b >= 0 for b in blocks)):
        raise ValueError(f"hash_ids = {blocks!r:.80}; expected integers of 0 or more")
    return Arrival(line, _at(form, fields[form.at]), prompt, output, _rates(fields), tuple(blocks))


def _at(form: _Form, value: object) -> float:
    """The seconds of an arrival."""
    if form.unit is None:
        try:
            date = datetime.fromisoformat(str(value))
            return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
        except ValueError:
            raise ValueError(f"{form.at} = {value!r:.80}; expected a date and time") from None
    seconds = _number(value) * form.unit
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{form.at} = {value!r:.80}; expected a number of 0 or more")
    return seconds


def _count(name: str, value: object) -> int:
    number = _number(value)
    if not (1 <= number < math.inf and number == int(number)):
        raise ValueError(f"{name} = {value!r:.80}; expected an integer of 1 or more")
    return int(number)


def _number(value: object) -> float:
    """NaN for everything else."""
    try:
        return math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _rates(fields: Mapping[str, Any]) -> tuple[float, ...] | None:
    """The field ``acceptance``: a rate, rates by position, or a golden length's name."""
    given = fields.get("acceptance")
    if given is None or given == "":
        return None
    if isinstance(given, str) and given in GOLDEN:
        return golden_rates(given)
    rates = tuple(map(_number, given if isinstance(given, list) else [given]))
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        names = ", ".join(GOLDEN)
        raise ValueError(f"acceptance = {given!r:.80}; expected rates from 0 to 1, or one of {names}")
    return rates
