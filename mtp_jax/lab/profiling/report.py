"""The report of a profile: time by scope, programs against their roofline, compilations."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mtp_jax.engine.speculation import Speculation
from mtp_jax.json_object import JsonMapping, JsonObject
from mtp_jax.lab.bench.cost import LaunchCost
from mtp_jax.lab.bench.machine import Peaks
from mtp_jax.lab.bench.report import table
from mtp_jax.lab.profiling.compiles import Compilation
from mtp_jax.lab.profiling.scopes import BOOKKEEPING, PHASES, Scope
from mtp_jax.lab.profiling.trace import DISPATCH, HOST_GAP
from mtp_jax.spread import Spread

# Phases whose "part" is a remark instead of a part of the model.
_NO_PART = (BOOKKEEPING, DISPATCH.phase, HOST_GAP.phase)


@dataclass(frozen=True)
class Program:
    """An executable that ran while the trace was taken.

    Attributes:
        name: its name in HLO and in the trace.
        launches: number of launches in the traced steps; 0 where the backend does not separate launches.
        seconds: seconds of a traced launch on average, from its first instruction to its last.
        work: the least bytes and operations of a launch.
        xla: FLOPs and bytes as XLA counts them.
        memory: bytes by kind.
    """

    name: str
    launches: int
    seconds: float
    work: LaunchCost
    xla: Mapping[str, float]
    memory: Mapping[str, int]

    def costs(self, peaks: Peaks) -> JsonObject:
        """The object written to cost.json."""
        least = peaks.seconds(self.work.flops, self.work.bytes)
        return {
            "program": self.name,
            "launches": self.launches,
            "flops": self.work.flops,
            "bytes": self.work.bytes,
            "roofline_seconds": least,
            "traced_seconds": self.seconds,
            "roofline_over_traced": least / self.seconds if self.seconds else None,
            "counted_by_xla": dict(self.xla),
            "memory_bytes": dict(self.memory),
        }


@dataclass(frozen=True)
class Profile:
    """The contents of report.md.

    Attributes:
        model: the model's name.
        options: options of the profile.
        environment: versions and machine.
        seconds: seconds per step, without the profiler.
        traced: seconds per step, with the profiler.
        wall: seconds of the traced time over its steps; the scopes add up to it.
        plain: seconds per step of the same number of slots without drafts and profiler; None: not measured.
        speculation: counts of the slots that decoded in all measured steps.
        scopes: seconds per traced step, by scope.
        programs: programs that ran.
        peaks: peaks of the machine.
        compiles: all compilations before the measured steps.
    """

    model: str
    options: JsonMapping
    environment: JsonMapping
    seconds: Spread
    traced: Spread
    wall: float
    plain: Spread | None
    speculation: Speculation
    scopes: Mapping[Scope, float]
    programs: Sequence[Program]
    peaks: Peaks
    compiles: Sequence[Compilation]

    def text(self) -> str:
        """Markdown."""
        env, peaks, spent = self.environment, self.peaks, sum(c.seconds for c in self.compiles)
        blocks = [
            f"# Profile of {self.model}: {self.options['phase']}",
            ", ".join(f"{name} {value}" for name, value in self.options.items()),
            f"{env['device']}, {env['cpu']}, {env['cores']} cores, jax {env['jax']}, Python {env['python']}, "
            f"load {env['load_average']}",
            f"A step takes {self.seconds.show(3, 1e3)} ms, median and quartiles of {self.seconds.count}, and "
            f"{self.traced.show(3, 1e3)} ms while traced.",
            self._gain(),
            f"The next three tables divide the mean wall time of a traced step, {self.wall * 1e3:.3f} ms: "
            "that is their total, for medians do not add up. Read them as shares: tracing costs time, small "
            "operations most of all.",
            "## Time by scope",
            self._scopes(),
            "Each moment goes to the innermost operation that runs, in equal shares where several run. "
            "*dispatch*: a program is running, none of its operations is. *host gap*: no program runs. "
            "*bookkeeping*: small programs between steps. *other*: the program does not say.",
            "## Time by phase",
            self._summed("phase", lambda scope: scope.phase),
            "## Time by part",
            self._summed("part", lambda scope: scope.phase if scope.phase in _NO_PART else scope.part),
            "## Against the roofline",
            self._roofline(),
            "The least a launch needs: weights once per pass, the experts that its rows visit if routing is "
            "uniform, the cached rows of its bucket, two operations per weight and row, padding included; at "
            f"{peaks.flops / 1e9:.0f} GFLOP/s and {peaks.bandwidth / 1e9:.1f} GB/s in {peaks.dtype}, "
            "measured here before the steps. `cost.json` has XLA's own counts, too.",
            "## Compilations",
            f"{len(self.compiles)} before the measured steps, {spent:.1f} s in all; none within them. "
            "`compiles.jsonl` lists them.",
            "## Files",
            "`trace/` opens with `xprof --logdir trace`, `perfetto.json.gz` on ui.perfetto.dev; `hlo/` has "
            "every compiled program, `memory.json` their buffers.",
        ]
        return "\n\n".join(blocks) + "\n"

    def _gain(self) -> str:
        """The effect of speculation on these steps, if it was measured."""
        if self.options["depth"] == 0 or not self.speculation.steps:
            return "Speculation: none of these steps has drafts, so this profile does not say what they gain."
        tokens = self.speculation.acceptance_length
        yielded = f"Speculation: a step yields {tokens:.2f} tokens per slot"
        if self.plain is None:
            return f"{yielded}; a step without drafts was not measured here, so what that gains is not known."
        longer = self.seconds.median / self.plain.median
        verdict = "gains" if tokens > longer else "loses"
        return (
            f"{yielded} and takes {longer:.2f} times as long as one without drafts, "
            f"{self.plain.show(3, 1e3)} ms, so it {verdict}: {tokens / longer:.2f} times the tokens per "
            "second."
        )

    def _row(self, name: Sequence[str], seconds: float) -> tuple[str, ...]:
        return (*name, f"{seconds * 1e3:.3f}", f"{seconds / self.wall:.1%}")

    def _scopes(self) -> str:
        order = {name: i for i, name in enumerate(PHASES)}
        last = {BOOKKEEPING: 1, DISPATCH.phase: 2, HOST_GAP.phase: 3}

        def key(item: tuple[Scope, float]) -> tuple[int, int, float]:
            scope, seconds = item
            return last.get(scope.phase, 0), order.get(scope.phase, len(order)), -seconds

        rows = [self._row((s.phase, s.part), t) for s, t in sorted(self.scopes.items(), key=key)]
        rows.append(self._row(("total", ""), self.wall))
        return table(("phase", "part", "ms per step", "share"), rows)

    def _summed(self, what: str, name: Callable[[Scope], str]) -> str:
        sums: dict[str, float] = defaultdict(float)
        for scope, seconds in self.scopes.items():
            sums[name(scope)] += seconds
        rows = [self._row((n,), t) for n, t in sorted(sums.items(), key=lambda item: -item[1])]
        rows.append(self._row(("total",), self.wall))
        return table((what, "ms per step", "share"), rows)

    def _roofline(self) -> str:
        rows = []
        for p in self.programs:
            least = self.peaks.seconds(p.work.flops, p.work.bytes)
            share = f"{least / p.seconds:.0%}" if p.seconds else "-"
            rows.append(
                (
                    p.name,
                    p.launches,
                    f"{p.work.bytes / 1e6:.1f}",
                    f"{p.work.flops / 1e9:.3f}",
                    f"{least * 1e3:.3f}",
                    f"{p.seconds * 1e3:.3f}",
                    share,
                )
            )
        headers = ("program", "launches", "MB", "GFLOP", "roofline, ms", "traced, ms", "roofline / traced")
        return table(headers, rows)
