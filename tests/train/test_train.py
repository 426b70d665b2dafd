"""The recipe, the objective, the loop: loss falls, resuming is exact, a seed fixes the run."""

import dataclasses
import functools
import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from mtp_jax.bench.corpus import SourceFile
from mtp_jax.checkpoint import load
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.model import nextn, trunk
from mtp_jax.model.backend import Backend, xla
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Moe, Params, init_params
from mtp_jax.train import loop, step
from mtp_jax.train.data import batch_at, even_windows
from mtp_jax.train.loss import loss
from mtp_jax.train.mixed import differentiable
from mtp_jax.train.optimizer import make_optimizer
from mtp_jax.train.recipe import Recipe, Stage
from mtp_jax.train.report import SMOOTHING_STEPS, Reporter, plot_losses
from mtp_jax.train.state_store import StateStore

DEMO = Path(__file__).parents[2] / "configs" / "demo"
TINY = {
    "vocab_size": 8192,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.0,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_nextn_predict_layers": 1,
    "nextn_moe": [False],
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-3,  # unlike that of the norms on low ranks
    "torch_dtype": "float32",
}


def source_files(count: int) -> list[SourceFile]:
    """Small, repetitive modules whose names land on both sides of the split."""
    body = "".join(f"def function_{i}(value):\n    return value + {i}\n\n\n" for i in range(12))
    return [SourceFile(f"package/module_{i}.py", f"NUMBER = {i}\n\n\n{body}") for i in range(count)]


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_dict(TINY)


@pytest.fixture(scope="module")
def params(config: ModelConfig) -> Params:
    return init_params(config, jax.random.key(0))


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
def simple(recipe: Recipe) -> Recipe:
    """One stage, and an optimizer that is soon compiled."""
    return dataclasses.replace(recipe, stages=recipe.stages[:1], optimizer="adamw")


def run(recipe: Recipe, out: Path, **options: int) -> list[dict]:
    """Train without the final export and return the metrics of every step."""
    steps = options.pop("steps", recipe.total_steps)
    recipe = dataclasses.replace(recipe, stages=(*recipe.stages, Stage(1, 24, 2)))
    loop.train(recipe, out, files=source_files(60), stop_after=steps)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@functools.partial(jax.jit, static_argnames=("cfg", "depth", "on"))
def forced(
    params: Params, cfg: ModelConfig, tokens: jax.Array, hidden: jax.Array, depth: int, on: Backend
) -> list[jax.Array]:
    """The hidden states of drafts 1 to ``depth``."""
    return [d.hidden for d in nextn.drafts_forced(params, cfg, tokens, hidden, depth, on)]


def test_what_is_trained_is_what_is_run(config: ModelConfig, params: Params) -> None:
    tokens = jax.random.randint(jax.random.key(1), (2, 14), 0, config.vocab_size)
    hidden = jax.jit(trunk.forward, static_argnums=1)(params, config, tokens[:, :10])
    ours = jax.jit(trunk.forward, static_argnums=(1, 3))(params, config, tokens[:, :10], differentiable())
    np.testing.assert_allclose(trunk.logits(params, ours), trunk.logits(params, hidden), atol=1e-5)
    drafts = forced(params, config, tokens, hidden, 3, differentiable())
    teacher_forced = jax.jit(nextn.teacher_forced, static_argnums=(1, 2))
    first = teacher_forced(params, config, 0, tokens[:, 1:11], hidden)
    np.testing.assert_allclose(drafts[0], first, atol=2e-5)
    # Inference drafts from row i: rows 0..i hold the trunk's states, then the layer's own output is appended.
    i = 4
    rows = jnp.concatenate([hidden[:, : i + 1], first[:, i : i + 1]], axis=1)
    for k in (1, 2):
        z = teacher_forced(params, config, 0, tokens[:, 1 : i + 2 + k], rows)[:, -1:]
        np.testing.assert_allclose(drafts[k][:, i : i + 1], z, atol=2e-5)
        rows = jnp.concatenate([rows, z], axis=1)


