"""`make demo`: good Python that ends with its function, and figures that `mtp-jax plan` gives."""

import ast
import io
import json
import re
import shlex
import subprocess
import sys

import pytest

from mtp_jax.commands import cli
from tests.lab.planning.releases import write
from tests.layers import ROOT


@pytest.fixture(scope="module")
def recipe() -> str:
    """The commands of `make demo`, as make would run them."""
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", "demo"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_the_first_text_is_a_whole_function(recipe, capsys, monkeypatch):
    found = re.search(r"(printf.*)( \| )\\\n(.*mtp-jax generate.*)", recipe)
    assert found is not None
    asked, _, command = found.groups()
    questions, expanded = (
        subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout
        for script in (asked, re.sub(r"\S*mtp-jax", r"printf '%s\\0'", command.strip()))
    )
    arguments = expanded.decode().split("\0")[:-1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(questions)))
    assert cli.main([*arguments, "--json", "--quiet", "--runs", "1", "--no-compile-cache"]) == 0
    result = json.loads(capsys.readouterr().out)
    (completion,) = result["output"]["outputs"]
    assert completion["finish_reason"] == "stop"
    (function,) = ast.parse(completion["text"].removeprefix("```python\n")).body
    assert isinstance(function, ast.FunctionDef)
    assert len(function.body) >= 4
    assert result["same_tokens"]
    assert result["with"]["acceptance_length"] > 2


def test_the_gain_of_a_large_model_is_what_plan_says(recipe, tmp_path, monkeypatch, capsys):
    write(tmp_path, "DeepSeek-V3")
    monkeypatch.chdir(tmp_path)
    options = shlex.split("plan DeepSeek-V3 --gpu h200 --gpus 16 --requests 1 --depths 0,1,3 --json")
    assert cli.main(options) == 0
    plain, *rows = json.loads(capsys.readouterr().out)["rows"]
    said = re.findall(r"([\d.]+) times", recipe)
    assert len(said) == len(rows) == 2
    for times, row in zip(said, rows, strict=True):
        assert [row["depth"] for row in rows] == [1, 3]
        rates = zip(row["tokens_per_second_per_user"], plain["tokens_per_second_per_user"], strict=True)
        for drafting, alone in rates:
            assert drafting / alone == pytest.approx(float(times), abs=0.05)
