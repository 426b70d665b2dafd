"""A head is tuned on the drafts that it makes when it decodes; the result drafts for the trunk as it was."""

import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.api.demo import demo_model
from mtp_jax.api.options import LLMOptions
from mtp_jax.bench import corpus
from mtp_jax.checkpoint import Loaded, load, save_checkpoint
from mtp_jax.commands import cli
from mtp_jax.decode.drafter.protocol import FINAL
from mtp_jax.errors import ConfigError, RequestError
from mtp_jax.model import trunk
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import make_mesh
from mtp_jax.text.tokenizer import Tokenizer
from mtp_jax.train.head_loss import Task, drafts_of, head_of, logits_of, objective, split
from mtp_jax.train.mixed import differentiable
from mtp_jax.train.prompts import read_prompts
from mtp_jax.train.report import Reporter
from mtp_jax.train.start import begin
from mtp_jax.train.states import Windows
from mtp_jax.train.tune_options import Fresh, TuneOptions
from tests import medusa, tiny_tokenizer, v4
from tests.golden import EAGLES, HEADS, expected, model_dir
from tests.models import TINY, on_mesh, rigged, sharing_programs, tiny_params

ON = differentiable()


@cache
def loaded(variant: str) -> Loaded:
    return load(
        model_dir(variant), model_dir(variant, "draft") if variant in HEADS else None, dtype="float32"
    )


def windows(params: Params, cfg: Any, task: Task, texts: list[list[int]], anchor: int) -> Windows:
    """One window with these texts behind each other, whose hidden states know of no other text."""
    states: list[dict[int, Any]] = []
    for ids in texts:
        found = trunk.forward_traced(params, cfg, jnp.asarray([ids]), ON, task.taps)
        states.append({FINAL: found.hidden[0], **{k: found.taps[k][0] for k in task.taps}})
    number = np.concatenate([np.full(len(ids), i, np.int32) for i, ids in enumerate(texts)])[None]
    given: Any = (
        np.concatenate(texts)[None].astype(np.int32),
        number,
        np.ones_like(number, bool),
        {k: np.concatenate([s[k] for s in states])[None] for k in states[0]},
        np.array([[anchor]], np.int32),
    )
    return Windows(*given)


SLOW = [pytest.param(v, marks=pytest.mark.slow) for v in ("eagle3", "eagle3_mla", "dflash", "dflash2")]
SLOW_HEADS = [pytest.param(v, marks=pytest.mark.slow) for v in ("eagle3_mla", "dflash2")]


@pytest.mark.parametrize("variant", ["rigged", "dspark", *SLOW])
def test_what_is_tuned_is_what_drafts(variant: str) -> None:
    """The oracle's drafts after a prompt, with another text before it in the window."""
    found, want = loaded(variant), expected(variant)
    params, cfg, head = found.params, found.config, head_of(found.config)
    recursive = variant in EAGLES or variant == "rigged"
    ids, logits = (
        (want["draft_rec_ids"], want["draft_rec_logits"]) if recursive else (want["draft_ids"], None)
    )
    task = Task(head, ON, len(ids), "kl", 0.6)
    other, prompt = want["greedy_ids"].tolist(), want["input_ids"].tolist()
    text = [*prompt, int(want["greedy_ids"][0]), *map(int, ids)]
    newest = len(other) + len(prompt)
    # Behind the last draft stand tokens of the next text, so that every row has its drafts in the window.
    behind = other[: task.extra]
    given = windows(params, cfg, task, [other, text, behind], newest)
    row = newest - 1 if recursive else 0
    made = jax.jit(lambda params, given: [
        (logits_of(task, k, params, drafted), drafted)
        for k, drafted in enumerate(drafts_of(task, params, given))
    ])  # fmt: skip
    for k, (logits, drafted) in enumerate(made(params, given)):
        got = np.asarray(logits[row])
        assert got.argmax() == ids[k]
        assert drafted.counts[row]
        assert drafted.tokens[row] == ids[k]
        wanted = trunk.logits(params, jnp.asarray(given.states[FINAL][0, newest + k]), ON)
        np.testing.assert_allclose(drafted.teacher[row], wanted, rtol=1e-4, atol=1e-5)
        if recursive:
            head = got[np.isfinite(got)]
            np.testing.assert_allclose(head, want["draft_rec_logits"][k], rtol=0, atol=3e-4)


MOE = replace(TINY, nextn_moe=(True,))


