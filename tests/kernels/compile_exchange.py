"""Compile DeepSeek-V3's MoE layers over 8, 16 or 64 H200s, without one: what runs beside each exchange.

    python -m tests.kernels.compile_exchange [--gpus 8 16 64] [--micro-batches N] [--layers N]

Hosts have 8 GPUs. Rows go between hosts by an all-to-all, and within a host by a gather; on 8 GPUs between
all of them by an all-to-all. 64 slots of each GPU, a window of 2. Needs jax 0.11 or newer.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from kernels_pallas import absent
from kernels_pallas.deviceless import target
from mtp_jax.lab.bench.shapes import v3
from mtp_jax.model import trunk
from mtp_jax.model.backend import mosaic_gpu
from mtp_jax.model.cache import LayerCache, PagedView
from mtp_jax.model.device import compiler_options
from mtp_jax.model.experts.exchange import Exchange
from mtp_jax.model.sharding import partition
from mtp_jax.model.visible import chain
from tests.kernels.compile_step import PAGE, fp8_params

SLOTS, WINDOW, ROWS = 64, 2, 1024


def compile_trunk(gpus: int, micro_batches: int, layers: int, room: float, dump: Path) -> str:
    """The text of the compiled pass of one dense layer and so many MoE layers over all slots' windows."""
    mesh = absent.mesh_of("h200", (gpus, 1), ("data", "model"))
    exchange = Exchange(gpus, 1 if gpus == 8 else 8, room)
    on, cfg = mosaic_gpu(mesh, exchange=exchange, micro_batches=micro_batches), v3(1 + layers)
    slots, columns = gpus * SLOTS, ROWS // PAGE

    def array(dtype: Any, axis: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, partition(axis)))

    def run(params: Any, tokens: Any, positions: Any, table: Any, pages: Any) -> Any:
        view = PagedView(table, positions, chain(positions[:, 0], WINDOW), "absorbed")
        traced = trunk.run(params, trunk.Model(cfg, on), tokens, positions, pages, (view,))
        return traced.hidden, traced.caches

    windows = array(jnp.int32, "slots", slots, WINDOW)
    latents: Any = array(jnp.bfloat16, "pages", gpus * (SLOTS * columns + 1), PAGE, cfg.row.width)
    cache = LayerCache(latents)
    inputs = windows, windows, array(jnp.int32, "slots", slots, columns), (cache,) * (1 + layers)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        told = compiler_options(micro_batches)
    function = jax.jit(run, donate_argnums=4, compiler_options=told)
    compiled = target.compile_for(mesh, function, fp8_params(cfg, mesh), *inputs, dump=dump)
    return compiled.as_text() or ""


@dataclass
class Exchanged:
    """A collective that runs beside other work: its kind, and the products between its start and its end."""

    kind: str
    products: int = 0


_LINE = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{")
_COLLECTIVE = re.compile(r"all-to-all|all-gather|reduce-scatter|all-reduce")
# Products: kernels, cuBLAS, and fusions that XLA writes for a dot.
_PRODUCT = re.compile(r'custom_call_target="(?:mosaic_gpu_v2|__cublas)|__triton_gemm|"kind":"__triton')


def exchanges(text: str) -> tuple[list[Exchanged], list[str]]:
    """Of a compiled program: collectives with a start and an end, and those that nothing runs beside."""
    bodies, name = {}, None
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            name = found[1]
            bodies[name] = ""
        elif name:
            bodies[name] += line + "\n"
    entry = next(n for n in bodies if f"ENTRY %{n} " in text or f"ENTRY {n} " in text)
    under_way: dict[str, Exchanged] = {}
    beside, alone = [], []
    for name, op, rest in _operations(bodies[entry]):
        called = re.search(r"calls=%?([\w.\-]+)", rest)
        body = bodies.get(called[1], "") if called else ""
        if op.endswith("-start"):
            kind = _COLLECTIVE.search(op) or _COLLECTIVE.search(body)
            if kind:
                under_way[name] = Exchanged(kind[0])
        elif op.endswith("-done"):
            started = re.search(r"%?([\w.\-]+)\)", rest)
            if started and started[1] in under_way:
                beside.append(under_way.pop(started[1]))
        elif _COLLECTIVE.fullmatch(op):
            alone.append(op)
        elif _PRODUCT.search(rest) or " dot(" in body:
            for exchanged in under_way.values():
                exchanged.products += 1
    return beside, alone


def _operations(body: str) -> Iterator[tuple[str, str, str]]:
    for line in body.splitlines():
        if found := _LINE.match(line):
            yield found[1], found[3], found[4]


def main() -> int:
    """Compile and list; 1 if two micro-batches leave more than half of the all-to-alls without products."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.compile_exchange", description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--room", type=float, default=1.5)
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        target.prepare(Path(folder))
        for gpus in options.gpus:
            dump = Path(folder, str(gpus))
            text = compile_trunk(gpus, options.micro_batches, options.layers, options.room, dump)
            beside, alone = exchanges(text)
            sent = [e.products for e in beside if e.kind == "all-to-all"]
            count, covered = len(sent) + alone.count("all-to-all"), sum(n > 0 for n in sent)
            print(
                f"{gpus} GPUs, {options.micro_batches} micro-batches, {options.layers} MoE layers: products "
                f"between start and end of {covered} of {count} all-to-alls, {sent}",
                flush=True,
            )
            for kind in sorted({e.kind for e in beside} - {"all-to-all"}):
                print(f"  {kind} with products beside them: {[e.products for e in beside if e.kind == kind]}")
            failed += options.micro_batches > 1 and covered * 2 < count
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
