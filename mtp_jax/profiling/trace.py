"""Time by scope, from a trace of the profiler.

Each moment of the measured time goes to the instruction that runs then: to the innermost instruction of every
thread or stream, in equal shares where several run at once. Other moments are either *dispatch*, time inside
a launched program in which none of its instructions runs, or *host gap*, time in which the device has no
program. So the times of all scopes add up to the wall time.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from jax.profiler import ProfileData

from mtp_jax.errors import MtpJaxError
from mtp_jax.profiling.scopes import NOWHERE, Scope, scope_of_program

DISPATCH = Scope("dispatch", "between operations")
HOST_GAP = Scope("host gap", "no program runs")


@dataclass(frozen=True)
class Op:
    """An instruction that ran: nanoseconds, its program's name in HLO, and the launch that it belongs to.

    kernel: the device's name for it; on a GPU several kernels may belong to one instruction.
    """

    start: float
    end: float
    module: str
    name: str
    run: object
    kernel: str = ""


@dataclass(frozen=True)
class Trace:
    """Instructions that ran in the measured time.

    Attributes:
        start, end: bounds of the measured time, in nanoseconds.
        lines: instructions by thread or stream.
    """

    start: float
    end: float
    lines: tuple[tuple[Op, ...], ...]


def read(xplane: Path, window: str) -> Trace:
    """The instructions within the host annotation ``window``. Raises MtpJaxError if there are none."""
    profile = ProfileData.from_file(str(xplane))
    planes = list(profile.planes)
    spans = [
        (e.start_ns, e.end_ns) for p in planes for line in p.lines for e in line.events if e.name == window
    ]
    devices = [p for p in planes if p.name.startswith("/device:")]
    lines = []
    for plane in devices or planes:
        for line in plane.lines:
            ops = tuple(_ops(line.events))
            lines += [ops] if ops else []
    if not spans or not lines:
        raise MtpJaxError(
            f"{xplane} holds no instruction of a compiled program: the profiler saw nothing run"
        )
    start, end = spans[0]
    inside = (tuple(op for op in ops if op.end > start and op.start < end) for ops in lines)
    return Trace(start, end, tuple(ops for ops in inside if ops))


def _ops(events: Iterator) -> Iterator[Op]:
    for event in events:
        about = dict(event.stats)
        if "hlo_op" in about:
            module, name = str(about.get("hlo_module", "")), str(about["hlo_op"])
            yield Op(event.start_ns, event.end_ns, module, name, about.get("run_id"), event.name)


def by_scope(trace: Trace, scopes: Mapping[str, Mapping[str, Scope]]) -> dict[Scope, float]:
    """Nanoseconds per scope, which add up to the measured time; ``scopes`` by program, instruction."""
    changes: list[tuple[float, int, Scope]] = []
    for ops in trace.lines:
        for start, end, op in _innermost(ops):
            known = scopes.get(op.module)
            scope = scope_of_program(op.module) if known is None else known.get(op.name, NOWHERE)
            changes += [(max(start, trace.start), 1, scope), (min(end, trace.end), -1, scope)]
    # Dispatch and host gap fill the time in which no instruction runs.
    for start, end in launches(trace).values():
        changes += [(max(start, trace.start), 1, DISPATCH), (min(end, trace.end), -1, DISPATCH)]
    changes += [(trace.start, 1, HOST_GAP), (trace.end, -1, HOST_GAP)]
    changes.sort(key=lambda c: c[0])
    total: dict[Scope, float] = defaultdict(float)
    running: Counter[Scope] = Counter()
    for (at, step, scope), (following, _, _) in pairwise(changes):
        running[scope] += step
        if following > at:
            _share(following - at, running, total)
    return dict(total)


def _share(span: float, running: Counter[Scope], total: dict[Scope, float]) -> None:
    busy = {s: n for s, n in running.items() if n > 0 and s not in (DISPATCH, HOST_GAP)}
    if busy:
        for scope, n in busy.items():
            total[scope] += span * n / sum(busy.values())
    else:
        total[DISPATCH if running[DISPATCH] > 0 else HOST_GAP] += span


def _innermost(ops: Sequence[Op]) -> Iterator[tuple[float, float, Op]]:
    """Pieces (start, end, op) of one thread in which ``op`` has no other instruction inside it."""
    stack: list[Op] = []
    at = 0.0
    for op in [*sorted(ops, key=lambda o: (o.start, -o.end)), None]:
        while stack and (op is None or stack[-1].end <= op.start):
            done = stack.pop()
            if done.end > at:
                yield at, done.end, done
                at = done.end
        if op is None:
            return
        if stack and op.start > at:
            yield at, op.start, stack[-1]
        at = op.start
        stack.append(op)


def launches(trace: Trace) -> dict[tuple[str, object], tuple[float, float]]:
    """(program, launch) -> (start, end) in nanoseconds. Empty where the backend does not name launches."""
    found: dict[tuple[str, object], tuple[float, float]] = {}
    for op in (op for ops in trace.lines for op in ops if op.run is not None):
        start, end = found.get((op.module, op.run), (op.start, op.end))
        found[op.module, op.run] = (min(start, op.start), max(end, op.end))
    return found