def drawn(task: Task, cfg: ModelConfig = TINY) -> Windows:
    """Windows of random tokens and states."""
    rng, shape = np.random.default_rng(3), (2, 12 + task.extra)
    states = {k: rng.normal(size=(*shape, cfg.hidden_size)).astype(np.float32) for k in (FINAL, *task.taps)}
    number = np.repeat([[0], [1]], shape[1], axis=1).astype(np.int32)
    number[:, 7:] += 2
    given: Any = (
        rng.integers(0, cfg.vocab_size, shape).astype(np.int32),
        number,
        rng.random(shape) < 0.8,
        states,
        rng.integers(1, 12, (2, 4)),
    )
    return Windows(*given)


@pytest.mark.parametrize("variant", ["", *SLOW_HEADS])
def test_all_of_the_head_learns_and_on_a_mesh_the_same(variant: str) -> None:
    """A NextN layer with experts, in bfloat16, and heads."""
    found = loaded(variant) if variant else Loaded(MOE, tiny_params(MOE), 0)
    cfg, params, mesh = found.config, found.params, make_mesh(2, 2)
    factors = "float32" if variant else "bfloat16"
    task = Task(head_of(cfg), differentiable(factors), 2, "kl" if variant else "tv", 0.6)
    given = drawn(task, cfg)

    def grads(params: Params, task: Task) -> dict[str, np.ndarray]:
        run = jax.jit(jax.grad(objective, has_aux=True), static_argnums=2)
        leaves = jax.tree_util.tree_leaves_with_path(run(*split(params), task, given)[0])
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}

    alone = grads(params, task)
    assert len(alone) == len(jax.tree.leaves(params.drafts)) - (variant == "eagle3_mla")
    for path, gradient in alone.items():
        assert gradient.any() != path.endswith(".bias"), path  # the router's bias only selects
    spread = grads(on_mesh(params, mesh, cfg), replace(task, on=differentiable(factors, mesh)))
    for path, gradient in alone.items():
        np.testing.assert_allclose(spread[path], gradient, atol=1e-5, err_msg=path)


