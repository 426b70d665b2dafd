"""Decode steps of a large model on one device, with random weights: times, or a count of bytes (``dry_run``).

A level is a depth and a number of slots. Acceptance is forced (``mtp_jax.decode.law``); the text is garbage.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from mtp_jax.api.cache_size import POOL, allocatable
from mtp_jax.api.local import backend_of, decoding_of, make_runner
from mtp_jax.checkpoint import formats_kept
from mtp_jax.checkpoint.random_weights import abstract_params, random_params
from mtp_jax.decode.keys import MAX_DRAFTS, SamplingMode, StepKey
from mtp_jax.decode.launches import ReleaseCache
from mtp_jax.decode.law import Acceptance
from mtp_jax.decode.runner import LocalRunner
from mtp_jax.engine.config import Dtype, EngineConfig
from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.bench import cost, steps
from mtp_jax.lab.bench.report import Report, forced, table
from mtp_jax.lab.planning.hardware import GPUS, Gpu, gpu_of
from mtp_jax.model.backend import backend
from mtp_jax.model.choices import KernelChoice
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.device import platform
from mtp_jax.model.draft_rows import with_draft_rows
from mtp_jax.model.narrow import nbytes
from mtp_jax.model.params import Params
from mtp_jax.model.room import MEMORY_FRACTION, OVERHEAD, Room

# 2.9 tokens per step with three drafts: SGLang's and DeepSeek's reports of DeepSeek-V3 name 2.4 to 3.
ACCEPTANCE = 0.85, 0.64, 0.41
# The context of the kernels' cases and of the compiled steps' budget.
ROWS = 4096
_MOST = 25  # kernels to print of a level, so that it fits on a screen; the JSON has all
_GIB = 2**30
# The attributes that Pallas reads of the device that a program is lowered for; H100s have the same.
_H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
_CARD = GPUS["h200"]


@dataclass(frozen=True)
class StepLoad:
    """The steps to measure.

    Attributes:
        depths, slots: each pair of these is a level.
        rows: number of cached rows of each slot; None: ``ROWS``, or the most that leave the model positions
            for the steps.
        acceptance: the option of ``LLM``; each depth has the first of several shares.
        steps: number of steps to time at each level.
        sampled: whether steps are of the program that can sample, which a server runs for greedy rows, too.
        draft_vocab: number of tokens that drafts choose among; None: all.
    """

    depths: Sequence[int]
    slots: Sequence[int]
    rows: int | None = None
    acceptance: Acceptance = ACCEPTANCE
    steps: int = 200
    sampled: bool = False
    draft_vocab: int | None = None


@dataclass(frozen=True)
class StepLevel:
    """A depth with a number of slots, of one model.

    Attributes:
        cfg: the model; at depth 0 its trunk alone.
        config: sizes of the engine.
        rows: number of cached rows of each slot before the first step.
        sampled: see ``StepLoad``.
    """

    cfg: ModelConfig
    config: EngineConfig
    rows: int
    sampled: bool

    @property
    def depth(self) -> int:
        """Drafts per step."""
        return self.config.num_speculative_tokens

    @property
    def slots(self) -> int:
        """Slots of the step."""
        return self.config.max_num_seqs

    @property
    def key(self) -> StepKey:
        """The program."""
        c = self.config
        mode = SamplingMode(c.drafting, c.verifier) if self.sampled else SamplingMode()
        return StepKey(c.max_num_seqs, self.depth, c.columns, mode)

    def params(self, whole: Params) -> Params:
        """The parameters that the level reads."""
        if not self.depth:
            return whole.with_drafts()
        ids = self.config.draft_vocab
        return with_draft_rows(whole, ids, None) if ids else whole

    def runner(self, whole: Params, *, allocate: bool = True, kernels: KernelChoice = "auto") -> LocalRunner:
        """A runner, with its cache or with shapes alone. Raises ConfigError."""
        config = replace(self.config, kernels=kernels)
        decoding = decoding_of(self.cfg, config, backend_of(config))
        return make_runner(decoding, whole, config, allocate=allocate)

    def touched(self, whole: Params) -> float:
        """Bytes of weights and cached rows that a step reads, if tokens choose experts evenly."""
        page = self.config.page_size
        key = replace(self.key, pages=-(-self.rows // page))
        return cost.of_launch(key, self.cfg, self.params(whole), page, self.config.dtype, 1).bytes

    def __str__(self) -> str:
        return f"depth {self.depth}, {self.slots} slot{'s' * (self.slots != 1)} of {self.rows:,} rows"


def levels_of(name: str, cfg: ModelConfig, load: StepLoad) -> list[StepLevel]:
    """The levels, checked. Raises ConfigError."""
    if wrong := [depth for depth in load.depths if not 0 <= depth <= MAX_DRAFTS]:
        raise ConfigError(f"--depths {wrong[0]}; expected 0 to {MAX_DRAFTS} drafts")
    if any(load.depths) and not cfg.drafts:
        raise ConfigError(
            f"--depths {max(load.depths)}, but {name} declares no NextN layer to draft with; use --depths 0"
        )
    among = _drafted(name, cfg, load.draft_vocab)
    dtype: Dtype = "float32" if platform() == "cpu" or cfg.dtype == "float32" else "bfloat16"

    deepest = max(load.depths)
    room = cfg.max_position_embeddings - steps.growth(deepest, load.steps)
    rows = min(ROWS, room) if load.rows is None else load.rows
    if not 0 < rows <= room:
        raise ConfigError(
            f"{max(rows, 1):,} rows and {load.steps} steps at depth {deepest}, but {name} has positions for "
            f"{cfg.max_position_embeddings:,} tokens; lower --rows or --steps"
        )

    def level(slots: int, depth: int) -> StepLevel:
        given = load.acceptance
        kept = given if isinstance(given, str | int | float) else tuple(given)[:depth]
        config = EngineConfig(
            num_speculative_tokens=depth,
            max_num_seqs=slots,
            max_model_len=rows + steps.growth(depth, load.steps),
            page_size=cfg.usual_page,
            dtype=dtype,
            prefix_cache=False,
            synthetic_acceptance=kept if depth else None,
            draft_vocab=among if depth else None,
        )
        return StepLevel(cfg if depth else cfg.without_drafts(), config, rows, load.sampled)

    slots, depths = map(dict.fromkeys, (load.slots, load.depths))
    return [level(count, depth) for count in slots for depth in depths]


def _drafted(name: str, cfg: ModelConfig, count: int | None) -> tuple[int, ...] | None:
    """Tokens that drafts choose among: the first of the vocabulary. Raises ConfigError for too many."""
    if count is not None and count > cfg.vocab_size:
        raise ConfigError(f"--draft-vocab {count}; {name} has {cfg.vocab_size:,} tokens")
    return None if count is None else tuple(range(count))


def run(name: str, cfg: ModelConfig, load: StepLoad, trace: bool = False) -> Iterator[Report]:
    """Measure level by level, on this process's device. trace: also print where each level's time goes.

    Raises ConfigError at once, before anything is allocated, for levels that the device cannot hold.
    """
    levels = levels_of(name, cfg, load)
    whole, sizes = _sizes(cfg, levels)
    for level, cache in zip(levels, sizes, strict=True):
        _check_room(f"{name} at {level}", nbytes(whole), cache, allocatable())
    return _measured(name, levels, whole, sizes, load.steps, trace)


def _measured(
    name: str, levels: Sequence[StepLevel], whole: Params, sizes: Sequence[int], count: int, trace: bool
) -> Iterator[Report]:
    """A report after each level. whole: shapes of the parameters. count: steps of a level."""
    cfg, device = levels[0].cfg, jax.devices()[0].device_kind
    title = f"Steps of {name}, {cfg.num_hidden_layers} layers, random weights, on {device}"
    about = f"{_about(levels[0], nbytes(whole))}; {count} steps at each level."
    laws = {one.depth: f"at depth {one.depth} {one.config.law}" for one in levels if one.config.law}
    params = backend().laid_out(random_params(jax.random.key(0), whole, cfg.n_routed_experts))
    found: list[JsonObject] = []
    for level, cache in zip(levels, sizes, strict=True):
        runner = level.runner(params)
        measured = steps.measure(runner, level.key, level.rows, count)
        runner.do(ReleaseCache())
        found.append(_figures(level, measured, level.touched(whole), gpu_of(device)) | {"cache_bytes": cache})
        notes = [about, f"{_NOTE}{_FLOOR}the bandwidth of the card's data sheet."]
        notes += map(_spent, found) if trace else ()
        figures = {"weight_bytes": nbytes(whole), "levels": found}
        pending = len(levels) - len(found)
        report = Report(title, _HEADERS, [*map(_row, found)], notes, figures, pending)
        yield forced(report, "; ".join(laws.values())) if laws else report


def _sizes(cfg: ModelConfig, levels: Sequence[StepLevel]) -> tuple[Params, list[int]]:
    """Shapes of the parameters that the levels read together, and each level's bytes of cache."""
    dtype = levels[0].config.dtype
    drafting = any(level.depth for level in levels)
    whole = abstract_params(
        cfg if drafting else cfg.without_drafts(), dtype, formats_kept(dtype, "multiplied")
    )
    return whole, [nbytes(level.runner(whole, allocate=False).state) for level in levels]


