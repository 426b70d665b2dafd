"""Wrong usages of the command line and of the server: each is answered in one line, which says what to do.

A file of ``tests/wrong_usage`` has two lines: what is asked, and the whole answer.
"""

import json
import shlex
from pathlib import Path

import httpx2
import pytest

from mtp_jax.commands import cli

FOLDER = Path(__file__).parent.parent / "wrong_usage"
FILES = sorted(FOLDER.iterdir())


def test_there_are_two_dozen():
    assert len(FILES) == 24


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_wrong_usage_is_answered_in_one_line(file: Path, client: httpx2.Client, model: Path, capsys):
    asked, _, answer = file.read_text(encoding="utf-8").partition("\n")
    assert answer.count("\n") == 1
    if asked.startswith("$ "):
        argv = [str(model) if word == "MODEL" else word for word in shlex.split(asked)[2:]]
        assert cli.main(argv) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.replace(str(model), "MODEL") == answer
        return
    method, path, *body = asked.split(" ", 2)
    got = client.request(method, path, json=json.loads(body[0]) if body else None)
    assert f"{got.status_code} {got.json()['error']['message']}\n" == answer