def test_the_objective_is_the_distance_of_two_distributions() -> None:
    """From the logits of each draft, and from states whose logits are the trunk's."""
    params, cfg = tiny_params(), TINY
    task = Task(head_of(cfg), ON, 2, "kl", 0.5)
    given = drawn(task)
    drafts = list(drafts_of(task, params, jax.tree.map(jnp.asarray, given)))
    losses: dict[str, list[float]] = {"kl": [], "tv": [], "text": []}
    for k, drafted in enumerate(drafts):
        q = jax.nn.softmax(logits_of(task, k, params, drafted))
        p = jax.nn.softmax(drafted.teacher)
        rows = np.flatnonzero(np.asarray(drafted.counts))
        assert 0 < len(rows) < len(p)
        losses["kl"].append(float((p * jnp.log(p / q)).sum(-1)[rows].mean()))
        losses["tv"].append(float(abs(p - q).sum(-1)[rows].mean() / 2))
        losses["text"].append(float(-jnp.log(q[rows, drafted.tokens[rows]]).mean()))
    for kind, each in losses.items():
        own = replace(task, objective=kind)
        total, aux = jax.jit(objective, static_argnums=2)(*split(params), own, given)
        np.testing.assert_allclose(aux.losses, each, rtol=1e-4)
        assert float(total) == pytest.approx((each[0] + 0.5 * each[1]) / 1.5, rel=1e-4)
        np.testing.assert_allclose(aux.overlap, 1 - np.array(losses["tv"]), rtol=1e-4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model that drafts well, with a tokenizer, whose engines share programs."""
    folder = tmp_path_factory.mktemp("tune") / "model"
    dense = {"num_hidden_layers": 1, "n_routed_experts": 0, "first_k_dense_replace": 1}
    cfg = replace(TINY, vocab_size=104, eos_token_ids=(1,), **dense)
    save_checkpoint(folder, cfg, rigged(cfg, noise=0.3))
    with sharing_programs():
        yield tiny_tokenizer.write(folder, cfg.vocab_size)


LINES: list[Any] = [
    {"prompt": "abc"},
    {"messages": [{"role": "user", "content": "hi"}]},
    {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "xy", "max_tokens": 12}},
    {"text": "one text, as it is, is learned"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    {"prompt": "ab", "completion": "cdefgh"},
]


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def command(model: Path, prompts: Path, out: Path, *more: str) -> list[str]:
    sizes = "--max-model-len 96 --max-num-seqs 1 --prefill-chunk 32 --num-speculative-tokens 2"
    tuned = "--temperature 0 --max-tokens 24 --held-out 2 --steps 4 --window 16 --windows 2 --optimizer adamw"
    files = ["--prompts", str(prompts), "--out", str(out)]
    return ["tune-head", str(model), *files, *sizes.split(), *tuned.split(), "--no-compile-cache", *more]


def test_a_run_ends_with_a_head_and_an_interrupted_run_with_the_same(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_jax.train.tune._MEASURED", {"greedy": 0.0})
    prompts, whole, parts = write_lines(tmp_path / "p.jsonl", LINES), tmp_path / "a", tmp_path / "b"
    assert cli.main(command(model, prompts, whole)) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == ["held", "greedy", str(whole / "head")]
    report = json.loads((whole / "report.json").read_text())
    for when in ("before", "after"):
        for found in report[when].values():
            assert found["length"] == pytest.approx(1 + sum(found["accepted"]))
            assert len(found["accepted"]) == 2
            assert found["steps"] > 0
    assert report["before"]["greedy"]["length"] > 1.5
    assert report["after"]["greedy"]["length"] > 1.5
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "losses" in r] == list(range(4))
    assert len(records[-1]["held_out"]["accepted"]) == 2
    assert (whole / "loss.png").exists()
    found, before = load(model, whole / "head"), load(model)
    assert jax.tree.structure(found.params) == jax.tree.structure(before.params)
    assert not np.allclose(found.params.nextn[0].merge, before.params.nextn[0].merge, atol=1e-3)

    parts.mkdir()
    for name in ("states", "states.json", "before.json"):
        (shutil.copytree if name == "states" else shutil.copyfile)(whole / name, parts / name)
    tell = Reporter.step

    def press(self: Reporter, step: int, tokens: int, metrics: dict[str, Any]) -> None:
        tell(self, step, tokens, metrics)
        if step == 1:
            signal.raise_signal(signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Reporter, "step", press)
            assert cli.main(command(model, prompts, parts)) == cli.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not (parts / "head").exists()
    assert cli.main(command(model, prompts, parts)) == 0
    weights = [(folder / "head" / "model.safetensors").read_bytes() for folder in (whole, parts)]
    assert weights[0] == weights[1]
    capsys.readouterr()
    assert cli.main(command(model, prompts, parts, "--window", "12")) == 2
    assert "holds a run with another window" in capsys.readouterr().err


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
        ("abc", None),
        ("user: hi\nassistant:", None),
        ("xy", None),
        ("", "one text, as it is, is learned"),
        ("user: hi\nassistant:", " hello\nassistant:"),
        ("ab", "cdefgh"),
    ]
    assert texts[2].sampling == {"max_tokens": 12}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--num-speculative-tokens", "0"], "error: --num-speculative-tokens 0; expected 1 or more"),
        (["--hosts", "2"], "error: unrecognized arguments: --hosts 2"),
        (["--held-out", "6"], "has 6 texts, and held_out = 6 of them are not learned"),
        (["--draft-model", str(model_dir("eagle3", "draft"))], "the head is made for vocab_size = 80, the"),
        (["--fresh", "eagle3", "--draft-model", "x"], "fresh = 'eagle3' beside draft_model = x; leave one"),
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
    ("variant", "fresh"), [("dsa_glm5", None), ("glm45", "nextn"), ("dsa_v32", "eagle3")]
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
        np.testing.assert_allclose(values, own.get(path, before[path]), rtol=2**-8)


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
    folder = tiny_tokenizer.write(tmp_path / "model", loaded(variant).config.vocab_size)
    prompts = write_lines(tmp_path / "p.jsonl", [{"prompt": "ABC"[i % 3] * (i + 1)} for i in range(24)])
    own = ["--draft-model", str(model_dir(variant, "draft"))] if variant in HEADS else []
    more = [
        "--steps",
        "60",
        "--window",
        "8",
        "--windows",
        "8",
        "--learning-rate",
        "1e-3",
        "--max-tokens",
        "60",
    ]
    assert cli.main(command(folder, prompts, tmp_path / "out", *more, *own)) == 0
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [sum(r["losses"]) for r in records if "losses" in r]
    assert np.mean(losses[-10:]) < np.mean(losses[:10])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    for name, before in report["before"].items():
        assert report["after"][name]["length"] > before["length"] - 0.3


def test_medusa_heads_and_drafters_of_v4_are_not_tuned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(v4.v4_config()))
    with pytest.raises(ConfigError, match="fresh = 'eagle3': no head is made for DeepSeek-V4 here"):
        begin(LLMOptions(model=str(tmp_path)), TuneOptions(fresh="eagle3"))
    with pytest.raises(ConfigError, match="Medusa heads are not tuned here"):
        head_of(medusa.loaded().config)
    for cfg in (v4.model(), v4.staged()):
        with pytest.raises(ConfigError, match="MTP layers and DSpark stages are not tuned here"):
            head_of(cfg)
