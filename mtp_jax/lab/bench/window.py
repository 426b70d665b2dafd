"""Cost of a wider window to the trunk, in time and in bytes of weights, and speed-up against its prediction.

Beside each time stands its memory floor: the time to read the same bytes at the speed of a copy.

predicted speed-up = acceptance length * bytes(plain step) / bytes(speculative step), drafts included
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from mtp_jax.api.local import local_runner
from mtp_jax.decode.bookkeeping import abstract_state, bytes_per_page, empty_state
from mtp_jax.decode.drafter.nothing import Nothing
from mtp_jax.decode.keys import MAX_DRAFTS, SamplingMode, StepKey
from mtp_jax.decode.sampling import argmax
from mtp_jax.decode.state import State, StateShape
from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.bench import cost, machine
from mtp_jax.lab.bench.depth import Decode, decode_alternating, speedup
from mtp_jax.lab.bench.report import Report
from mtp_jax.lab.bench.subject import Subject, prompts_for
from mtp_jax.lab.bench.synthetic import complete
from mtp_jax.model import trunk
from mtp_jax.model.backend import backend
from mtp_jax.model.cache import PagedView
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.device import compiler_options
from mtp_jax.model.moe import Routing
from mtp_jax.model.params import Params
from mtp_jax.model.visible import chain
from mtp_jax.spread import Spread

# One slot of 256 rows, prompts of 16 tokens: short enough that steps read weights, hardly any cache.
# Pages hold whole entries of compressed attention.
_PAGE_SIZE, _ROWS, _PROMPT = 128, 256, 16


@dataclass(frozen=True)
class Cached:
    """The trunk's cache of one slot: pages of every layer, as in the engine."""

    pages: tuple[Any, ...]
    table: Any


def _shapes(cfg: ModelConfig, dtype: str) -> State:
    count = _ROWS // _PAGE_SIZE
    shape = StateShape(1, count, _PAGE_SIZE, count, dtype)
    return abstract_state(trunk.Model(cfg), Nothing(cfg.vocab_size), shape)