def _check_room(named: str, weights: int, cache: int, room: tuple[int, int] | None) -> None:
    """Raises ConfigError for bytes that the device cannot hold. room: ``allocatable``."""
    if room is None or weights + cache <= room[0] - room[1]:
        return
    sizes = weights + cache, weights, cache, room[0] - room[1]
    total, own, rest, free = (f"{n / _GIB:,.1f} GiB" for n in sizes)
    more = f"; {POOL}=0.95 lets JAX take more" if platform() == "gpu" and POOL not in os.environ else ""
    raise ConfigError(
        f"{named} needs {total}: {own} of weights, {rest} of cache; {jax.devices()[0].device_kind} has "
        f"{free} free: lower --layers, --slots or --rows{more}"
    )


_HEADERS = (
    "depth",
    "slots",
    "step, ms (quartiles)",
    "host's call, ms (quartiles)",
    "launches",
    "kernels, ms",
    "tokens per step and slot",
    "tokens/s",
    "floor, ms",
)
_NOTE = (
    "Launches and their kernels: of a step, by a trace (on a CPU: XLA's operations on all threads, also "
    "within each other). "
)
_FLOOR = "Floor: bytes of weights and cached rows that a step reads, if tokens choose experts evenly, over "


def _about(level: StepLevel, weights: int) -> str:
    mode = "the program that can sample" if level.sampled else "greedy"
    return f"{weights / _GIB:.3g} GiB of weights, {level.rows:,} cached rows per slot, {mode}"