def test_products_of_bfloat16_factors_train_the_same_model(config: ModelConfig, params: Params) -> None:
    tokens = jax.random.randint(jax.random.key(5), (2, 30), 0, config.vocab_size)

    def grads(products: str) -> tuple[float, dict[str, np.ndarray]]:
        run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=(1, 3, 4, 5, 6))
        (total, _), found = run(params, config, tokens, 0.3, 2, "data", products)
        leaves = jax.tree_util.tree_leaves_with_path(found)
        return float(total), {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}

    exact, wanted = grads("float32")
    narrow, got = grads("bfloat16")
    assert narrow != exact, "nothing was rounded"
    assert narrow == pytest.approx(exact, rel=2e-3)  # bfloat16 keeps 8 bits: 2^-9 per factor
    for path, want in wanted.items():
        along = np.vdot(got[path], want) / max(float(np.vdot(want, want)), 1e-30)
        assert along == pytest.approx(1.0, abs=0.05) or not want.any(), path
        assert np.linalg.norm(got[path] - want) <= 0.1 * np.linalg.norm(want), path


def test_loss_is_the_weighted_sum_of_its_terms(config: ModelConfig, params: Params) -> None:
    tokens = jax.random.randint(jax.random.key(2), (2, 16), 0, config.vocab_size)
    total, aux = jax.jit(loss, static_argnums=(1, 4))(params, config, tokens, 0.3, 2)
    assert aux.losses.shape == aux.accuracy.shape == (3,)
    assert float(total) == pytest.approx(float(aux.losses[0] + 0.3 * aux.losses[1:].mean()), rel=1e-6)
    assert float(aux.loads[0].sum()) == 2 * 13 * config.num_experts_per_tok
    hidden = jax.jit(trunk.forward, static_argnums=1)(params, config, tokens[:, :13])
    logits = trunk.logits(params, hidden)
    expected = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:14, None], -1).mean()
    assert float(aux.losses[0]) == pytest.approx(float(expected), abs=1e-5)


def test_drafts_learn_the_text_or_what_the_trunk_says(config: ModelConfig, params: Params) -> None:
    tokens = jax.random.randint(jax.random.key(4), (2, 13), 0, config.vocab_size)
    length = 10
    hidden = jax.jit(trunk.forward, static_argnums=1)(params, config, tokens[:, :length])
    assert params.head is None  # tied
    trunk_log = jax.nn.log_softmax(hidden @ params.embed.T)
    drafts = [z @ params.embed.T for z in forced(params, config, tokens, hidden, 2, xla())]
    of = jax.jit(loss, static_argnums=(1, 4, 5))
    (_, text), (_, taught) = (of(params, config, tokens, 0.3, 2, targets) for targets in ("data", "trunk"))
    for k, logits in enumerate(drafts, start=1):
        log = jax.nn.log_softmax(logits)
        right = tokens[:, k + 1 : k + 1 + length]
        nll = -jnp.take_along_axis(log, right[..., None], -1).mean()
        assert float(text.losses[k]) == pytest.approx(float(nll), rel=1e-5)
        assert float(text.accuracy[k]) == pytest.approx(float((log.argmax(-1) == right).mean()))
        teacher, pupil = trunk_log[:, k:], log[:, :-k]  # the same token, k positions later in the trunk
        cross = -(jnp.exp(teacher) * pupil).sum(-1).mean()
        assert float(taught.losses[k]) == pytest.approx(float(cross), rel=1e-5)
        same = (teacher.argmax(-1) == pupil.argmax(-1)).mean()
        assert float(taught.accuracy[k]) == pytest.approx(float(same))
    assert float(text.losses[0]) == float(taught.losses[0])


