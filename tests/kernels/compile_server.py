"""Compile every program of a default server for TPUs, without one, and hold each against the budget.

    python -m tests.kernels.compile_server [CASE ...]

A case is a section of ``server_budget.toml``. Weights are shapes alone. Needs libtpu, the extra ``tpu``;
`make tpu-compile` installs it. No TPU has run these programs.
"""

import argparse
import json
import re
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.experimental.layout import Format

from kernels_pallas.deviceless import report
from mtp_jax.api.build_absent import AbsentServer, absent_server, devices
from mtp_jax.api.demo import demo_model
from mtp_jax.api.options import LLMOptions
from mtp_jax.decode.keys import PageKey, StepKey, name_of
from mtp_jax.decode.lowering import Lower
from mtp_jax.lab.bench.cost import of_launch
from mtp_jax.lab.bench.shapes import NAMED, cut
from mtp_jax.model.family import config_json

BUDGET = Path(__file__).with_name("server_budget.toml")
MIB = 2**20
ROW = "{:68} {:>5} {:>8} {:>5} {:>6} {:>11} {:>6}"
_COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
# Programs that take another array in place of one of the state's: the page table.
_REPLACED = {"update": 1}
_ALIAS = re.compile(r"\{[\d, ]*\}: \(\d+, \{[\d, ]*\}, (?:may|must)-alias\)")


@dataclass(frozen=True)
class Counts:
    """The compiler's decisions on one program, on each device.

    Attributes:
        temp_mib: MiB of memory beside arguments and results.
        moved: number of donated arrays that results are made from, but in other memory.
        strewn: number of donated arrays whose first axis, the pages, is not the outermost one in memory.
        collectives: number of collectives, by their text.
        read: bytes read and written, as XLA counts them, over the bytes that must be read; 0: unknown.
    """

    temp_mib: float
    moved: int
    strewn: int
    collectives: int
    read: float

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, least: float | None = None, replaced: int = 0) -> "Counts":
        """Count. least: bytes that must be read. replaced: donated arrays that results are not made from."""
        text = compiled.as_text() or ""
        arguments = jax.tree.leaves(compiled.args_info)
        formats = jax.tree.leaves(compiled.input_formats, is_leaf=lambda x: isinstance(x, Format))
        pairs = zip(arguments, formats, strict=True)
        orders = [by.layout.major_to_minor for a, by in pairs if a.donated and by.layout is not None]
        donated = sum(a.donated for a in arguments)
        cost: Any = compiled.cost_analysis()
        return cls(
            report.temp_bytes(compiled) / MIB,
            donated - replaced - len(_ALIAS.findall(text.partition("\n")[0])),
            sum(order[:1] not in ((), (0,)) for order in orders),
            len(re.findall(rf" ({_COLLECTIVES})(?:-start)?\(", text)),
            cost["bytes accessed"] / least if least else 0.0,
        )


def programs(server: AbsentServer) -> Iterator[tuple[str, StepKey | None, Lower]]:
    """All programs by name; the key of a step that is one program, else None."""
    lowering = server.programs.lowering
    pairs = lowering.bookkeeping() | lowering.movers() | {"empty": lowering.empty}
    for key in server.keys:
        if isinstance(key, PageKey):
            pairs |= lowering.pages(key)
        elif isinstance(key, StepKey) and key.mode.structured:
            pairs |= lowering.phases(key)
    yield from ((name, None, lower) for name, lower in pairs.items())
    for key in server.keys:
        if isinstance(key, StepKey) and not key.mode.structured:
            yield name_of(key), key, partial(lowering.program, key)


def must_read(server: AbsentServer, key: StepKey) -> float:
    """Bytes that all devices together must read for a step: weights once per pass, and cached rows."""
    config, lowering = server.engine.config, server.programs.lowering
    cfg = lowering.decoding.model.cfg
    return of_launch(key, cfg, lowering.layers, config.page_size, config.dtype, 1).bytes


def check(name: str, limits: dict[str, Any]) -> list[str]:
    """Compile the programs of one case, print a line for each, and list the limits that they exceed."""
    mesh, most = devices(limits["device"], *limits["mesh"]), Counter[str]()
    print(f"{name}: {limits['model']} on {mesh.size} x {mesh.devices.flat[0].device_kind}")
    print(ROW.format("program", "CPU s", *(field.name for field in fields(Counts))))
    with tempfile.TemporaryDirectory() as folder, absent_server(_model(limits, Path(folder)), mesh) as server:
        for program, key, lower in programs(server):
            began = time.process_time()
            compiled = lower().compile(server.programs.lowering.options)
            least = must_read(server, key) / mesh.size if key else None
            found = asdict(Counts.of(compiled, least, _REPLACED.get(program, 0)))
            shown = (f"{number:.4g}" for number in found.values())
            print(ROW.format(program, f"{time.process_time() - began:.0f}", *shown), flush=True)
            most |= Counter(found)
            most["programs"] += 1
    return [fault for what, got in most.items() for fault in over(name, what, got, limits)]


def over(name: str, what: str, got: float, limits: dict[str, Any]) -> list[str]:
    """A fault if the budget is exceeded."""
    return [f"{name}: {what} {got:.4g}, at most {limits[what]}"] if got > limits[what] else []


def _model(limits: dict[str, Any], folder: Path) -> LLMOptions:
    if limits["model"] == "demo":
        return LLMOptions(demo_model(), compile_cache=None)
    raw = config_json(cut(NAMED[limits["model"]].whole, limits["layers"])) | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return LLMOptions(folder, load_format="dummy", compile_cache=None)


def main() -> int:
    """Compile; 1 if a program exceeds its budget."""
    budget = tomllib.loads(BUDGET.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.compile_server", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(budget)}; none: all")
    chosen = parser.parse_args().cases or [*budget]
    if wrong := {*chosen} - {*budget}:
        parser.error(f"no case {min(wrong)!r}; expected {', '.join(budget)}")
    faults = [fault for name in chosen for fault in check(name, budget[name])]
    print("\n".join(faults) or "within budget")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