def _figures(level: StepLevel, m: steps.MeasuredSteps, touched: float, card: Gpu | None) -> JsonObject:
    """Results of a level; card: None: its bandwidth is unknown."""
    return {
        "depth": level.depth,
        "slots": level.slots,
        "rows": level.rows,
        "step_seconds": m.seconds,
        "call_seconds": m.call,
        "launches_per_step": len(m.launches) / steps.TRACED,
        "kernel_seconds": sum(seconds for _, seconds in m.launches) / steps.TRACED,
        "tokens_per_step_and_slot": m.tokens,
        "tokens_per_second": m.tokens * level.slots / m.seconds.median,
        "touched_bytes": touched,
        "floor_seconds": card and touched / card.bandwidth,
        "kernels": [
            {"kernel": name, "launches": n / steps.TRACED, "seconds": spent / steps.TRACED}
            for name, n, spent in steps.kernels(m.launches)
        ],
        "layer": [{"kernel": name, "seconds": spent} for name, spent in steps.layer(m.launches)],
    }


def _row(f: JsonObject) -> tuple[object, ...]:
    return (
        f["depth"],
        f["slots"],
        f["step_seconds"].show(3, 1e3),
        f["call_seconds"].show(3, 1e3),
        f"{f['launches_per_step']:.0f}",
        f"{f['kernel_seconds'] * 1e3:.3f}",
        f"{f['tokens_per_step_and_slot']:.2f}",
        f"{f['tokens_per_second']:.1f}",
        "-" if f["floor_seconds"] is None else f"{f['floor_seconds'] * 1e3:.3f}",
    )


def _spent(f: JsonObject) -> str:
    """The tables of a level: its longest kernels, and the launches of a layer in order."""
    most = [(k["kernel"], f"{k['launches']:.0f}", f"{k['seconds'] * 1e3:.3f}") for k in f["kernels"][:_MOST]]
    text = f"Depth {f['depth']}, slots {f['slots']}: kernels of a step\n\n"
    text += table(("kernel", "launches", "ms"), most)
    if own := f["layer"]:
        whole = sum(k["seconds"] for k in own)
        text += f"\n\nA layer, {whole * 1e6:.1f} us\n\n"
        text += table(("kernel", "us"), [(k["kernel"], f"{k['seconds'] * 1e6:.2f}") for k in own])
    return text


