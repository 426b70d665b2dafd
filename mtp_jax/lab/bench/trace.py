"""Traces of the profiler: the instructions that ran, on which thread or stream, and when."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jax.profiler import ProfileData

from mtp_jax.errors import MtpJaxError


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
        start, end: nanoseconds at which the measured time begins and ends.
        lines: instructions by thread or stream.
    """

    start: float
    end: float
    lines: tuple[tuple[Op, ...], ...]


def read(xplane: Path, window: str) -> Trace:
    """The instructions within the host annotation ``window``. Raises MtpJaxError if there are none."""
    profile = ProfileData.from_file(str(xplane))
    planes = list(profile.planes)
    events = (e for plane in planes for line in plane.lines for e in line.events)
    spans = [(e.start_ns, e.end_ns) for e in events if e.name == window]
    devices = [p for p in planes if p.name.startswith("/device:")]
    lines = [*filter(None, (tuple(_ops(line.events)) for p in devices or planes for line in p.lines))]
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
