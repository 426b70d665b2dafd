"""Tuning of a draft head for a frozen trunk: answers, hidden states, steps, a folder, acceptance."""

import gc
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from mtp_jax.api.llm import LLM
from mtp_jax.api.options import LLMOptions
from mtp_jax.api.progress import Reporter as Phases
from mtp_jax.checkpoint.write import write_json
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.speculation import Speculation
from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.train.data import batch_at, even_windows
from mtp_jax.lab.train.head_loss import HeadFigures, Task, merged, objective, split
from mtp_jax.lab.train.learner import learner_of
from mtp_jax.lab.train.mixed import differentiable
from mtp_jax.lab.train.optimizer import make_optimizer
from mtp_jax.lab.train.own_prompts import write_own_prompts
from mtp_jax.lab.train.prompts import PromptLine, read_prompts
from mtp_jax.lab.train.recipe import Descent
from mtp_jax.lab.train.report import Panel, RunReporter, plot_losses
from mtp_jax.lab.train.run import TrainingRun, check_same_run, checked
from mtp_jax.lab.train.start import Start, begin
from mtp_jax.lab.train.states import StateStream, StateWindows, write_states
from mtp_jax.lab.train.step import TrainState
from mtp_jax.lab.train.tune_options import TuneOptions
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import data_size, partition

_LOG = logging.getLogger(__name__)
_REPORT_SECONDS = 30.0
_PHASES = {
    "prompts": "before 1 of 5, prompts of its own",
    "held_out": "1 of 5, answers and states of held-out texts",
    "learned": "2 of 5, answers and states of texts to learn",
    "before": "3 of 5, acceptance before",
    "steps": "4 of 5, steps",
    "after": "5 of 5, acceptance after",
}
_EVALUATED = 32  # windows of held-out text that every checkpoint looks at, at most
_MEASURED = {"greedy": 0.0, "temperature 1": 1.0}
_OBJECTIVES = {
    "kl": "divergence from the trunk, nats",
    "tv": "total variation from the trunk",
    "text": "cross entropy of the text, nats",
}


@dataclass(frozen=True)
class Given:
    """The files and the model of a tuning.

    Attributes:
        options: of the tuning.
        model: the model, the head to begin with, and the devices.
        prompts: the file of texts, JSON lines, which is written where the model writes its own.
        out: receives `states/`, `state/`, `metrics.jsonl`, `loss.png`, `report.json` and `head/`.
        facts: facts of the model and the head that a resumed run must share.
        sampling: options of the answers.
    """

    options: TuneOptions
    model: LLMOptions
    prompts: Path
    out: Path
    facts: JsonObject
    sampling: JsonObject

    @property
    def drafts(self) -> int:
        """Drafts of a step of the engine."""
        return self.model.drafts


def tune(given: Given, open_llm: Callable[[Path | None], LLM], report: Phases) -> JsonObject:
    """Tune a head and return the contents of `report.json`; goes on where an interrupted run stopped.

    open_llm: opens the model with the drafter of this folder; None: with its own, if it has one.
    The model and the head that learns are never in memory together.

    Raises:
        ConfigError, CheckpointError, RequestError: the message names the option or the file to change.
        KeyboardInterrupt: Ctrl-C; shards and steps that were done are kept.
    """
    given.out.mkdir(parents=True, exist_ok=True)
    with report.phase("read head"):  # so that it is refused before the model is loaded
        task = _task(given, begin(given.model, given.options))
    before = _prepare(given, task, open_llm, report)
    _learn(given, task)
    llm = open_llm(given.out / "head")
    with report.phase(_PHASES["after"]):
        after = _measure(given, llm, _texts(given, llm)[1])
    found = {"drafts": given.drafts, "before": before, "after": after}
    write_json(given.out / "report.json", found)
    return found


