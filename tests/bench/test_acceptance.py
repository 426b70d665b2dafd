"""How many drafts come true, and what every benchmark does before it measures."""

import json

import pytest

from mtp_jax import checkpoint
from mtp_jax.commands import cli
from tests import golden


@pytest.mark.slow
def test_the_model_is_read_once(tmp_path, monkeypatch):
    read = []
    load = checkpoint.load
    monkeypatch.setattr(checkpoint, "load", lambda *a, **k: read.append(a) or load(*a, **k))
    out = tmp_path / "out.json"
    sizes = "--depth 2 --prompts 2 --prompt-tokens 6 --max-tokens 12 --samples 1 --compile-cache none"
    model = str(golden.model_dir("rigged"))
    command = ["bench", "acceptance", "--model", model, "--temperatures", "0,1", *sizes.split()]
    assert cli.main([*command, "--json", str(out)]) == 0
    assert len(read) == 1
    greedy, sampled = json.loads(out.read_text())["figures"]["temperatures"]
    assert (greedy["temperature"], sampled["temperature"]) == (0, 1)
    for found in (greedy, sampled):
        assert 1 < found["acceptance_length"] <= 3
        assert found["tokens"] == 24
        assert len(found["samples"]) == 1


@pytest.mark.parametrize("option", ["--json", "--png"])
def test_a_file_that_cannot_be_written_is_found_before_the_model_is_read(
    option, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "depth", "--model", "no/model", option, str(tmp_path)]) == 2
    assert f"{tmp_path} cannot be written; name another file" in capsys.readouterr().err