def test_micro_batches_are_one_batch(config: ModelConfig, params: Params, recipe: Recipe) -> None:
    recipe = dataclasses.replace(recipe, balance_rate=0.0, optimizer="adamw")
    tokens = jax.random.randint(jax.random.key(5), (4, 14), 0, config.vocab_size)
    found = []
    for stage in (Stage(1, 12, 4, 1, 1), Stage(1, 12, 2, 2, 1)):
        optimizer = make_optimizer(recipe, recipe.total_steps)
        own = jax.tree.map(jnp.copy, params)
        state = step.TrainState(own, optimizer.init(cast(Any, own)))
        advance = step.make_step(recipe, stage, config, optimizer)
        found.append(advance(state, tokens.reshape(stage.micro_batches, stage.batch, -1)))
    whole, parts = found
    np.testing.assert_allclose(whole.aux.losses, parts.aux.losses, rtol=1e-5)
    np.testing.assert_allclose(whole.grad_norm, parts.grad_norm, rtol=1e-4)
    for a, b in zip(whole.aux.loads, parts.aux.loads, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_finished_run_is_a_model_with_its_tokenizer(recipe: Recipe, tmp_path: Path) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "mine.json").write_text(recipe.tokenizer.read_text())
    (folder / "tokenizer.json").write_text("another one")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    own = dataclasses.replace(recipe, tokenizer=folder / "mine.json", stages=(Stage(1, 24, 2),))
    model = loop.train(own, tmp_path / "out", files=source_files(60))
    assert (model / "tokenizer.json").read_text() == recipe.tokenizer.read_text()
    assert (model / "chat_template.jinja").read_text() == "{{ messages }}"
    loaded = load(model)
    state = StateStore(tmp_path / "out" / "state")
    assert state.latest() == 1
    state.close()
    assert loaded.config.num_nextn_predict_layers == 1
    summary = (tmp_path / "out" / "metrics.jsonl").read_text()
    assert "held_out" in summary


@pytest.mark.slow
def test_a_finished_run_is_not_cut_short(recipe: Recipe, tmp_path: Path) -> None:
    run(recipe, tmp_path, steps=3)
    with pytest.raises(CheckpointError, match="holds a run of 3 steps, more than the 2 of this one"):
        run(recipe, tmp_path, steps=2)


def test_a_run_is_resumed_only_if_it_is_known_what_it_is(simple: Recipe, tmp_path: Path) -> None:
    run(simple, tmp_path, steps=1)
    for damage in (lambda path: path.write_text("{"), lambda path: path.write_text("1"), Path.unlink):
        damage(tmp_path / "run.json")
        with pytest.raises(
            CheckpointError, match=r"run\.json, which says what the checkpoints .* cannot be read"
        ):
            run(simple, tmp_path, steps=2)


def test_balance_moves_bias_towards_even_load(params: Params) -> None:
    moved = step.balance(params, (jnp.array([9.0, 1.0, 4.0, 2.0]),), 0.5)
    block = moved.layers[1].mlp
    assert isinstance(block, Moe)
    np.testing.assert_array_equal(block.bias, [-0.5, 0.5, 0.0, 0.5])


def test_bias_gets_no_gradient_and_every_other_parameter_does(config: ModelConfig, params: Params) -> None:
    tokens = jax.random.randint(jax.random.key(3), (2, 24), 0, config.vocab_size)
    gradient = jax.jit(jax.grad(loss, has_aux=True), static_argnums=(1, 4))
    grads, _ = gradient(params, config, tokens, 0.3, 2)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert bool(jnp.any(leaf != 0)) != (path[-1] == jax.tree_util.GetAttrKey("bias")), path


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


def test_ctrl_c_keeps_the_steps_that_were_done(simple: Recipe, tmp_path: Path, monkeypatch) -> None:
    report, pressed = Reporter.step, []

    def press_once(self: Reporter, step: int, tokens: int, metrics: dict) -> None:
        report(self, step, tokens, metrics)
        if step == 3 and not pressed:
            pressed.append(step)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Reporter, "step", press_once)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(simple, tmp_path)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    records = [r for r in run(simple, tmp_path) if "losses" in r]
    assert [r["step"] for r in records] == list(range(simple.total_steps))


@pytest.mark.slow
def test_a_run_refuses_another_seed_and_a_silent_restart(recipe: Recipe, tmp_path: Path) -> None:
    short = dataclasses.replace(recipe, stages=(Stage(2, 24, 2),))
    loop.train(short, tmp_path / "out", files=source_files(60), stop_after=1)
    with pytest.raises(CheckpointError, match="another seed"):
        loop.train(dataclasses.replace(short, seed=1), tmp_path / "out", files=source_files(60))
    vocabulary = tmp_path / "tokenizer.json"
    vocabulary.write_text(short.tokenizer.read_text() + "\n")
    with pytest.raises(CheckpointError, match="another tokenizer"):
        loop.train(dataclasses.replace(short, tokenizer=vocabulary), tmp_path / "out", files=source_files(60))
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
            loop.train(dataclasses.replace(recipe, **wrong), tmp_path / "out", files=source_files(1))


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
    short = dataclasses.replace(
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