def _empty_cache(cfg: ModelConfig, dtype: str) -> Cached:
    table = jnp.arange(_ROWS // _PAGE_SIZE, dtype=jnp.int32)[None]
    return Cached(empty_state(_shapes(cfg, dtype)).trunk, table)


def verify(
    params: Params,
    pages: tuple[PyTree, ...],
    tokens: Int[Array, "B W"],
    start: Int[Array, " B"],
    table: Int[Array, "B n"],
    cfg: ModelConfig,
) -> tuple[tuple[PyTree, ...], Int[Array, "B W"]]:
    """The verify part of a step alone; returns (pages, the trunk's greedy choices)."""
    positions, on = start[:, None] + jnp.arange(tokens.shape[1]), backend()
    view = PagedView(table, positions, chain(start, tokens.shape[1]), slot=jnp.zeros_like(start))
    traced = trunk.run(params, trunk.Model(cfg, on), tokens, positions, pages, (view,))
    return traced.caches, argmax(trunk.logits(params, traced.hidden, on))


def time_windows(
    subject: Subject, text: Sequence[int], windows: Sequence[int], rounds: int
) -> dict[int, list[float]]:
    """Seconds per call of ``verify`` for each width, over the same text; the widths alternate call by call.

    Each round calls all widths at one random place of the text, so that an MoE model visits other experts in
    each round.
    """
    cfg, params = subject.config, subject.params
    cached, ids = _empty_cache(cfg, subject.dtype), np.asarray(text, np.int32)[None]
    compiled = {w: _compile(cfg, params, cached, w) for w in windows}
    pages, widest = cached.pages, max(windows)

    def call(width: int, at: int) -> float:
        nonlocal pages
        tokens, start = jnp.asarray(ids[:, at : at + width]), jnp.full(1, at, jnp.int32)
        began = time.perf_counter()
        pages, chosen = compiled[width](params, pages, tokens, start, cached.table)
        jax.block_until_ready((pages, chosen))
        return time.perf_counter() - began

    for at in range(0, ids.shape[1] - widest + 1, widest):  # fill the cache
        call(widest, at)
    places = _places(ids.shape[1], widest, rounds)
    seconds: dict[int, list[float]] = {w: [] for w in windows}
    for i, at in enumerate(places.tolist()):
        for w in [*windows[i % len(windows) :], *windows[: i % len(windows)]]:
            seconds[w].append(call(w, at))
    return seconds


def _places(length: int, widest: int, rounds: int) -> np.ndarray:
    """The place in the text where each round's windows begin: the number of cached rows before them."""
    return np.random.default_rng(0).integers(0, length - widest + 1, rounds)


def _row_bytes(subject: Subject) -> float:
    """Bytes of a token's rows in the trunk's cache, all layers."""
    return bytes_per_page(_shapes(subject.config, subject.dtype)) / _PAGE_SIZE


def _compile(cfg: ModelConfig, params: Params, cached: Cached, width: int) -> jax.stages.Compiled:
    tokens, start = jax.ShapeDtypeStruct((1, width), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    jitted = jax.jit(verify, donate_argnums=1, static_argnames="cfg")
    lowered = jitted.lower(params, cached.pages, tokens, start, cached.table, cfg=cfg)
    return lowered.compile(compiler_options())


def run(
    subject: Subject, windows: Sequence[int], rounds: int, depth: int, prompts: int, max_tokens: int
) -> Report:
    """Time windows alone; then decode at depth 0 and ``depth`` and compare with the prediction from bytes."""
    windows = sorted({1, *windows})
    longest = _ROWS - _PROMPT
    if max(windows) > MAX_DRAFTS + 1 or max_tokens > longest or depth < 1:
        raise ConfigError(
            f"windows up to {max(windows)}, max_tokens = {max_tokens}, depth = {depth}; expected windows "
            f"of at most {MAX_DRAFTS + 1}, max_tokens of at most {longest}, and depth of at least 1"
        )
    given = prompts_for(subject, prompts, _PROMPT)
    engines = {d: subject.engine(d, 1, _ROWS) for d in (0, depth)}
    [request] = complete(engines[0], given.ids[:1], longest - 1)
    text = [*request.prompt, *request.progress.output]
    experts = cost.experts_per_window(_routing(subject, text), sorted({*windows, depth + 1}))
    seconds = time_windows(subject, text, windows, rounds)
    weights, rows = cost.of_trunk(subject.params) + cost.of_head(subject.params), _row_bytes(subject)
    speed = machine.copy_bandwidth(weights.touched(experts[1]))
    cached = rows * float(np.mean(_places(len(text), max(windows), rounds)))
    timed = _by_window(weights, seconds, experts, cached, speed)
    decoded = decode_alternating(engines, given, max_tokens)
    subject = replace(subject, params=local_runner(engines[depth]).params)
    overall = _end_to_end(subject, decoded, depth, experts, rows * (_PROMPT + max_tokens / 2), speed)
    rows = [
        (
            f["window"],
            f["seconds"].show(2, 1e3),
            f["ratio"].show(),
            f"{f['predicted_ratio']:.2f}",
            f"{f['experts_per_layer']:.1f}" if experts[1] else "-",
            f"{f['bytes'] / 1e6:.0f}",
            f"{f['floor_seconds'] * 1e3:.2f}",
            f"{f['over_floor']:.1f}",
        )
        for f in timed
    ]
    headers = (
        "window",
        "ms (quartiles)",
        "over window 1",
        "by bytes",
        "experts/layer",
        "MB touched",
        "floor, ms",
        "over floor",
    )
    plain, deep = overall["steps"]["0"], overall["steps"][str(depth)]
    notes = [
        f"Floor: the bytes of weights touched, and {cached / 1e6:.1f} MB of cached rows, over "
        f"{speed / 1e9:.1f} GB/s, read and written, at which as many bytes were copied in this run.",
        f"Whole steps: {plain['seconds'] * 1e3:.2f} ms at depth 0, {plain['over_floor']:.1f} times their "
        f"floor of {plain['floor_seconds'] * 1e3:.2f} ms; {deep['seconds'] * 1e3:.2f} ms at depth {depth}, "
        f"{deep['over_floor']:.1f} times {deep['floor_seconds'] * 1e3:.2f} ms.",
        f"End to end at depth {depth}: acceptance length {overall['acceptance_length']:.3f}; a step touches "
        f"{overall['bytes_plain'] / 1e6:.0f} MB at depth 0, {overall['bytes_speculative'] / 1e6:.0f} MB with "
        f"its drafts; predicted speed-up {overall['predicted_speedup']:.2f}, measured "
        f"{overall['measured_speedup'].show()}: {overall['measured_over_predicted']:.0%} of the prediction; "
        f"same tokens: {'yes' if overall['same_tokens'] else 'NO'}.",
        f"Windows: {rounds} alternating calls each. End to end: {prompts} prompts ({given.source}), "
        f"{max_tokens} tokens each, batch 1, greedy, alternating. A NextN layer is taken to visit as "
        "many experts as the trunk's average layer.",
    ]
    figures = {"windows": timed, "end_to_end": overall}
    report = Report(f"Trunk time by window: {subject.name}", headers, rows, notes, figures)
    return subject.marked(report)


def _routing(subject: Subject, text: Sequence[int]) -> tuple[Routing, ...]:
    def routing(params: Params, tokens: Array) -> tuple[Routing, ...]:
        return trunk.forward_traced(params, subject.config, tokens, backend()).routing

    return jax.jit(routing)(subject.params, jnp.asarray([text], jnp.int32))


def _by_window(
    weights: cost.Size,
    seconds: Mapping[int, list[float]],
    experts: Mapping[int, float],
    cached: float,
    speed: float,
) -> list[JsonObject]:
    """cached: bytes of cached rows that a window reads. speed: bytes per second of copies."""

    def figures(w: int, spent: list[float]) -> JsonObject:
        floor, found = (weights.touched(experts[w]) + cached) / speed, Spread.of(spent)
        return {
            "window": w,
            "seconds": found,
            "ratio": Spread.of([b / a for a, b in zip(seconds[1], spent, strict=True)]),
            "predicted_ratio": weights.touched(experts[w]) / weights.touched(experts[1]),
            "experts_per_layer": experts[w],
            "bytes": weights.touched(experts[w]),
            "cached_bytes": cached,
            "floor_seconds": floor,
            "over_floor": found.median / floor,
        }

    return [figures(w, spent) for w, spent in seconds.items()]


def _end_to_end(
    subject: Subject,
    decoded: Mapping[int, Decode],
    depth: int,
    experts: Mapping[int, float],
    cached: float,
    speed: float,
) -> JsonObject:
    """cached, speed: see ``_by_window``."""
    gain, acceptance = speedup(decoded[0], decoded[depth]), decoded[depth].speculation.acceptance_length

    def bytes_at(depth: int) -> float:
        key, dtype = StepKey(1, depth, 0, SamplingMode()), subject.dtype  # without cached rows
        visited = experts.__getitem__
        return cost.of_launch(key, subject.config, subject.params, _PAGE_SIZE, dtype, 1, visited).bytes

    plain, speculative = bytes_at(0), bytes_at(depth)
    predicted = acceptance * plain / speculative

    def step(run: Decode, nbytes: float) -> dict[str, float]:
        spent, floor = sum(run.seconds) / run.speculation.steps, (nbytes + cached) / speed
        return {"seconds": spent, "floor_seconds": floor, "over_floor": spent / floor}

    return {
        "depth": depth,
        "acceptance_length": acceptance,
        "bytes_plain": plain,
        "bytes_speculative": speculative,
        "copied_bytes_per_second": speed,
        "steps": {"0": step(decoded[0], plain), str(depth): step(decoded[depth], speculative)},
        "predicted_speedup": predicted,
        "measured_speedup": gain,
        "measured_over_predicted": gain.median / predicted,
        "same_tokens": decoded[0].texts == decoded[depth].texts,
        "tokens_per_second": {str(d): run.rate for d, run in decoded.items()},
    }
