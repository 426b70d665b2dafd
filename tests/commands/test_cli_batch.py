"""`mtp-jax batch` on a small checkpoint: the server's answers, without a server."""

import json
import os
import re

import pytest

import mtp_jax.api.llm
from mtp_jax import LLM, SamplingParams
from mtp_jax.commands import batch, cli
from serve.http.in_process import Answer, post
from tests import golden, tiny_tokenizer
from tests.models import RATES

SIZES = ["--max-model-len", "96", "--page-size", "16", "--prefill-chunk", "16", "--max-num-seqs", "2"]
BODY = {
    "prompt": golden.expected("rigged")["input_ids"].tolist(),
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A golden checkpoint with a tokenizer."""
    return tiny_tokenizer.model(tmp_path_factory.mktemp("batch") / "rigged")


def line(name, **changed):
    body = BODY | changed
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}) + "\n"


@pytest.fixture
def opened(monkeypatch):
    """LLMs made so far, by options; equal options give the same object, with what it has compiled."""
    made = {}

    def open_llm(model, reporter, **given):
        key = tuple(sorted(given.items()))
        if key not in made:
            made[key] = LLM(model, simulate=RATES, **given)
        return made[key]

    monkeypatch.setattr(mtp_jax.api.llm, "LLM", open_llm)
    return made


def test_a_file_is_answered_as_by_the_server_and_again_after_growing(model, opened, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        line("plain") + line("n", n=3) + line("refused", temperature=-1) + line("other", model="x")
    )
    command = ["batch", str(source), str(target), str(model), "--no-compile-cache", *SIZES]
    assert cli.main(command) == 1
    found = {e["custom_id"]: e for e in map(json.loads, target.read_text().splitlines())}
    statuses = {name: e["response"]["status_code"] for name, e in found.items()}
    assert statuses == {"plain": 200, "n": 200, "refused": 400, "other": 404}
    assert all(e["error"] is None and e["response"]["request_id"] for e in found.values())
    plain = found["plain"]["response"]["body"]
    (llm,) = opened.values()
    (told,) = llm.generate([BODY["prompt"]], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert plain["choices"][0]["token_ids"] == told.outputs[0].token_ids
    assert plain["usage"]["completion_tokens"] == 24
    assert len(found["n"]["response"]["body"]["choices"]) == 3
    assert "temperature" in found["refused"]["response"]["body"]["error"]["message"]
    said = capsys.readouterr().err
    assert "2 answered, 2 failed; 96 tokens in " in said
    assert re.search(r"acceptance length \d\.\d\d where drafted; drafts accepted \d+% ", said)

    source.write_text(source.read_text() + line("late"))
    assert cli.main(command) == 1  # those that failed before still have
    [(options, _)] = opened.items()
    assert dict(options)["adaptive_depth"] is True
    assert "1 answered, 0 failed, 4 done before (2 failed); 24 tokens in " in capsys.readouterr().err
    *before, late = map(json.loads, target.read_text().splitlines())
    assert {e["custom_id"] for e in before} == set(found)
    assert late["response"]["body"]["choices"][0]["token_ids"] == told.outputs[0].token_ids

    opened.clear()
    assert cli.main(command) == 1
    assert "0 answered, 0 failed, 5 done before (2 failed)\n" in capsys.readouterr().err
    assert not opened  # nothing was left to do, so no model was loaded


def test_an_interruption_says_how_far_it_came_and_a_retry_asks_again(
    model, opened, tmp_path, capsys, monkeypatch
):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line(name, max_tokens=2) for name in ("a", "b", "c", "d")))
    command = ["batch", str(source), str(target), str(model), "--no-compile-cache", "--in-flight", "1"]
    answers: list[object] = [None, Answer(500, "r", {"error": {"message": "no"}}), KeyboardInterrupt]

    async def failing(app, url, body):
        match answers.pop(0) if answers else None:
            case None:
                return await post(app, url, body)
            case Answer() as answer:
                return answer
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "post", failing)
    assert cli.main([*command, *SIZES]) == cli.INTERRUPTED
    assert capsys.readouterr().err.endswith("2 of 4 requests done; run the same command again to go on\n")
    assert cli.main([*command, *SIZES]) == 1
    said = capsys.readouterr().err
    assert "2 of 4 requests done before\n" in said
    assert "2 answered, 0 failed, 2 done before (1 failed)" in said
    assert cli.main([*command, *SIZES, "--retry-failed"]) == 0
    assert "1 answered, 0 failed, 3 done before; 2 tokens" in capsys.readouterr().err
    names = [json.loads(row)["custom_id"] for row in target.read_text().splitlines()]
    assert names == ["a", "c", "d", "b"]


def test_unknown_fields_are_told_of_or_refused(model, opened, tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("plain") + line("typo", max_token=3) + line("too", mood="good", user="me"))
    command = [
        "batch",
        str(source),
        str(target),
        str(model),
        "--no-compile-cache",
        "--in-flight",
        "1",
        *SIZES,
    ]
    assert cli.main(command) == 0
    said = capsys.readouterr().err
    assert "3 answered, 0 failed; 72 tokens in " in said
    assert '2 answers came with a warning, the first: 299 mtp-jax "ignored: max_token"\n' in said
    assert cli.main([*command[:2], str(tmp_path / "strict.jsonl"), *command[3:], "--strict"]) == 1
    assert "1 answered, 2 failed" in capsys.readouterr().err
    found = [json.loads(row) for row in (tmp_path / "strict.jsonl").read_text().splitlines()]
    codes = [entry["response"]["body"].get("error", {}).get("code") for entry in found]
    assert codes == [None, "unknown_field", "unknown_field"]


def test_refusals(model, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text(line("a"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for given, message in (
        ([source, source], "is the input; name another file"),
        ([tmp_path / "none", tmp_path / "out"], "cannot be read"),
        (
            [source, tmp_path / "out", "--in-flight", "0"],
            "argument --in-flight: '0' is not an integer of 1 or more",
        ),
        ([source, tmp_path / "no" / "out"], "No such file or directory"),
        ([source, tmp_path], "is not a file"),
        ([pipe, tmp_path / "out"], "no pipe will do"),
        ([source, tmp_path / "out", "--served-model-name", ""], "expected 1 to 256 characters"),
    ):
        assert cli.main(["batch", *map(str, given)]) == 2
        assert message in capsys.readouterr().err
