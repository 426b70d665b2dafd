"""The recipe and the loop: loss falls, resuming is exact, a seed fixes the run."""

import functools
import json
import math
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from mtp_jax.checkpoint import load
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.lab.bench.corpus import SourceFile
from mtp_jax.lab.train import loop, report, step
from mtp_jax.lab.train.data import batch_at, even_windows
from mtp_jax.lab.train.optimizer import make_optimizer
from mtp_jax.lab.train.recipe import Recipe, Stage
from mtp_jax.lab.train.report import SMOOTHING_STEPS, RunReporter, plot_losses
from mtp_jax.lab.train.state_store import StateStore
from mtp_jax.model.params import Moe, init_params
from tests.lab.train.tiny import CONFIG, TINY, params

DEMO = Path(__file__).parents[3] / "configs" / "demo"


def source_files(count: int) -> list[SourceFile]:
    """Small, repetitive modules whose names land on both sides of the split."""
    body = "".join(f"def function_{i}(value):\n    return value + {i}\n\n\n" for i in range(12))
    return [SourceFile(f"package/module_{i}.py", f"NUMBER = {i}\n\n\n{body}") for i in range(count)]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY), encoding="utf-8")
    return Recipe(
        model_config=path,
        tokenizer=DEMO / "tokenizer.json",
        stages=(Stage(6, 24, 2, 2, 1), Stage(4, 24, 2, 2, 2)),
        learning_rate=1e-2,
        adam_learning_rate=1e-2,
        warmup_steps=2,
        eval_sequences=4,
        eval_seq_len=24,
        eval_depth=2,
    )


