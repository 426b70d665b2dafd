"""What a profile says: time by scope, programs against their roofline, compilations."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtp_jax.bench.cost import Work
from mtp_jax.bench.report import Spread, table
from mtp_jax.profiling.compiles import Compile
from mtp_jax.profiling.machine import Peaks
from mtp_jax.profiling.scopes import PHASES, Scope
from mtp_jax.profiling.trace import DISPATCH, HOST_GAP


@dataclass(frozen=True)
class Program:
    """An executable that ran while the trace was taken.

    Attributes:
        name: in HLO and in the trace.
        launches: in the traced steps; 0 where the backend does not tell launches apart.
        seconds: of a traced launch, on average, from its first instruction to its last.
        work: that a launch cannot do without.
        xla: FLOPs and bytes as XLA counts them.
        memory: bytes by kind.
    """

    name: str
    launches: int
    seconds: float
    work: Work
    xla: Mapping[str, float]
    memory: Mapping[str, int]

    def costs(self, peaks: Peaks) -> dict[str, Any]:
        """For cost.json."""
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
    """Everything report.md says.

    Attributes:
        model: its name.
        options: of the profile.
        environment: versions and machine.
        seconds: per step, without the profiler.
        traced: per step, with it.
        scopes: seconds per traced step.
        programs: that ran.
        peaks: of the machine.
        compiles: all, before the measured steps.
    """

    model: str
    options: Mapping[str, Any]
    environment: Mapping[str, Any]
    seconds: Spread
    traced: Spread
    scopes: Mapping[Scope, float]
    programs: Sequence[Program]
    peaks: Peaks
    compiles: Sequence[Compile]

    def text(self) -> str:
        """Markdown."""
        env, peaks, spent = self.environment, self.peaks, sum(c.seconds for c in self.compiles)
        blocks = [
            f"# Profile of {self.model}: {self.options['phase']}",
            ", ".join(f"{name} {value}" for name, value in self.options.items()),
            f"{env['device']}, {env['cpu']}, {env['cores']} cores, jax {env['jax']}, Python {env['python']}, "
            f"load {env['load_average']}",
            f"A step takes {self.seconds.show(3, 1e3)} ms, median and quartiles of {self.seconds.count}, and "
            f"{self.traced.show(3, 1e3)} ms while traced. Read the tables as shares: tracing costs time,"
            " small instructions most of all.",
            "## Time by scope",
            self._scopes(),
            "Each moment goes to the innermost instruction that runs, in equal shares where several run. "
            "*dispatch*: a program is running, none of its instructions is. *host gap*: no program runs.",
            "## Time by phase",
            self._summed("phase", lambda scope: scope.phase),
            "## Time by part",
            self._summed("part", lambda scope: scope.phase if scope in (DISPATCH, HOST_GAP) else scope.part),
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

    def _row(self, name: Sequence[str], seconds: float) -> tuple[str, ...]:
        total = sum(self.scopes.values())
        return (*name, f"{seconds * 1e3:.3f}", f"{seconds / total:.1%}")

    def _scopes(self) -> str:
        order = {name: i for i, name in enumerate(PHASES)}
        last = {DISPATCH.phase: 1, HOST_GAP.phase: 2}

        def key(item: tuple[Scope, float]) -> tuple[int, int, float]:
            scope, seconds = item
            return last.get(scope.phase, 0), order.get(scope.phase, len(order)), -seconds

        rows = [self._row((s.phase, s.part), t) for s, t in sorted(self.scopes.items(), key=key)]
        return table(("phase", "part", "ms per step", "share"), rows)

    def _summed(self, what: str, name: Callable[[Scope], str]) -> str:
        sums: dict[str, float] = defaultdict(float)
        for scope, seconds in self.scopes.items():
            sums[name(scope)] += seconds
        rows = [self._row((n,), t) for n, t in sorted(sums.items(), key=lambda item: -item[1])]
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
