"""Check the kernels on a Hopper GPU: every case against its reference on random inputs, then its time.

    python -m kernels_pallas.check [PATTERN ...] [--seed N] [--no-timing] [--no-baselines] [--deadline S]
    python -m kernels_pallas.check --dry-run      without a GPU: lowers every case and lists what would run

The floor is the longer of two times: of a case's bytes at the memory's bandwidth, and of its products at the
tensor cores' rate. Times are medians, with a cold cache, and include every launch of the operation. Hot is
the time of a call in a chain of calls, beside the clock and the power meanwhile.
"""

import argparse
import faulthandler
import json
import secrets
import sys
from pathlib import Path
from time import perf_counter
from typing import Required, TypedDict

import jax

from kernels_pallas.check.case import Case, External, UnavailableError
from kernels_pallas.check.device import RATES, Rates, rates
from kernels_pallas.check.lower import lower
from kernels_pallas.check.registry import cases
from kernels_pallas.check.timing import external_seconds, hot, seconds
from kernels_pallas.check.verify import distance, verify
from kernels_pallas.measured import measured

NEEDS_GPU = "the kernels need an NVIDIA GPU of the Hopper generation ({}); found {}. Without one: --dry-run"


class Findings(TypedDict, total=False):
    """The findings of a case, written as JSON; unset where the check did not get there."""

    case: str
    faults: Required[list[str]]
    distance: float
    us: float
    hot_us: float
    mhz: float
    watts: float
    floor_us: float
    tflops: float
    gbs: float
    baselines: dict[str, str]