@pytest.fixture
def short(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The first stage alone; one program draws its parameters, and its step is one for all tests."""
    monkeypatch.setattr(loop, "init_params", jax.jit(init_params, static_argnums=(0, 2)))
    monkeypatch.setattr(loop, "make_step", lambda recipe, stage, *_: step_of(replace(recipe, **SAME), stage))
    return replace(recipe, stages=recipe.stages[:1], optimizer="adamw")


# Files of a recipe, which a step does not read.
SAME: dict[str, Any] = dict.fromkeys(("model_config", "tokenizer"), DEMO)


@functools.cache
def step_of(recipe: Recipe, stage: Stage) -> Callable[..., step.Trained]:
    return step.make_step(recipe, stage, CONFIG, make_optimizer(recipe, recipe.total_steps))


def run(recipe: Recipe, out: Path, **options: int) -> list[dict]:
    """Train without the final export and return the metrics of every step."""
    steps = options.pop("steps", recipe.total_steps)
    recipe = replace(recipe, stages=(*recipe.stages, Stage(1, 24, 2)))
    loop.train(recipe, out, files=source_files(60), stop_after=steps)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_a_finished_run_is_not_cut_short(recipe: Recipe, tmp_path: Path) -> None:
    run(recipe, tmp_path, steps=3)
    with pytest.raises(CheckpointError, match="holds a run of 3 steps, more than the 2 of this one"):
        run(recipe, tmp_path, steps=2)


def test_a_run_is_resumed_only_if_it_is_known_what_it_is(short: Recipe, tmp_path: Path) -> None:
    def run(steps: int) -> None:
        loop.train(short, tmp_path, files=source_files(60), stop_after=steps)

    run(1)
    for damage in (lambda path: path.write_text("{"), lambda path: path.write_text("1"), Path.unlink):
        damage(tmp_path / "run.json")
        with pytest.raises(
            CheckpointError, match=r"run\.json, which says what the checkpoints .* cannot be read"
        ):
            run(2)


def test_balance_moves_bias_towards_even_load() -> None:
    moved = step.balance(params(), (jnp.array([9.0, 1.0, 4.0, 2.0]),), 0.5)
    block = moved.layers[1].mlp
    assert isinstance(block, Moe)
    np.testing.assert_array_equal(block.bias, [-0.5, 0.5, 0.0, 0.5])


def test_batches_cover_the_stream_once_per_epoch() -> None:
    stream = np.arange(10 * 8 + 3, dtype=np.uint16)
    starts = [batch_at(stream, 8, 2, 3, (0,), i)[:, 0] for i in range(3)]
    assert len({int(s) for batch in starts for s in batch}) == 9
    assert batch_at(stream, 8, 2, 3, (0,), 0).shape == (3, 10)
    assert not np.array_equal(starts[0], batch_at(stream, 8, 2, 3, (0,), 3)[:, 0])
    with pytest.raises(ConfigError, match="corpus has 83 tokens"):
        batch_at(stream, 8, 2, 30, (0,), 0)
    with pytest.raises(ConfigError, match="at least 200"):
        even_windows(stream, 200, 2)


def test_the_plot_says_how_it_is_smoothed_and_shows_the_single_steps(tmp_path: Path, monkeypatch) -> None:
    losses = [4.0, 2.0, 3.0]
    records = [{"step": i, "losses": [value, value + 1]} for i, value in enumerate(losses)]
    held_out = {"step": 3, "held_out": {"losses": [3.5, 4.5]}}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*records, held_out]))
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *given, **options: drawn.append(figure))
    plot_losses(tmp_path)
    (axes,) = drawn[0].axes
    plotted = [list(map(float, cast(Any, line.get_ydata()))) for line in axes.get_lines()]
    one = 1 / SMOOTHING_STEPS
    smooth = [4.0, 4.0 - 2 * one]
    smooth.append(smooth[1] + (3 - smooth[1]) * one)
    for name, shift in (("next token", 0), ("MTP depth 1", 1)):
        assert [value + shift for value in losses] in plotted
        assert [3.5 + shift] in plotted
        (line,) = [line for line in axes.get_lines() if line.get_label() == f"{name}, smoothed"]
        assert cast(Any, line.get_ydata()) == pytest.approx([value + shift for value in smooth])
    legend = axes.get_legend()
    assert legend is not None
    assert f"mean over about {SMOOTHING_STEPS} steps" in legend.get_title().get_text()


@pytest.mark.slow
def test_loss_falls_and_a_resumed_run_equals_an_uninterrupted_one(recipe: Recipe, tmp_path: Path) -> None:
    whole = [r for r in run(recipe, tmp_path / "whole") if "losses" in r]
    assert whole[-1]["losses"][0] < whole[0]["losses"][0] - 0.5
    run(recipe, tmp_path / "parts", steps=4)
    parts = [r for r in run(recipe, tmp_path / "parts") if "losses" in r]
    assert [r["losses"] for r in parts] == [r["losses"] for r in whole]
    assert [r["step"] for r in parts] == list(range(recipe.total_steps))
    assert (tmp_path / "whole" / "loss.png").stat().st_size > 0


def test_ctrl_c_keeps_the_steps_that_were_done_and_the_end_is_a_model_with_its_tokenizer(
    short: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "given", tmp_path / "out"
    folder.mkdir()
    (folder / "mine.json").write_text(short.tokenizer.read_text())
    (folder / "tokenizer.json").write_text("another one")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    own = replace(short, tokenizer=folder / "mine.json")
    told, pressed = RunReporter.step, []

    def press_once(self: RunReporter, step: int, tokens: int, metrics: dict) -> None:
        told(self, step, tokens, metrics)
        if step == 3 and not pressed:
            pressed.append(step)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunReporter, "step", press_once)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.train(own, out, files=source_files(60))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (out / "model").exists()
    model = loop.train(own, out, files=source_files(60))
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "losses" in r] == list(range(own.total_steps))
    assert "held_out" in records[-1]
    state = StateStore(out / "state")
    assert state.latest() == own.total_steps
    state.close()
    assert (model / "tokenizer.json").read_text() == short.tokenizer.read_text()
    assert (model / "chat_template.jinja").read_text() == "{{ messages }}"
    assert load(model).config.num_nextn_predict_layers == 1


@pytest.mark.slow
def test_a_run_refuses_another_seed_and_a_silent_restart(recipe: Recipe, tmp_path: Path) -> None:
    short = replace(recipe, stages=(Stage(2, 24, 2),))
    loop.train(short, tmp_path / "out", files=source_files(60), stop_after=1)
    with pytest.raises(CheckpointError, match="another seed"):
        loop.train(replace(short, seed=1), tmp_path / "out", files=source_files(60))
    vocabulary = tmp_path / "tokenizer.json"
    vocabulary.write_text(short.tokenizer.read_text() + "\n")
    with pytest.raises(CheckpointError, match="another tokenizer"):
        loop.train(replace(short, tokenizer=vocabulary), tmp_path / "out", files=source_files(60))
    with pytest.raises(CheckpointError, match="resume is off"):
        loop.train(short, tmp_path / "out", files=source_files(60), resume=False)


def test_what_cannot_be_trained_is_refused_before_it_takes_time(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "drafts-nothing.json").write_text(
        json.dumps(TINY | {"num_nextn_predict_layers": 0, "nextn_moe": []})
    )
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "small.json").write_text(json.dumps(TINY | {"vocab_size": 8191}))
    for wrong, message in (
        ({"model_config": tmp_path / "drafts-nothing.json"}, "no NextN layer to train"),
        ({"tokenizer": tmp_path / "tokenizer.json"}, "is damaged"),
        ({"tokenizer": tmp_path / "none"}, "does not exist"),
        ({"model_config": tmp_path / "small.json"}, "has 8192 ids, more than the model's vocab_size = 8191"),
    ):
        with pytest.raises(ConfigError, match=message):
            loop.train(replace(recipe, **wrong), tmp_path / "out", files=source_files(1))


def test_recipe_reads_the_demo_file_and_names_mistakes(tmp_path: Path) -> None:
    recipe = Recipe.from_file(DEMO / "train.toml")
    assert recipe.model_config == DEMO / "config.json"
    assert recipe.stage_at(recipe.stages[0].steps) == (1, 0)
    with pytest.raises(ConfigError, match="past the last stage"):
        recipe.stage_at(recipe.total_steps)
    good = 'model_config = "c"\ntokenizer = "t"\n'
    stage = "[[stage]]\nsteps = 1\nseq_len = 8\nbatch = 1\n"
    for text, message in (
        (good + "nonsense = 1\n" + stage, "nonsense"),
        (good, "stage"),
        (good + 'optimizer = "sgd"\n' + stage, "sgd"),
        (
            good + stage.replace("8", "0"),
            "stages.0.seq_len: Input should be greater than or equal to 1, got 0",
        ),
        (good + stage.replace("8", '"x"'), "stages.0.seq_len: Input should be a valid integer, got 'x'"),
        (good + stage + "nonsense = 1\n", "stages.0.nonsense: Unexpected"),
        (good + "learning_rate = nan\n" + stage, "learning_rate: Input should be a finite number"),
        (good + "beta2 = 1.0\n" + stage, "beta2: Input should be less than 1, got 1.0"),
        (
            good + 'optimizer = "adamw"\nmuon_ns_steps = 5\n' + stage,
            "muon_ns_steps: of the optimizer muon alone",
        ),
        (
            good + stage + 'mtp_depth = 8\nmtp_targets = "trunk"\n',
            "seq_len = 8 leaves draft 8 no prediction of the trunk to learn from",
        ),
        ("= 1", "cannot read"),
    ):
        path = tmp_path / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            Recipe.from_file(path)


def test_a_copied_recipe_says_which_files_it_lacks(tmp_path: Path) -> None:
    copy = tmp_path / "mine.toml"
    text = (DEMO / "train.toml").read_text(encoding="utf-8")
    copy.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        Recipe.from_file(copy)
    for part in (
        f"recipe {copy} names",
        f'model_config = "config.json" is {tmp_path / "config.json"}; ',
        f'tokenizer = "tokenizer.json" is {tmp_path / "tokenizer.json"}.',
        f"relative to its folder, {tmp_path}: copy the files there, too, or write absolute paths",
    ):
        assert part in str(caught.value)
    copy.write_text(text.replace('"config.json"', json.dumps(str(DEMO / "config.json"))), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"do not exist: tokenizer = [^;]*\."):
        Recipe.from_file(copy)
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    assert Recipe.from_file(copy).tokenizer == tmp_path / "tokenizer.json"


@pytest.mark.slow
def test_two_minutes_of_the_demo_recipe_learn_python(tmp_path: Path) -> None:
    demo = Recipe.from_file(DEMO / "train.toml")
    short = replace(
        demo,
        packages=(),
        stages=(Stage(30, 128, 4, 2, 1), Stage(10, 128, 4, 2, 3), Stage(1, 128, 4)),
        warmup_steps=5,
        eval_sequences=4,
        eval_seq_len=128,
    )
    loop.train(short, tmp_path, stop_after=40)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    held_out = records[-1]["held_out"]
    uniform = math.log(8192)
    assert held_out["losses"][0] < uniform - 1.5
    assert held_out["losses"][1] < uniform - 1.0
    assert held_out["acceptance"] > 1.2


def test_the_pace_leaves_the_first_step_out_which_compiles(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    reporter = RunReporter(tmp_path, first_step=2, total_steps=10, every_s=0.0)
    for i, seconds in ((2, 60.0), (3, 2.0), (4, 2.0)):
        now[0] += seconds
        reporter.step(i, 100, {"losses": [1.5]})
    assert capsys.readouterr().err.splitlines() == [
        "step 3/10 losses 1.500 | the first step compiles",
        "step 4/10 losses 1.500 | 50 tokens/s, 12 s left",
        "step 5/10 losses 1.500 | 50 tokens/s, 10 s left",
    ]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["tokens_per_s"] for record in records] == [None, 50.0, 50.0]