def _task(given: Given, start: Start) -> Task:
    options, head = given.options, learner_of(start.dense.cfg)
    indexer = start.cfg.indexer
    if indexer and start.params.nextn and options.window > indexer.topk:
        raise ConfigError(
            f"window = {options.window}; sparse attention is tuned over windows that it sees as a whole, of "
            f"at most index_topk = {indexer.topk} tokens"
        )
    mesh = given.model.mesh
    if options.windows % data_size(mesh):
        raise ConfigError(
            f"windows = {options.windows} do not divide over the {data_size(mesh)} data shards of the mesh; "
            "choose a multiple"
        )
    if options.objective == "text":
        _LOG.warning(
            "objective = text: the answers' tokens in the place of the trunk's distribution, which lowered "
            "the acceptance of good heads where it was tried; kl and tv learn that distribution"
        )
    drafts = head.block or given.drafts
    if options.window <= drafts:
        raise ConfigError(f"window = {options.window}; expected more than the {drafts} drafts of the head")
    on = differentiable(options.products, mesh)
    return Task(head, on, drafts, options.objective, options.decay_of(drafts, head.block is not None))


# Answers and hidden states


def _prepare(
    given: Given, task: Task, open_llm: Callable[[Path | None], LLM], report: Phases
) -> JsonObject | None:
    """Write the states, unless they are there. Returns the acceptance of the model's own drafts, if any."""
    folder, done, options = given.out / "states", given.out / "before.json", given.options
    facts = given.facts | {"sampling": given.sampling, "taps": [*task.taps]}
    facts |= {"held_out": options.held_out}
    check_same_run(given.out / "states.json", facts, {}, resuming=folder.exists())
    if not done.exists():
        llm = open_llm(None)
        if options.own_prompts:
            own, phase = (options.own_prompts, options.seed, given.sampling), _PHASES["prompts"]
            write_own_prompts(llm, *own, given.prompts, report, phase)
        learned, held_out = _texts(given, llm)
        for name, texts in (("held_out", held_out), ("learned", learned)):
            write_states(llm, texts, folder / name, task.taps, given.sampling, report, _PHASES[name])
        with report.phase(_PHASES["before"]):
            write_json(done, _measure(given, llm, held_out) if llm.engine.cfg.drafts else None)
        del llm
        gc.collect()  # the model leaves its devices before the head learns
    return json.loads(done.read_text(encoding="utf-8"))


