"""Time by scope, from a trace of the profiler.

Each moment of the measured time goes to the instruction that runs then: to the innermost instruction of every
thread or stream, in equal shares where several run at once. Other moments are either *dispatch*, time inside
a launched program in which none of its instructions runs, or *host gap*, time in which the device has no
program. So the times of all scopes add up to the wall time.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from mtp_jax.lab.bench.trace import Op, Trace
from mtp_jax.lab.profiling.scopes import NOWHERE, Scope, scope_of_program

DISPATCH = Scope("dispatch", "between operations")
HOST_GAP = Scope("host gap", "no program runs")


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
