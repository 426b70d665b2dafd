"""A head is tuned on the drafts that it makes when it decodes; the result drafts for the trunk as it was."""

import json
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from mtp_jax.api.demo import demo_model
from mtp_jax.api.llm import LLM
from mtp_jax.api.options import LLMOptions
from mtp_jax.api.progress import Silent
from mtp_jax.checkpoint import load, save_checkpoint
from mtp_jax.commands import cli
from mtp_jax.commands.options import engine_options
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import RequestError
from mtp_jax.lab.bench import corpus
from mtp_jax.lab.commands import tune_head
from mtp_jax.lab.train.own_prompts import write_own_prompts
from mtp_jax.lab.train.prompts import read_prompts
from mtp_jax.lab.train.report import RunReporter
from mtp_jax.lab.train.start import begin
from mtp_jax.lab.train.tune_options import Fresh, TuneOptions
from mtp_jax.model.family import config_json
from mtp_jax.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.golden import HEADS, model_dir, raw_config
from tests.models import TINY, gqa, rigged, sharing_programs
from tests.rounding import roundoff


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model that drafts well, with a tokenizer, whose engines share programs."""
    folder = tmp_path_factory.mktemp("tune") / "model"
    dense = {"num_hidden_layers": 1, "n_routed_experts": 0, "first_k_dense_replace": 1}
    cfg = gqa(replace(TINY, vocab_size=104, eos_token_ids=(1,), **dense), qk_norm=False, bias=False)
    save_checkpoint(folder, cfg, rigged(cfg, noise=0.3))
    with sharing_programs():
        yield tiny_tokenizer.write(folder, cfg.vocab_size, TEMPLATE)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Llama's shape without NextN layers, whose next token is mostly a function of the last."""
    folder = tmp_path_factory.mktemp("tune") / "llama"
    names = "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "first_k_dense_replace"
    dense = {**dict.fromkeys(names, 0), "num_nextn_predict_layers": 0, "nextn_moe": ()}
    plain = gqa(
        replace(TINY, vocab_size=104, eos_token_ids=(1,), **dense), qk_norm=False, bias=False, rotary=1
    )
    cfg = replace(plain, family="llama")
    save_checkpoint(folder, cfg, rigged(cfg))
    return tiny_tokenizer.write(folder, cfg.vocab_size, TEMPLATE)


FRESH = ["--fresh", "eagle3", "--draft-vocab", "64", "--draft-mlp", "32"]


# Short, so that every prompt is one chunk of 16 tokens.
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}a:"
READY: list[Any] = [{"text": f"text {i}, as it is, is learned"} for i in range(4)]
# Answers are asked of several prompts at once or of none, as steps for one alone are further programs.
LINES: list[Any] = [
    {"text": "one text, as it is, is learned"},
    {"messages": [{"role": "user", "content": "hi"}]},
    {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "xy", "max_tokens": 12}},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    {"prompt": "abc"},
    {"prompt": "ab", "completion": "cdefgh"},
]


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def command(model: Path, prompts: Path, out: Path, *more: str) -> list[str]:
    sizes = "--max-model-len 96 --max-num-seqs 1 --prefill-chunk 16 --num-speculative-tokens 1"
    tuned = "--temperature 0 --max-tokens 24 --held-out 2 --steps 4 --window 16 --windows 2 --optimizer adamw"
    files = ["--prompts", str(prompts), "--out", str(out)]
    return ["tune-head", str(model), *files, *sizes.split(), *tuned.split(), "--no-compile-cache", *more]