def _texts(given: Given, llm: LLM) -> tuple[list[PromptLine], list[PromptLine]]:
    """(Texts to learn, held-out texts), which are spread over the file. Raises RequestError, ConfigError."""
    texts = read_prompts(given.prompts, llm.tokenizer, llm.engine.config.max_model_len)
    count = given.options.held_out
    if len(texts) <= count:
        raise ConfigError(
            f"{given.prompts} has {len(texts)} texts, and held_out = {count} of them are not learned; give "
            "more texts or lower it"
        )
    held = {i * len(texts) // count for i in range(count)}
    return [t for i, t in enumerate(texts) if i not in held], [texts[i] for i in sorted(held)]


def _measure(given: Given, llm: LLM, texts: Sequence[PromptLine]) -> JsonObject:
    """Acceptance over answers to these texts, by temperature.

    The first half of a ready text is its prompt.
    """
    prompts = [text.prompt or (text.answer or ())[: max(1, len(text.answer or ()) // 2)] for text in texts]
    found = {}
    for name, temperature in _MEASURED.items():
        own: JsonObject = {"temperature": temperature, "num_speculative_tokens": given.drafts}
        wanted = SamplingParams(**given.sampling | own)
        outputs = llm.generate(
            prompts, [replace(wanted, seed=given.options.seed + i) for i in range(len(prompts))]
        )
        counts = sum((output.speculation.drafter for output in outputs), Speculation())
        shares = [n / max(counts.steps, 1) for n in counts.accepted_per_position]
        found[name] = {"length": counts.acceptance_length, "accepted": shares, "steps": counts.steps}
    return found


# Steps


def _learn(given: Given, task: Task) -> None:
    """Do the steps, and write the head."""
    options = given.options
    learned, held_out = (
        StateStream(given.out / "states" / name, task.taps) for name in ("learned", "held_out")
    )
    start = begin(given.model, options, learned.answers)
    trained, fixed = split(start.dense.params)
    rate = options.learning_rate
    descent = Descent(
        optimizer=options.optimizer, learning_rate=rate, adam_learning_rate=rate, weight_decay=0.0
    )
    state = TrainState(trained, jax.jit(make_optimizer(descent, options.steps).init)(trained))
    run = TrainingRun(given.out, options.checkpoint_minutes, options.steps)
    facts = {"seed": options.seed, "drafts": task.drafts, "prompts": given.facts["prompts"]}
    facts |= {"draft_vocab": options.draft_vocab, "draft_mlp": options.draft_mlp}
    first, state = run.begin(state, facts | {"window": options.window}, {"options": asdict(options)})
    reporter = RunReporter(given.out, first, options.steps, _REPORT_SECONDS)
    count = sum(leaf.size for leaf in jax.tree.leaves(trained))
    reporter.say(
        f"{_PHASES['steps']}: {count:,} parameters learn from {learned.answered:,} tokens of answers; "
        f"steps {first}..{options.steps}"
    )
    del trained
    looked = _look(given, task, fixed, held_out)

    def one(step: int, state: TrainState) -> TrainState:
        windows = _windows(given, task, learned, step)
        state, aux, norm = _step(task, descent, options.steps, state, fixed, windows)
        losses, norm = checked(step, aux.losses, norm)
        shares = {name: np.asarray(getattr(aux, name)).tolist() for name in ("accepted", "overlap")}
        reporter.step(step, options.windows * options.window, {"losses": losses, **shares, "grad_norm": norm})
        return state

    def checkpoint(done: int, state: TrainState) -> None:
        found = looked(state.params)
        reporter.evaluation(done, {name: np.asarray(a).tolist() for name, a in found._asdict().items()})
        plot_losses(given.out, panels)

    panels = (
        Panel("losses", _OBJECTIVES[options.objective], ("draft",)),
        Panel("accepted", "share of greedy drafts accepted", ("draft",)),
    )
    if not first:
        checkpoint(0, state)
    start.save(given.out / "head", merged(run.steps(state, one, checkpoint).params, fixed.drafts))


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _step(
    task: Task, descent: Descent, steps: int, state: TrainState, fixed: Params, windows: StateWindows
) -> tuple[TrainState, HeadFigures, jax.Array]:
    """One of ``steps`` steps. Returns (state, figures, the gradient's norm)."""
    grads, aux = jax.grad(objective, has_aux=True)(state.params, fixed, task, windows)
    tree: Any = state.params  # optax's type for trees knows no dataclasses
    updates, opt_state = make_optimizer(descent, steps).update(grads, state.opt_state, tree)
    params: Any = optax.apply_updates(tree, updates)
    return TrainState(params, opt_state), aux, optax.tree.norm(grads)


@partial(jax.jit, static_argnums=0)
def _figures(task: Task, trained: Any, fixed: Params, windows: StateWindows) -> HeadFigures:
    return objective(trained, fixed, task, windows)[1]


def _windows(given: Given, task: Task, stream: StateStream, step: int) -> StateWindows:
    """The windows of a step: a pure function of seed and step."""
    o = given.options
    places = batch_at(np.arange(len(stream)), o.window, task.extra, o.windows, (o.seed,), step)
    return _cut(given, task, stream, places[:, 0], o.window, step)


def _cut(
    given: Given, task: Task, stream: StateStream, starts: np.ndarray, length: int, number: int
) -> StateWindows:
    """Windows on their devices. Blocks, if the head drafts blocks, follow about every token once."""
    blocks = length // task.head.block if task.head.block else 0
    random = np.random.default_rng((given.options.seed, number))
    windows = stream.windows(
        starts, length + task.extra, random.integers(1, length + 1, (len(starts), blocks))
    )
    mesh = given.model.mesh
    return windows if mesh is None else jax.device_put(windows, NamedSharding(mesh, partition("slots")))


def _look(given: Given, task: Task, fixed: Params, stream: StateStream) -> Callable[[Any], HeadFigures]:
    """A function of trained parameters that gives the mean figures over windows of held-out text."""
    size, length = given.options.windows, min(given.options.window, len(stream) - task.extra)
    if length < 1:
        raise ConfigError(f"the held-out texts have {len(stream)} tokens; give more texts or raise held_out")
    groups = max(1, min(_EVALUATED, len(stream) // (length + task.extra)) // size)
    starts = even_windows(np.arange(len(stream)), length + task.extra, groups * size)[:, 0]
    cut = [_cut(given, task, stream, some, length, i) for i, some in enumerate(np.split(starts, groups))]

    def looked(trained: Any) -> HeadFigures:
        found = [_figures(task, trained, fixed, windows) for windows in cut]
        return HeadFigures(*(np.mean(np.asarray(each), axis=0) for each in zip(*found, strict=True)))

    return looked
