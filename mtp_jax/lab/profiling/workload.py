"""The profiled work: an engine kept busy with one kind of step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from mtp_jax.decode.keys import StepKey
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError
from mtp_jax.lab.bench.subject import Subject, prompts_for

Phase = Literal["prefill", "decode", "verify", "mixed"]
PHASES: tuple[Phase, ...] = get_args(Phase)

# Steps before the measured steps: the first steps find caches cold.
_SETTLE = 4
# A prompt's slot is free again two steps later: with three there is a prompt for every step.
_PROMPT_SLOTS = 3


@dataclass(frozen=True)
class Workload:
    """An engine in the midst of a phase.

    Attributes:
        engine: the engine, compiled and settled.
        step: does one launch of the phase, and submits the next prompt where the phase reads prompts.
        running: requests that decode throughout the phase.
    """

    engine: Engine
    step: Callable[[], None]
    running: Sequence[Request] = ()


def _check(subject: Subject, phase: Phase, input_len: int, depth: int) -> None:
    """Raise ConfigError if the phase or the model cannot be profiled so."""
    if phase in ("verify", "mixed") and depth < 1:
        raise ConfigError(f"--phase {phase} verifies drafts: --depth 1 or more")
    if phase == "decode" and depth:
        raise ConfigError(f"--phase decode has no drafts: a depth of 0, not {depth}")
    limit = subject.config.max_position_embeddings
    if input_len > limit:
        raise ConfigError(f"--input-len {input_len}: the model's positions end at {limit}")


def start(
    subject: Subject, phase: Phase, batch: int, input_len: int, depth: int, steps: int, temperature: float
) -> Workload:
    """Start an engine that can be stepped ``steps`` times within one phase; its programs are compiled.

    prefill  prompts one after the other, each ended by its first token
    decode   every slot decodes, without drafts
    verify   every slot drafts and verifies
    mixed    every slot drafts and verifies, and prompts go through further slots

    Raises ConfigError if the phase or the model cannot be profiled.
    """
    _check(subject, phase, input_len, depth)
    decoding = 0 if phase == "prefill" else batch
    fed = steps + _SETTLE + 1 if phase in ("prefill", "mixed") else 0
    # A slot decodes as soon as its prompt is read, while other prompts are still read: its output may
    # grow by a step per chunk, and the smallest chunk has 16 tokens.
    longest = (depth + 1) * (steps + _SETTLE + decoding * -(-input_len // 16))
    engine = subject.engine(depth, decoding + (_PROMPT_SLOTS if fed else 0), input_len + max(longest, 1))
    prompts = prompts_for(subject, decoding + fed, input_len).ids
    endless = SamplingParams(temperature=temperature, max_tokens=None, ignore_eos=True, seed=0)
    short = SamplingParams(temperature=temperature, max_tokens=1, ignore_eos=True, seed=0)
    running = [engine.make_request(p, endless) for p in prompts[:decoding]]
    feed = iter([engine.make_request(p, short) for p in prompts[decoding:]])

    def step() -> None:
        if not engine.scheduler.waiting and (request := next(feed, None)):
            engine.submit(request)
        before = engine.launches
        while engine.busy and engine.launches == before:  # a step may only have read
            engine.step()

    another = [engine.make_request(p, short) for p in prompts[decoding:][:1]]
    keys = engine.buckets.prepare([*running, *another])
    if engine.shards == 1 and decoding:  # prompts go through further slots
        most = engine.buckets.slots(decoding)
        keys = [replace(k, slots=min(k.slots, most)) for k in keys if isinstance(k, StepKey)]
    engine.runner.compile(keys)
    _settle(engine, running, step)
    return Workload(engine, step, running)


def _settle(engine: Engine, running: list[Request], step: Callable[[], None]) -> None:
    for request in running:
        engine.submit(request)
    while not all(r.progress.output for r in running):
        engine.step()
    for _ in range(_SETTLE):
        step()
