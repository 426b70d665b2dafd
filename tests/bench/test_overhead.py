"""`mtp-jax bench overhead`: what it reads from answers and what it says of rounds; and all of it once."""

import json
import shutil

import pytest

from mtp_jax.bench.overhead import Load, Run, _report, _tokens
from mtp_jax.bench.raw_client import Answer
from mtp_jax.commands import cli
from mtp_jax.errors import MtpJaxError
from tests import golden, tiny_tokenizer


def test_tokens_of_an_answer():
    usage = b'{"usage":{"prompt_tokens":5,"completion_tokens":12,"total_tokens":17}}'
    assert _tokens(Answer(0.1, 200, usage)) == 12
    assert _tokens(Answer(0.1, 200, b"data: {}\n\ndata: " + usage + b"\n\ndata: [DONE]\n\n")) == 12
    for status, body in ((503, usage), (200, b'{"error":{}}'), (0, b"")):
        with pytest.raises(MtpJaxError, match=f"answered {status}"):
            _tokens(Answer(0.1, status, body))


def test_ratios_are_within_a_round():
    plain = [Run(100, 1.0, 2.0, 0.0, 0.0, 10), Run(100, 2.0, 4.0, 0.0, 0.0, 10)]
    slower = [Run(100, 1.25, 2.5, 0.1, 0.5, 11), Run(100, 2.5, 5.0, 0.2, 0.5, 11)]
    report = _report("demo", Load(8, 3, 4, 10, 10, 2), {"LLM": plain, "HTTP": slower})
    ways = report.figures["ways"]
    assert ways["LLM"]["throughput"].median == ways["LLM"]["processor"].median == 1
    assert ways["HTTP"]["throughput"].median == 0.8
    assert ways["HTTP"]["processor"].high == 1.25
    (row,) = (line for line in report.text().splitlines() if line.startswith("| HTTP "))
    assert "| 4.0 (4.0-4.0) | 11 (11-11) | 5.000 (5.000-5.000) |" in " ".join(row.split())


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [True, False])
def test_every_way_gives_the_same_number_of_tokens(tmp_path, tokenizer):
    model = tmp_path / "rigged"
    shutil.copytree(golden.model_dir("rigged"), model)
    if tokenizer:
        tiny_tokenizer.write(model, golden.raw_config("rigged")["vocab_size"])
    out = tmp_path / "out.json"
    sizes = [
        "--concurrency",
        "2",
        "--requests",
        "4",
        "--prompt-characters",
        "20",
        "--max-tokens",
        "12",
        "--rounds",
        "2",
    ]
    assert cli.main(["bench", "overhead", "--model", str(model), "--json", str(out), *sizes]) == 0
    ways = json.loads(out.read_text())["figures"]["ways"]
    assert len(ways) == 4
    for name, way in ways.items():
        assert [r["tokens"] for r in way["rounds"]] == [48, 48]
        assert all((r["client"] > 0) == name.startswith("HTTP") for r in way["rounds"])
        assert all(r["launches"] > 4 and 0 < r["loop"] < r["processor"] for r in way["rounds"])
