"""The examples of docs/serving.md and docs/rollouts.md, run as they stand against the server of the tests."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mtp_jax import LLM
from serve.routes.table import ROUTES
from tests.serve.conftest import Running

DOCS = Path(__file__).parent.parent.parent / "docs"
TEXT = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("serving.md", "rollouts.md"))
SHELL, PYTHON = (re.findall(rf"^```{kind}\n(.*?)^```", TEXT, re.M | re.S) for kind in ("sh", "python"))


def here(example: str, server: Running) -> str:
    return example.replace("http://127.0.0.1:8000", server.url).replace('"demo"', '"tiny"')


def test_there_are_examples():
    assert len(SHELL) >= 2
    assert len(PYTHON) >= 3


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl: apt-get install curl")
@pytest.mark.parametrize("example", SHELL)
def test_shell_examples(server: Running, example):
    answer = subprocess.run(
        here(example, server), shell=True, capture_output=True, text=True, check=True
    ).stdout
    if '"stream": true' in example:
        assert answer.endswith("data: [DONE]\n\n")
        answer = answer.split("\n\n")[-3].removeprefix("data: ")
    assert json.loads(answer)["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("example", PYTHON)
def test_python_examples(server: Running, model: Path, fresh_model: LLM, monkeypatch, capsys, example):
    monkeypatch.setattr("mtp_jax.LLM", lambda *model, **sizes: fresh_model, raising=False)
    example = here(example, server).replace('"checkpoints/step-1"', repr(str(model)))
    exec(compile(example, "docs", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.strip()


def test_every_route_is_in_the_table_of_the_documents():
    """A path has the method before it, or that of the path before; POST where a route takes both."""
    routes: set[tuple[str, str]] = set()
    with_admin_key: set[str] = set()
    section = TEXT.split("\n## Routes\n")[1].split("\n## ")[0]
    for line in re.findall(r"^\| (`[GP].*)", section, re.M):
        cell, about = line.split(" | ")
        method = ""
        for named, path in re.findall(r"`(GET |POST )?(/[^`]*)`", cell):
            method = named.strip() or method
            routes.add((method, path))
            if "with an admin key" in about and method == "POST":
                with_admin_key.add(path)
    table = [route for route in ROUTES if not route.path.startswith("/web/")]
    assert routes == {(max(route.methods), route.path.replace("{name:path}", "NAME")) for route in table}
    assert with_admin_key == {route.path for route in table if route.access == "admin"}


def test_every_metric_of_our_own_is_described(client):
    names = set(re.findall(r"^# TYPE (mtp_jax:\w+) ", client.get("/metrics").text, re.M))
    documented = set(re.findall(r"`(mtp_jax:\w+)", TEXT))
    assert names - {"mtp_jax:http_responses_total", "mtp_jax:http_responses_created"} <= {
        *documented,
        "mtp_jax:cache_pages",
        "mtp_jax:cache_pages_reusable",
    }