def main(arguments: list[str] | None = None) -> int:
    """Run; returns 0 if every case agrees with its reference, 1 if not, 2 if no case could run."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels_pallas.check",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("patterns", nargs="*", help="only cases whose names contain one of these")
    parser.add_argument("--dry-run", action="store_true", help="lower every case and list what would run")
    parser.add_argument("--no-timing", action="store_true", help="compare with the references only")
    parser.add_argument("--no-baselines", action="store_true", help="time the kernels only")
    parser.add_argument(
        "--deadline",
        type=float,
        help="seconds for a case: a kernel that hangs ends the process with status 1",
    )
    parser.add_argument("--json", type=Path, help="also write one line of JSON per case to this file")
    parser.add_argument(
        "--seed", type=int, default=secrets.randbits(31), help="of the inputs; default: a new one"
    )
    options = parser.parse_args(arguments)
    if options.deadline is not None and not options.deadline > 0:
        parser.error(f"--deadline {options.deadline}; expected seconds above 0")
    chosen = cases(*options.patterns)
    if not chosen:
        print(f"no case has {' or '.join(map(repr, options.patterns))} in its name", file=sys.stderr)
        return 2
    if options.dry_run:
        return dry_run(chosen)
    device = jax.devices()[0]
    peak = rates(device.device_kind)
    if peak is None:
        print(NEEDS_GPU.format(", ".join(RATES), device.device_kind), file=sys.stderr)
        return 2
    print(f"jax {jax.__version__} on {device.device_kind}, seed {options.seed}")
    faults, records = [], []
    for case in chosen:
        # A thread that waits for a kernel cannot be interrupted: the watchdog ends the process.
        if options.deadline is not None:
            faulthandler.dump_traceback_later(options.deadline, exit=True)
        record = check(case, peak, options)
        faulthandler.cancel_dump_traceback_later()
        faults += [f"{case.name}: {fault}" for fault in record["faults"]]
        records.append(json.dumps({**record, "device": device.device_kind, "seed": options.seed}))
        if options.json:
            options.json.write_text("\n".join(records) + "\n", encoding="utf-8")
    print("\n".join(faults) or f"{len(chosen)} cases agree with their references")
    return int(bool(faults))


def dry_run(chosen: tuple[Case, ...]) -> int:
    """Lower for CUDA and list the work, the floor on an H200 and the baselines."""
    print(
        f"jax {jax.__version__}; nothing runs: cases are lowered for an H200, listed with their floors there"
    )
    failed, begun = 0, perf_counter()
    for case in chosen:
        try:
            calls = lower(case).count("@mosaic_gpu")
            state = f"{calls} kernel{'s' * (calls != 1)}"
        except Exception as e:
            failed, state = failed + 1, f"DOES NOT LOWER: {type(e).__name__}: {e}"
        floor = RATES["H200"].floor(case.work) * 1e6
        amounts = (
            f"{case.work.flops / 1e9:10.1f} GFLOP {case.work.bytes / 1e6:9.1f} MB  floor {floor:8.1f} us"
        )
        others = "" if case.small else f"  against {', '.join(case.baselines) or 'nothing'}"
        known = f"  measured {measured(case.name)}" if measured(case.name) != "-" else ""
        print(f"{case.name:48} {amounts}  {state}{others}{known}", flush=True)
    took = perf_counter() - begun
    print(f"{len(chosen) - failed} of {len(chosen)} cases lower for CUDA, in {took:.0f} s; none has been run")
    return int(failed > 0)


def check(case: Case, peak: Rates, options: argparse.Namespace) -> Findings:
    """Compare one case, time it, and print its line."""
    key = jax.random.key(options.seed)
    found = Findings(case=case.name, faults=[])
    print(f"{case.name:48}", end="", flush=True)
    try:
        verdict = verify(case, key)
    except Exception as e:  # a kernel that does not compile or run must not hide the others
        print(f" FAILED: {type(e).__name__}", flush=True)
        found["faults"].append(f"{type(e).__name__}: {e}")
        return found
    faults = found["faults"] = verdict.faults(case.tolerance)
    found["distance"] = verdict.distance
    print(f" distance {verdict.distance:.1e}{' WRONG' * bool(faults)}", end="", flush=True)
    if not options.no_timing and not case.small:
        try:
            timing(case, peak, key, found, baselines=not options.no_baselines)
        except Exception as e:  # for example out of memory
            print("  NOT TIMED", end="")
            faults.append(f"{type(e).__name__}: {e}")
    print(flush=True)
    return found


def timing(case: Case, peak: Rates, key: jax.Array, found: Findings, *, baselines: bool) -> None:
    """Time a case and its baselines, record the findings, and complete the case's line."""
    inputs = jax.jit(case.inputs)(key)
    time, floor = seconds(case.kernel, inputs), peak.floor(case.work)
    again = hot(case.kernel, inputs)
    found["us"], found["floor_us"], found["hot_us"] = time * 1e6, floor * 1e6, again.seconds * 1e6
    print(f"  {microseconds(time):>12}", end="")
    if time > 0:
        tflops, gbs = case.work.flops / time / 1e12, case.work.bytes / time / 1e9
        found["tflops"], found["gbs"] = tflops, gbs
        print(f" {tflops:6.1f} TFLOP/s {gbs:7.0f} GB/s", end="")
        print(f"  floor / time {floor / time:4.0%}", end="")
    print(f"; hot {microseconds(again.seconds)}", end="")
    if again.clock:
        found["mhz"], found["watts"] = again.clock
        print(f" at {again.clock[0]:.0f} MHz, {again.clock[1]:.0f} W", end="")
    if baselines:
        found["baselines"] = {name: baseline(case, name, inputs) for name in case.baselines}
        print("".join(f"; {name} {text}" for name, text in found["baselines"].items()), end="")


def microseconds(time: float) -> str:
    """A time as text; a difference of two programs' times may be 0 or negative."""
    return f"{time * 1e6:.1f} us" if time > 0 else "too short to tell"


def baseline(case: Case, name: str, inputs: tuple) -> str:
    """Time of a baseline, or the reason why there is none."""
    way = case.baselines[name]
    try:
        if isinstance(way, External):
            call = way.prepare(*jax.block_until_ready(inputs))
            apart = distance(call().float().cpu().numpy(), jax.jit(case.kernel)(*inputs))
            return f"{external_seconds(call) * 1e6:.1f} us ({apart:.1e} from ours)"
        return microseconds(seconds(way, inputs))
    except UnavailableError as e:
        return f"unavailable ({e})"
    except Exception as e:  # a baseline that runs out of memory, say
        return f"failed ({type(e).__name__}: {str(e).splitlines()[0][:100]})"


if __name__ == "__main__":
    sys.exit(main())
