"""Tables of docs/gpus.md, made by `mtp-jax plan`: `python -m website.gpus` writes them anew."""

import contextlib
import functools
import io
import json
import re
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from mtp_jax.commands import cli
from mtp_jax.errors import MtpJaxError
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.planning.hardware import GPUS
from mtp_jax.lab.planning.releases import KNOWN
from mtp_jax.lab.planning.weights import Storage

PAGE = Path(__file__).parent.parent / "docs" / "gpus.md"
_MODELS = [name for name in KNOWN if name != "deepseek-r1"]  # which is deepseek-v3 in all but its weights
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_SLOTS = 8  # of `mtp-jax serve`
_GROUP = 8  # GPUs that divide heads: a host
_DEPTH = 3
_USER = itemgetter("tokens_per_second_per_user")
_TABLE = re.compile(r"^\|.*\n(?:\|.*\n)*", re.MULTILINE)
_EXAMPLE = "glm-4.7-flash", "h200"


@dataclass(frozen=True)
class Cell:
    """A model on the fewest GPUs of a kind.

    Attributes:
        command: arguments of `mtp-jax`.
        gpus: number of GPUs.
        requests: number of requests of 4,096 tokens that the cache holds.
        speeds: tokens per second of one request, without drafts and with them, in usual and in lean software.
    """

    command: list[str]
    gpus: int
    requests: int
    speeds: list[tuple[float, float]]


def cell(model: str, gpu: str) -> Cell | None:
    """The plan of a model on the fewest GPUs of a kind; None: no number of up to 64 holds it."""
    depths = f"0,{_DEPTH}" if KNOWN[model].drafts else "0"
    for gpus in _COUNTS:
        group = min(gpus, _GROUP)
        hardware = ["--gpu", gpu, "--gpus", str(gpus), "--mesh", f"{gpus // group}x{group}"]
        command = ["plan", model, *hardware, "--requests", "1", "--depths", depths]
        if (found := _planned(command)) is None:
            continue
        *_, memory = found["memory"]
        if memory["requests"] >= _SLOTS:
            speeds = [(usual, lean) for usual, lean in map(_USER, found["rows"])]
            return Cell(command, gpus, memory["requests"], speeds)
    return None


def page(text: str) -> str:
    """The text of the page with its command and its two tables made anew."""
    cells = {(model, gpu): cell(model, gpu) for model in _MODELS for gpu in GPUS}
    example = cells[_EXAMPLE]
    assert example
    text = re.sub("^mtp-jax plan .*$", " ".join(["mtp-jax", *example.command]), text, flags=re.MULTILINE)
    fewest = _table({at: c and f"{c.gpus}: {c.requests:,}" for at, c in cells.items()})
    speeds = _table({at: c and ", ".join(map(_band, c.speeds)) for at, c in cells.items()})
    tables = iter([fewest, speeds])
    return _TABLE.sub(lambda _: next(tables), text)


_parser = functools.cache(cli.make_parser)


def _planned(command: list[str]) -> JsonObject | None:
    """The JSON object that a command prints; None: it is refused, as the model does not fit or divide."""
    args = _parser().parse_args([*command, "--json"])
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            args.run(args)
        except MtpJaxError:
            return None
    return json.loads(shown.getvalue())


def _band(speeds: tuple[float, float]) -> str:
    return "-".join(f"{speed:.0f}" for speed in speeds)


def _table(texts: dict[tuple[str, str], str | None]) -> str:
    rows = [["model", "weights", *(gpu.upper() for gpu in GPUS)], [":---", ":---", *["---:"] * len(GPUS)]]
    formats = {model: Storage.of(KNOWN[model]).name for model in _MODELS}
    for model in _MODELS:
        cells = (texts[model, gpu] or f"more than {_COUNTS[-1]}" for gpu in GPUS)
        rows.append([f"`{model}`", formats[model], *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