def test_a_run_ends_with_a_head(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_jax.lab.train.tune._MEASURED", {"greedy": 0.0})
    prompts, out = write_lines(tmp_path / "p.jsonl", LINES), tmp_path / "out"
    assert cli.main(command(model, prompts, out)) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == ["held", "greedy", str(out / "head")]
    report = json.loads((out / "report.json").read_text())
    for when in ("before", "after"):
        for found in report[when].values():
            assert found["length"] == pytest.approx(1 + sum(found["accepted"]))
            assert len(found["accepted"]) == 1
            assert found["steps"] > 0
    assert report["before"]["greedy"]["length"] > 1.5
    assert report["after"]["greedy"]["length"] > 1.5
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "losses" in r] == list(range(4))
    assert len(records[-1]["held_out"]["accepted"]) == 1
    assert (out / "loss.png").exists()
    found, before = load(model, out / "head"), load(model)
    assert jax.tree.structure(found.params) == jax.tree.structure(before.params)
    assert not np.allclose(found.params.nextn[0].merge, before.params.nextn[0].merge, atol=1e-3)
    assert cli.main(command(model, prompts, out, "--window", "12")) == 2
    assert "holds a run that differs in window;" in capsys.readouterr().err


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "more"), [("model", []), pytest.param("llama", FRESH, marks=pytest.mark.slow)]
)
def test_an_interrupted_run_ends_with_the_same_head(
    name: str,
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Texts that need no answers, and no acceptance measured, so that no step is compiled."""
    model = request.getfixturevalue(name)
    monkeypatch.setattr("mtp_jax.lab.train.tune._MEASURED", {})
    prompts, whole, parts = write_lines(tmp_path / "p.jsonl", READY), tmp_path / "a", tmp_path / "b"
    assert cli.main(command(model, prompts, whole, *more)) == 0
    parts.mkdir()
    for name in ("states", "states.json", "before.json"):
        (shutil.copytree if name == "states" else shutil.copyfile)(whole / name, parts / name)
    tell = RunReporter.step

    def press(self: RunReporter, step: int, tokens: int, metrics: dict[str, Any]) -> None:
        tell(self, step, tokens, metrics)
        if step == 1:
            signal.raise_signal(signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(RunReporter, "step", press)
            assert cli.main(command(model, prompts, parts, *more)) == cli.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not (parts / "head").exists()
    assert cli.main(command(model, prompts, parts, *more)) == 0
    weights = [(folder / "head" / "model.safetensors").read_bytes() for folder in (whole, parts)]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_model_without_layers_gets_a_head(llama: Path, tmp_path: Path) -> None:
    """It drafts the commonest tokens of the answers, and their end; the text stays."""
    lines: list[Any] = [{"prompt": "ABCDEFGHIJKLMNOP"[i] * (i % 3 + 1)} for i in range(16)]
    prompts, out = write_lines(tmp_path / "p.jsonl", lines), tmp_path / "out"
    sizes = "--steps 120 --windows 4 --learning-rate 5e-3 --max-tokens 48 --max-num-seqs 8"
    assert cli.main(command(llama, prompts, out, *FRESH, *sizes.split())) == 0
    shards = (out / "states" / "learned").iterdir()
    said = np.concatenate([shard["tokens"][shard["answer"] > 0] for shard in map(load_file, shards)])
    ids = np.arange(64) + load_file(out / "head" / "model.safetensors")["d2t"]
    counts = np.bincount(said, minlength=104)
    assert 1 in ids  # the end of text, however rare
    assert sorted(counts[ids[ids != 1]]) == sorted(np.delete(counts, 1))[-63:]
    options: Any = {"max_num_seqs": 2, "max_model_len": 96, "compile_cache": None}
    answers = [
        llm.generate([(5, 6, 7), (40, 41)], SamplingParams(temperature=0, max_tokens=40))
        for llm in (
            LLM(llama, num_speculative_tokens=0, **options),
            LLM(llama, num_speculative_tokens=2, draft_model=out / "head", **options),
        )
    ]
    texts = [[tuple(o.outputs[0].token_ids) for o in outputs] for outputs in answers]
    assert texts[0] == texts[1]
    assert sum(o.speculation.acceptance_length for o in answers[1]) / 2 > 1.2
    report = json.loads((out / "report.json").read_text())
    assert report["before"] is None
    assert report["after"]["greedy"]["length"] > 1.2


class Dictating:
    """Stands for an LLM that says the characters of texts, in turn."""

    def __init__(self, folder: Path, texts: Sequence[str]) -> None:
        self.tokenizer, self._texts, self.asked = Tokenizer.from_dir(folder), cycle(texts), list[Any]()
        self.engine = SimpleNamespace(config=SimpleNamespace(max_num_seqs=2))

    def generate(self, prompts: Any, params: Any) -> list[Any]:
        self.asked += zip(prompts, params, strict=True)
        texts = [next(self._texts) for _ in prompts]
        return [
            SimpleNamespace(
                outputs=[SimpleNamespace(text=t, finish_reason="stop" if t != "long" else "length")]
            )
            for t in texts
        ]


def test_a_model_writes_its_prompts(model: Path, tmp_path: Path) -> None:
    """Different texts that have ended, after the template's beginning; a second run goes on."""
    path, said = tmp_path / "prompts.jsonl", ["hi", "long", " ", "hi", "one ", "two", "three", "four"]
    llm: Any = Dictating(model, said)
    write_own_prompts(llm, 4, 7, {}, path, Silent(), "prompts")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["messages"][0]["content"] for line in lines] == ["hi", "one", "two", "three"]
    assert [line["temperature"] for line in lines] == [0.0, 0.7, 1.0, 0.0]
    assert {llm.tokenizer.decode(ids) for ids, _ in llm.asked} == {"u: "}
    assert len({params.seed for _, params in llm.asked}) == len(llm.asked) == len(said)
    path.unlink()
    again: Any = Dictating(model, ["five"])
    write_own_prompts(again, 5, 7, {"temperature": 0.5}, path, Silent(), "prompts")
    assert not again.asked
    assert [json.loads(line).get("temperature") for line in path.read_text().splitlines()] == [None] * 5
    monotone: Any = Dictating(model, ["five"])
    with pytest.raises(RequestError, match="of 8 texts that the model wrote as a user 0 were new prompts"):
        write_own_prompts(monotone, 9, 7, {}, tmp_path / "q.jsonl", Silent(), "")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no prompts; expected an object with"),
        ([1], "line 1: got 1; expected an object with"),
        ([LINES[0], {"question": "?"}], "line 2: got the keys question; expected an object with"),
        ([{"prompt": 3}], "line 1: prompt and completion are strings; got 3"),
        ([{"prompt": "a", "best_of": 2}], "line 1: 'best_of' is no option here; leave it out"),
        ([{"prompt": "a", "temperature": -1}], "line 1: temperature = -1; expected"),
        ([{"messages": []}], r"line 1: messages = \[\]; expected a list of objects"),
        ([{"text": ""}], "line 1: the text is empty"),
        (
            [{"prompt": "a b c d e f g h"}],
            "line 1: .* tokens leave no room for an answer; shorten it or raise",
        ),
    ],
)
def test_a_wrong_line_is_named(model: Path, tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_prompts(write_lines(tmp_path / "p.jsonl", lines), Tokenizer.from_dir(model), 8)


def test_answers_begin_behind_their_prompts(model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(model)
    assert tokenizer
    texts = read_prompts(write_lines(tmp_path / "p.jsonl", LINES), tokenizer, 96)
    told = [(tokenizer.decode(t.prompt), t.answer and tokenizer.decode(t.answer)) for t in texts]
    assert told == [
        ("", "one text, as it is, is learned"),
        ("u: hi\na:", None),
        ("xy", None),
        ("u: hi\na:", " hello\na:"),
        ("abc", None),
        ("ab", "cdefgh"),
    ]
    assert texts[2].sampling == {"max_tokens": 12}


def test_a_model_without_drafts_answers_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, seen = replace(TINY, num_nextn_predict_layers=0, nextn_moe=()), list[dict[str, Any]]()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json(cfg)))
    prompts = write_lines(tmp_path / "p.jsonl", LINES)

    def tuned(given: Any, opened: Any, report: Any) -> dict[str, Any]:
        opened(None)
        opened(folder / "head")
        return {"before": None, "after": {}}

    def opened(args: Any, report: Any, slots: int) -> None:
        seen.append(engine_options(args, slots))

    monkeypatch.setattr("mtp_jax.lab.train.tune.tune", tuned)
    monkeypatch.setattr(tune_head, "open_llm", opened)
    files = ["--prompts", str(prompts), "--out", str(tmp_path)]
    assert cli.main(["tune-head", str(folder), *files, "--quiet"]) == 0
    found = [(of["adaptive_depth"], of.get("num_speculative_tokens")) for of in seen]
    assert found == [(True, 0), (False, None)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--num-speculative-tokens", "0"], "error: --num-speculative-tokens 0; expected 1 or more"),
        (["--draft-vocab", "9"], "error: --draft-vocab 9 without --fresh eagle3; expected both, or neither"),
        (["--fresh", "eagle3", "--draft-vocab", "104"], "error: --draft-vocab 104; expected fewer than the"),
        (["--hosts", "2"], "error: unrecognized arguments: --hosts 2"),
        (["--held-out", "6"], "has 6 texts, and --held-out 6 of them are not learned"),
        (["--draft-model", str(model_dir("eagle3", "draft"))], "the head is made for vocab_size = 80, the"),
        (
            ["--fresh", "eagle3", "--draft-model", "x"],
            "--fresh eagle3 with --draft-model x: one head is begun",
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    prompts = write_lines(tmp_path / "p.jsonl", LINES)
    assert cli.main([*command(model, prompts, tmp_path / "out"), *more, "--quiet"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("variant", "fresh"),
    [
        ("dsa_glm5", None),
        pytest.param("glm45", "nextn", marks=pytest.mark.rest),
        pytest.param("dsa_v32", "eagle3", marks=pytest.mark.rest),
    ],
)
def test_a_head_is_begun_and_written(variant: str, fresh: Fresh | None, tmp_path: Path) -> None:
    """An indexer stays as it is, through which nothing is learned."""
    start = begin(LLMOptions(model=model_dir(variant)), TuneOptions(fresh=fresh))
    assert start.params.layers == ()
    assert start.dense.cfg.indexer is None
    drafts = jax.tree.map(lambda a: a + 1, start.dense.params.drafts)
    start.save(tmp_path, drafts)
    found = load(model_dir(variant), tmp_path)
    assert str(found.config).replace("bfloat16", "float32") == str(start.cfg).replace("bfloat16", "float32")
    got, before, own = (
        dict(jax.tree_util.tree_leaves_with_path(drafts))
        for drafts in (found.params.drafts, start.params.drafts, drafts)
    )
    assert got.keys() == before.keys()
    assert any("indexer" in jax.tree_util.keystr(path) for path in got) == (variant == "dsa_glm5")
    for path, values in got.items():
        # Written in bfloat16.
        np.testing.assert_allclose(values, own.get(path, before[path]), rtol=roundoff(jnp.bfloat16))


def lines_of_library(count: int) -> list[Any]:
    """Parts of files that the embedded model has learned."""
    files = [f.text.split("\n") for f in corpus.split(corpus.read_files()).train if len(f.text) > 4000]
    return [{"text": "\n".join(lines[20:80])} for lines in files[:count]]


@pytest.mark.slow
def test_a_random_layer_learns_to_draft_in_two_minutes(tmp_path: Path) -> None:
    prompts, out = write_lines(tmp_path / "p.jsonl", lines_of_library(240)), tmp_path / "out"
    sizes = "--held-out 12 --max-tokens 96 --max-model-len 1024 --no-compile-cache"
    tuned = "--fresh nextn --steps 160 --window 256 --windows 4 --learning-rate 5e-3"
    files = ["--prompts", str(prompts), "--out", str(out)]
    assert cli.main(["tune-head", str(demo_model()), *files, *sizes.split(), *tuned.split()]) == 0
    after = json.loads((out / "report.json").read_text())["after"]
    assert after["greedy"]["length"] > 1.5
    assert after["temperature 1"]["length"] > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dsa_v32_rigged", *HEADS])
def test_every_kind_of_head_is_tuned(variant: str, tmp_path: Path) -> None:
    """A head that was right stays right: its objective and its acceptance are no worse."""
    shutil.copytree(model_dir(variant), tmp_path / "model")
    folder = tiny_tokenizer.write(tmp_path / "model", raw_config(variant)["vocab_size"])
    prompts = write_lines(tmp_path / "p.jsonl", [{"prompt": "ABC"[i % 3] * (i + 1)} for i in range(24)])
    own = ["--draft-model", str(model_dir(variant, "draft"))] if variant in HEADS else []
    more = "--steps 60 --window 8 --windows 8 --learning-rate 1e-3 --max-tokens 60 --num-speculative-tokens 2"
    assert cli.main(command(folder, prompts, tmp_path / "out", *more.split(), *own)) == 0
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [sum(r["losses"]) for r in records if "losses" in r]
    assert np.mean(losses[-10:]) < np.mean(losses[:10])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    for name, before in report["before"].items():
        assert report["after"][name]["length"] > before["length"] - 0.3
