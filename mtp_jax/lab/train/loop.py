"""The training loop: a recipe in, checkpoints and a model directory out; resumes at any checkpoint."""

import dataclasses
import functools
import hashlib
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from mtp_jax.checkpoint.folder import copy_text_files
from mtp_jax.checkpoint.write import save_checkpoint
from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.bench import corpus
from mtp_jax.lab.train.data import batch_at, even_windows
from mtp_jax.lab.train.evaluate import evaluate
from mtp_jax.lab.train.optimizer import make_optimizer
from mtp_jax.lab.train.recipe import Recipe, TextSource
from mtp_jax.lab.train.report import RunReporter, plot_losses
from mtp_jax.lab.train.run import TrainingRun, checked
from mtp_jax.lab.train.step import TrainState, make_step
from mtp_jax.lab.train.text import read_text
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import config_of_file
from mtp_jax.model.params import Params, init_params


def train(
    recipe: Recipe,
    out_dir: str | Path,
    resume: bool = True,
    files: Sequence[corpus.SourceFile] | None = None,
    stop_after: int | None = None,
    packages_dir: str | Path | None = None,
) -> Path:
    """Run the recipe and return the directory of the finished model (release layout, bfloat16).

    Args:
        recipe: the stages of the training.
        out_dir: receives `state/` (Orbax), `metrics.jsonl`, `loss.png`, `run.json` and, at the end, `model/`.
        resume: go on from the newest checkpoint below `out_dir`, at the same place in the token stream.
        files: in place of the standard library of the running Python.
        stop_after: stop, with a checkpoint, once this many steps are done; the result then is `out_dir`.
        packages_dir: the folder with the wheels of the recipe's packages.

    Raises:
        KeyboardInterrupt: Ctrl-C; the steps that were done have a checkpoint.
        CheckpointError: `out_dir` holds another run or a longer one, or a checkpoint and `resume` is False.
        ConfigError: the corpus is too short for the recipe, or its files are missing.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    cfg = dataclasses.replace(config_of_file(recipe.model_config), dtype="float32")
    text = read_text(recipe, packages_dir, files)
    if not cfg.num_nextn_predict_layers:
        raise ConfigError(f"{recipe.model_config} has no NextN layer to train; num_nextn_predict_layers = 0")
    tokenizer = corpus.read_tokenizer(recipe.tokenizer)
    if (ids := tokenizer.get_vocab_size()) > cfg.vocab_size:
        raise ConfigError(
            f"{recipe.tokenizer} has {ids} ids, more than the model's vocab_size = {cfg.vocab_size} in "
            f"{recipe.model_config}; raise that, or name the model's own tokenizer"
        )
    streams = {
        names: corpus.tokens(tokenizer, text.of(names), recipe.seed)
        for names in dict.fromkeys(stage.text for stage in recipe.stages)
    }
    held_out = corpus.tokens(tokenizer, text.held_out, recipe.seed)
    windows = even_windows(held_out, recipe.eval_seq_len + 1 + recipe.eval_depth, recipe.eval_sequences)

    optimizer = make_optimizer(recipe, recipe.total_steps)
    params = initial_params(cfg, recipe.seed)
    state = TrainState(params, optimizer.init(cast(Any, params)))
    about = {
        "corpus": text.fingerprint(),
        "seed": recipe.seed,
        "tokenizer": hashlib.sha256(recipe.tokenizer.read_bytes()).hexdigest(),
        "model config": hashlib.sha256(recipe.model_config.read_bytes()).hexdigest(),
    }
    last = recipe.total_steps if stop_after is None else min(stop_after, recipe.total_steps)
    run = TrainingRun(out_dir, recipe.checkpoint_minutes, last, resume)
    first, state = run.begin(state, about, {"recipe": _plain(recipe)})
    reporter = RunReporter(out_dir, first, recipe.total_steps, recipe.report_seconds)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    sizes = ", ".join(f"{len(stream):,} of {' and '.join(names)}" for names, stream in streams.items())
    reporter.say(f"{count:,} parameters, training tokens: {sizes}; steps {first}..{last}")
    del params

    @functools.cache
    def step_of(stage: int) -> Callable[..., PyTree]:
        return make_step(recipe, recipe.stages[stage], cfg, optimizer)

    def checkpoint(done: int, state: TrainState) -> None:
        found = evaluate(state.params, cfg, windows, recipe.eval_depth)
        reporter.evaluation(done, dataclasses.asdict(found) | {"acceptance": found.acceptance})
        plot_losses(out_dir)

    state = run.steps(state, lambda i, now: _one_step(recipe, i, streams, now, step_of, reporter), checkpoint)
    if last < recipe.total_steps:
        return out_dir
    return export(cfg, state.params, recipe, out_dir / "model")


def initial_params(cfg: ModelConfig, seed: int) -> Params:
    """Random float32 parameters; maps that write to the residual stream are scaled by 1/sqrt(2 layers)."""
    scale = 1 / math.sqrt(2 * cfg.num_hidden_layers)

    def scaled(path: KeyPath, leaf: jax.Array) -> jax.Array:
        return leaf * scale if path[-1] in _TO_RESIDUAL else leaf

    return jax.tree_util.tree_map_with_path(scaled, init_params(cfg, jax.random.key(seed), "float32"))


_TO_RESIDUAL = tuple(jax.tree_util.GetAttrKey(name) for name in ("o", "down"))


def export(cfg: ModelConfig, params: Params, recipe: Recipe, directory: Path) -> Path:
    """Write the model in the release layout (bfloat16), with the tokenizer and the files beside that."""
    directory.mkdir(parents=True, exist_ok=True)
    save_checkpoint(directory, dataclasses.replace(cfg, dtype="bfloat16"), params, dtype="bfloat16")
    copy_text_files(recipe.tokenizer.parent, directory)
    shutil.copyfile(recipe.tokenizer, directory / "tokenizer.json")  # a recipe may give it another name
    return directory


def _one_step(
    recipe: Recipe,
    step: int,
    streams: dict[tuple[TextSource, ...], np.ndarray],
    state: TrainState,
    step_of: Callable[[int], Callable[..., PyTree]],
    reporter: RunReporter,
) -> TrainState:
    index, local = recipe.stage_at(step)
    stage = recipe.stages[index]
    tokens = batch_at(
        streams[stage.text],
        stage.seq_len,
        1 + stage.mtp_depth,
        stage.batch * stage.micro_batches,
        (recipe.seed, index),
        local,
    )
    result = step_of(index)(state, tokens.reshape(stage.micro_batches, stage.batch, -1))
    losses, norm = checked(step, result.aux.losses, result.grad_norm)
    loads = np.stack([np.asarray(load) for load in result.aux.loads]) if result.aux.loads else np.ones((1, 1))
    metrics = {
        "losses": losses,
        "accuracy": np.asarray(result.aux.accuracy).tolist(),
        "grad_norm": norm,
        "max_load": float((loads.max(-1) / loads.mean(-1)).max()),
    }
    reporter.step(step, stage.step_tokens, metrics)
    return result.state


def _plain(recipe: Recipe) -> JsonObject:
    values = dataclasses.asdict(recipe)
    return values | {key: Path(values[key]).name for key in ("model_config", "tokenizer")}