# Without a GPU


def dry_run(name: str, cfg: ModelConfig, load: StepLoad) -> Iterator[Report]:
    """Lower each level's program for an H200 and count its bytes; nothing runs, and nothing is allocated.

    Raises ConfigError for levels that no device can run.
    """
    with _on_h200():
        levels = levels_of(name, cfg, load)
        whole, sizes = _sizes(cfg, levels)
    found: list[JsonObject] = []
    for level, cache in zip(levels, sizes, strict=True):
        with _on_h200():
            lowered = _lower(level, whole)
        taken = {"depth": level.depth, "slots": level.slots, "rows": level.rows, "cache_bytes": cache}
        touched = level.touched(whole)
        floor = {"touched_bytes": touched, "floor_seconds": touched / _CARD.bandwidth}
        found.append(taken | floor | {"fits": _fits(nbytes(whole), cache)} | lowered)
        figures = {"weight_bytes": nbytes(whole), "levels": found}
        title = f"Dry run of {name}, {cfg.num_hidden_layers} layers, for {_H200.device_kind}: nothing ran"
        rows = [_dry_row(f, nbytes(whole)) for f in found]
        notes = [f"{_about(levels[0], nbytes(whole))}.", _DRY_NOTE]
        notes += dict.fromkeys(f"XLA in the place of a kernel: {f['refused']}" for f in found if f["refused"])
        faults = [f"depth {f['depth']}, slots {f['slots']}: {f['fault']}" for f in found if f["fault"]]
        yield Report(title, _DRY_HEADERS, rows, notes, figures, len(levels) - len(found), faults)


@contextmanager
def _on_h200() -> Iterator[None]:
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=_H200)):
        yield


def _lower(level: StepLevel, whole: Params) -> JsonObject:
    """The figures of a lowered program.

    Kernels are required first, so that a refusal has a reason. A shape that they refuse is lowered again, as
    it would run.
    """
    began, refused, calls, fault = time.perf_counter(), None, None, None
    try:
        try:
            text = _text(level.runner(whole, allocate=False, kernels="mosaic_gpu"), level.key)
        except ConfigError as e:
            refused = str(e)
            text = _text(level.runner(whole, allocate=False), level.key)
        calls = text.count("@mosaic_gpu")
    except Exception as e:  # a level that does not lower must not hide other levels
        fault = f"does not lower: {type(e).__name__}: {e}"
    seconds = time.perf_counter() - began
    return {"kernel_calls": calls, "lowering_seconds": seconds, "refused": refused, "fault": fault}


def _text(runner: LocalRunner, key: StepKey) -> str:
    return runner.programs.lowering.program(key, "cuda").as_text()


def _fits(weights: int, cache: int) -> list[str]:
    """Names of the GPUs that have room, by the sum of `info` and `plan`."""
    rooms = {gpu.name: Room(gpu.memory, MEMORY_FRACTION, weights, OVERHEAD) for gpu in GPUS.values()}
    return [name for name, room in rooms.items() if room.bytes >= cache]


_DRY_HEADERS = (
    "depth",
    "slots",
    "weights, GiB",
    "cache, GiB",
    "fits",
    "GB read by a step",
    "floor, ms",
    "kernels",
    "lowered in, s",
)
_DRY_NOTE = (
    f"Fits: with {OVERHEAD / 1e9:g} GB for programs, and {MEMORY_FRACTION:.0%} of a GPU's memory. {_FLOOR}an "
    f"H200's {_CARD.bandwidth / 1e12:g} TB/s. Kernels: calls in the program's text, in which layers alike "
    "share a function."
)


def _dry_row(f: JsonObject, weights: int) -> tuple[object, ...]:
    return (
        f["depth"],
        f["slots"],
        f"{weights / _GIB:.3g}",
        f"{f['cache_bytes'] / _GIB:.3g}",
        ", ".join(f["fits"]) or "none",
        f"{f['touched_bytes'] / 1e9:.2f}",
        f"{f['floor_seconds'] * 1e3:.3f}",
        "FAILS" if f["fault"] else f["kernel_calls"],
        f"{f['lowering_seconds']:.0f}",
    )
