"""Profile one phase: trace, programs, costs, memory, compilations and a report, in one folder."""

import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from jaxtyping import PyTree

from mtp_jax.api.local import local_runner
from mtp_jax.decode.keys import StepKey, name_of
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.speculation import Speculation
from mtp_jax.errors import MtpJaxError
from mtp_jax.json_object import JsonObject
from mtp_jax.lab.bench import machine
from mtp_jax.lab.bench.cost import of_launch
from mtp_jax.lab.bench.report import environment
from mtp_jax.lab.bench.subject import Subject
from mtp_jax.lab.bench.trace import Trace, read
from mtp_jax.lab.profiling import compiles, cost, trace, workload
from mtp_jax.lab.profiling.compiles import Compilation
from mtp_jax.lab.profiling.report import Profile, Program
from mtp_jax.lab.profiling.scopes import scopes_of
from mtp_jax.lab.profiling.workload import Phase, Workload
from mtp_jax.model.narrow import nbytes
from mtp_jax.spread import Spread

_WINDOW = "mtp-jax measured steps"


@dataclass(frozen=True)
class Options:
    """The phase to profile. ``depth`` is 0 for "decode"; ``temperature`` 0 is greedy."""

    phase: Phase
    batch: int
    input_len: int
    steps: int
    depth: int
    temperature: float


def profile(subject: Subject, options: Options, out: Path) -> Profile:
    """Write all results to ``out`` and return the report.

    The steps are measured twice: without the profiler, which makes small instructions slow, and with it, for
    the shares of the scopes. Raises ConfigError for options that do not go together, MtpJaxError if a
    compilation falls into the measured time.
    """
    o = options
    out.mkdir(parents=True, exist_ok=True)
    _clear(out)
    with compiles.recorded() as compiled:
        peaks = machine.measure(subject.dtype)
        plain = _plain(subject, o)
        work = workload.start(subject, o.phase, o.batch, o.input_len, o.depth, 2 * o.steps, o.temperature)
        before, begun = len(compiled), [r.progress.speculation.steps for r in work.running]
        seconds = _timed(work, o.steps)
        traced = _traced(work, o.steps, out)
        compiles.write(compiled, out / "compiles.jsonl")
        _refuse(compiled[before:])
    (recorded,) = (out / "trace").rglob("*.xplane.pb")
    found = read(recorded, _WINDOW)
    engine, runner = work.engine, local_runner(work.engine)
    ran = {op.module for line in found.lines for op in line}
    programs, scopes = [], {}
    (out / "hlo").mkdir(exist_ok=True)
    for key in runner.keys:
        text = runner.programs.program(key).as_text()
        (out / "hlo" / f"{name_of(key)}.txt").write_text(text, encoding="utf-8")
        if f"jit_{name_of(key)}" in ran and isinstance(key, StepKey):
            scopes[f"jit_{name_of(key)}"] = scopes_of(text)
            programs.append(_program(subject, engine, key, found))
    result = Profile(
        model=subject.name,
        options=asdict(o),
        environment=environment(),
        seconds=Spread.of(seconds),
        traced=Spread.of(traced),
        wall=(found.end - found.start) / o.steps / 1e9,
        plain=plain,
        speculation=sum(
            (r.progress.speculation.since(n) for r, n in zip(work.running, begun, strict=True)), Speculation()
        ),
        scopes={s: t / o.steps / 1e9 for s, t in trace.by_scope(found, scopes).items()},
        programs=programs,
        peaks=peaks,
        compiles=compiled,
    )
    step = {
        "seconds": asdict(result.seconds),
        "traced_seconds": asdict(result.traced),
        "without_drafts_seconds": asdict(plain) if plain else None,
        "tokens_per_slot": result.speculation.acceptance_length,
    }
    _write(
        out / "cost.json",
        {"peaks": asdict(peaks), "step": step, "programs": [p.costs(peaks) for p in programs]},
    )
    _write(out / "memory.json", _memory(engine))
    (out / "report.md").write_text(result.text(), encoding="utf-8")
    return result


def _plain(subject: Subject, o: Options) -> Spread | None:
    """Seconds of a step without drafts over the same number of slots: the baseline of steps that verify.

    None for other phases. Its engine is freed before the profiled engine is made.
    """
    if o.phase != "verify":
        return None
    work = workload.start(subject, "decode", o.batch, o.input_len, 0, o.steps, o.temperature)
    return Spread.of(_timed(work, o.steps))


def _clear(out: Path) -> None:
    """Delete the programs and traces of an earlier profile; other files are overwritten."""
    for program in (out / "hlo").glob("*.txt"):
        program.unlink()
    shutil.rmtree(out / "trace" / "plugins", ignore_errors=True)


def _timed(work: Workload, steps: int) -> list[float]:
    """Seconds of every step. The engine reads one step late, so these times show the device's pace."""
    seconds = []
    jax.block_until_ready(local_runner(work.engine).state)
    for i in range(steps):
        began = time.perf_counter()
        with jax.profiler.StepTraceAnnotation("engine step", step_num=i):
            work.step()
            if i == steps - 1:
                jax.block_until_ready(local_runner(work.engine).state)
        seconds.append(time.perf_counter() - began)
    return seconds


def _traced(work: Workload, steps: int, out: Path) -> list[float]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.block_until_ready(local_runner(work.engine).state)
    to = jax.profiler.trace(str(out / "trace"), create_perfetto_trace=True, profiler_options=options)
    with to, jax.profiler.TraceAnnotation(_WINDOW):
        seconds = _timed(work, steps)
    (perfetto,) = (out / "trace").rglob("perfetto_trace.json.gz")
    perfetto.replace(out / "perfetto.json.gz")
    return seconds


def _refuse(late: Sequence[Compilation]) -> None:
    if late:
        names = ", ".join(sorted({c.program for c in late}))
        raise MtpJaxError(
            f"{len(late)} compilations fell into the measured steps ({names}), so their times mean nothing; "
            "this is a defect of mtp-jax: a step must never compile"
        )


def _program(subject: Subject, engine: Engine, key: StepKey, found: Trace) -> Program:
    spans = [
        end - start for (m, _), (start, end) in trace.launches(found).items() if m == f"jit_{name_of(key)}"
    ]
    runner, config = local_runner(engine), engine.config
    compiled = runner.programs.program(key)
    work = of_launch(key, engine.cfg, runner.params, config.page_size, subject.dtype, engine.shards)
    mean = sum(spans) / len(spans) / 1e9 if spans else 0.0
    return Program(name_of(key), len(spans), mean, work, cost.by_xla(compiled), cost.memory(compiled))


def _memory(engine: Engine) -> JsonObject:
    def size(tree: PyTree) -> int:
        return sum(a.nbytes for a in jax.tree.leaves(tree))

    runner = local_runner(engine)
    programs = {name_of(k): cost.memory(runner.programs.program(k)) for k in runner.keys}
    return {
        "weights_bytes": nbytes(runner.params),
        "cache_bytes": size((runner.state.trunk, runner.state.drafter.pages)),
        "slots_bytes": size(runner.state.slots),
        "device": {str(d): d.memory_stats() for d in jax.local_devices()},
        "process_peak_bytes": _peak(),
        "programs": programs,
    }


def _peak() -> int | None:
    """Most bytes that this process has held; None where the system does not say."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
