"""Compile a decode step of DeepSeek-V3's dimensions for H200s, without one, and hold it against the budget.

    python -m tests.kernels.compile_step [PATTERN] [--layer]

Four layers, one of them dense, and the NextN layer; a window of 4, FP8 weights; 128 slots of 4,096 rows each,
or (``sparse_...``) 40 slots of 12,288 rows with DeepSeek-V3.2's indexer: a token chooses 2,048 of them. Of
DeepSeek-V4-Flash (``v4_...``) four layers, no two of which are alike, and its MTP layer; one slot.
Needs jax 0.11 or newer: what older ones compile has another budget.
"""

import argparse
import math
import os
import re
import sys
import tempfile
import time
import tomllib
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas import absent
from kernels_pallas.deviceless import report, target
from mtp_jax.checkpoint.random_weights import abstract_params
from mtp_jax.decode.bookkeeping import abstract_state
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.keys import SamplingMode, StepKey
from mtp_jax.decode.outbox import box_of, into_box
from mtp_jax.decode.state import StateShape
from mtp_jax.decode.step import Step
from mtp_jax.heads.build import build
from mtp_jax.lab.bench.shapes import INDEXER, v3
from mtp_jax.model.backend import Backend, mosaic_gpu, xla
from mtp_jax.model.cache import LayerCache, PagedView
from mtp_jax.model.config import IndexerConfig, ModelConfig
from mtp_jax.model.device import compiler_options
from mtp_jax.model.family import config_of
from mtp_jax.model.layers import rope_angles
from mtp_jax.model.mla import Form
from mtp_jax.model.narrow import Fp8
from mtp_jax.model.params import Layer, Params
from mtp_jax.model.sharding import partition
from mtp_jax.model.sight import Sight
from mtp_jax.model.trunk import Model, block
from mtp_jax.model.visible import chain
from tests.lab.planning.releases import RELEASES

PAGE = 64
BUDGET = Path(__file__).with_name("step_budget.toml")
# Devices along `data`, which splits slots, and along `model`, which splits heads; both split experts.
MESHES = {"one": (1, 1), "data8": (8, 1), "model8": (1, 8)}


@dataclass(frozen=True)
class Load:
    """The work of a step, and the meshes that it is compiled for.

    Attributes:
        slots, rows: slots, and cached rows of each.
        depth: drafts that are verified.
    """

    slots: int
    rows: int
    indexer: IndexerConfig | None = None
    meshes: tuple[str, ...] = ("one", "data8", "model8")
    experts: int = 256
    depth: int = 3


# Sizes that no weight has, so that arrays of tokens and of rows are told from weights by their shapes.
LOADS = {
    "": Load(128, 4096),
    "sparse_": Load(40, 12288, INDEXER, ("one", "data8")),
    "slots1_": Load(1, 4096, meshes=("one", "model8")),
    "slots1_window1_": Load(1, 4096, meshes=("one", "model8"), depth=0),
    "slots8_": Load(8, 4096, meshes=("one", "model8")),
}
DENSE = LOADS[""]
# Formats of DeepSeek-V4's experts, by the name of the program.
V4 = {"v4_one": "fp8", "v4_fp4_one": "fp4"}
# Layers of DeepSeek-V3 that have a cache: its trunk's, and NextN.
WHOLE = 61 + 1


def fp8_params(cfg: ModelConfig, mesh: Mesh) -> Params:
    """Shapes of the parameters, projections in FP8."""
    return abstract_params(cfg, cfg.dtype, {"fp8"}, mesh)


@dataclass(frozen=True)
class Program:
    """A compiled program and what it puts on a GPU.

    Attributes:
        entries: number of graphs, and of launches outside of graphs.
    """

    compiled: jax.stages.Compiled
    launches: tuple[str, ...]
    entries: int

    @property
    def temp_mib(self) -> float:
        """Device memory beside arguments and results."""
        return report.temp_bytes(self.compiled) / 2**20

    @property
    def moved(self) -> int:
        """Results that alias no argument, and so may be in another place after every call."""
        aliases = re.findall(r"\{\d*\}: \(\d+, \{\}", (self.compiled.as_text() or "").partition("\n")[0])
        return len(jax.tree.leaves(self.compiled.out_info)) - len(aliases)

    @property
    def arguments(self) -> int:
        """Arrays that a call takes."""
        return len(jax.tree.leaves(self.compiled.args_info))

    def names(self) -> tuple[str, ...]:
        """Of each launch: where in the program it comes from, or XLA's name of its kernel, without number."""
        purposes = report.purposes(self.launches, self.compiled.as_text() or "")
        kernels = (re.sub(r"_\d+$", "", report.kernel_name(line)) for line in self.launches)
        return tuple(purpose or kernel for purpose, kernel in zip(purposes, kernels, strict=True))


def compile_program(mesh: Mesh, function: Any, *inputs: Any, dump: Path) -> Program:
    """Compile for the mesh."""
    options = partial(compiler_options, devices=mesh.size)
    compiled = target.compile_for(mesh, function, *inputs, dump=dump, options=options)
    told = target.xla_dump(dump.parent)
    return Program(compiled, report.launches(told), report.entries(told))


def backend(mesh: Mesh) -> Backend:
    """Decoding, on a mesh if it has more than one device."""
    return mosaic_gpu(mesh if mesh.size > 1 else None)


def v4(experts: str) -> ModelConfig:
    """Four layers of DeepSeek-V4-Flash: window attention twice, then entries of 4 and of 128 tokens.

    Tokens choose the experts of the first three. experts: their format, as in config.json.
    """
    changes = {"num_hidden_layers": 4, "compress_ratios": [0, 0, 4, 128, 0], "expert_dtype": experts}
    return replace(config_of(RELEASES["DeepSeek-V4-Flash"] | changes), dtype="bfloat16")


def compile_step(
    cfg: ModelConfig, params: Params, mesh: Mesh, dump: Path, load: Load, page: int = PAGE
) -> Program:
    """The greedy step of a model; its cache is donated."""
    data, columns = mesh.shape["data"], load.rows // page
    sizes = StateShape(load.slots, load.slots // data * columns, page, columns, cfg.dtype)
    model, drafter = Model(cfg, backend(mesh)), build(cfg)
    state = abstract_state(Model(cfg, xla(mesh)), drafter, sizes)
    key = StepKey(load.slots, load.depth, columns, SamplingMode())
    everywhere, empty = NamedSharding(mesh, PartitionSpec()), box_of(key, data)
    box = jax.ShapeDtypeStruct(empty.shape, empty.dtype, sharding=everywhere)
    run = jax.jit(into_box(Step(Decoding(model, drafter), key)), donate_argnums=(1, 2))
    return compile_program(mesh, run, params, state, box, dump=dump)


def compile_layers(mesh: Mesh, layers: int, dump: Path, load: Load = DENSE) -> Program:
    """So many MoE layers over the window of every slot, with the masks and angles that they share."""
    function, inputs = layers_of(mesh, layers, backend(mesh), load=load)
    return compile_program(mesh, function, *inputs, dump=dump)


def layers_of(
    mesh: Mesh, layers: int, on: Backend, form: Form = "absorbed", load: Load = DENSE
) -> tuple[Any, tuple[Any, ...]]:
    """DeepSeek-V3's MoE layers as a function to compile, and the shapes of its inputs."""
    cfg = v3(1 + layers, load.indexer, load.experts)
    return moe_layers(cfg, fp8_params(cfg, mesh), mesh, on, form, load)


def moe_layers(
    cfg: ModelConfig, params: Params, mesh: Mesh, on: Backend, form: Form, load: Load
) -> tuple[Any, tuple[Any, ...]]:
    """The MoE layers of any such model as a function to compile, and the shapes of its inputs."""
    own, data = params.layers[cfg.first_k_dense_replace :], mesh.shape["data"]

    def array(dtype: Any, axis: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, partition(axis)))

    x = array(jnp.bfloat16, "slots", load.slots, load.depth + 1, cfg.hidden_size)
    positions = array(jnp.int32, "slots", load.slots, load.depth + 1)
    table = array(jnp.int32, "slots", load.slots, load.rows // PAGE)
    count = load.slots * load.rows // PAGE + data
    widths = [cfg.row.width] + ([] if load.indexer is None else [load.indexer.dim])
    arrays: Any = [array(jnp.bfloat16, "pages", count, PAGE, width) for width in widths]
    pages = LayerCache(*arrays)

    def run(params: tuple[Layer, ...], x: Any, positions: Any, table: Any, pages: tuple[Any, ...]) -> Any:
        view = PagedView(table, positions, chain(positions[:, 0], load.depth + 1), form)
        angles, kept = rope_angles(cfg, positions), []
        for p, mine in zip(params, pages, strict=True):
            x, mine, *_ = block(p, Model(cfg, on), x, Sight(angles, (view,)), mine)
            kept.append(mine)
        return x, kept

    return jax.jit(run, donate_argnums=4), (own, x, positions, table, (pages,) * len(own))


# An instruction that yields a whole weight in a wider type: HLO names the type and shape of its result.
_RESULT = re.compile(r"= (bf16|f32)\[([0-9,]+)\]")
_ANY_RESULT = re.compile(r"= (pred|[a-z]+)(\d*)[a-z0-9]*\[([0-9,]+)\]")


def wide_copies(compiled: jax.stages.Compiled, params: Params) -> Counter[str]:
    """Results as large as an FP8 weight's part on a device, in bfloat16 or float32.

    Not those that are as large, and of the type, of a weight which is none: a router's may be.
    """
    fp8, plain = set(), set()
    for w in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Fp8)):
        array = w.values if isinstance(w, Fp8) else w
        shape = tuple(sorted(n for n in array.sharding.shard_shape(array.shape) if n > 1))
        if isinstance(w, Fp8):
            fp8.add(shape)
        else:
            plain.add(("f32" if array.dtype == jnp.float32 else "bf16", shape))
    found = Counter()
    for kind, dims in _RESULT.findall(compiled.as_text() or ""):
        shape = tuple(sorted(int(n) for n in dims.split(",") if int(n) > 1))
        if shape in fp8 and (kind, shape) not in plain:
            found[f"{kind}{list(shape)}"] += 1
    return found


def beyond_scores(compiled: jax.stages.Compiled, mesh: Mesh, load: Load) -> Counter[str]:
    """Results over all rows of a slot that take more memory than the indexer's scores, which are float32."""
    tokens = load.slots // mesh.shape["data"] * (load.depth + 1)
    found = Counter()
    for kind, bits, dims in _ANY_RESULT.findall(compiled.as_text() or ""):
        shape = [int(n) for n in dims.split(",")]
        if load.rows in shape and math.prod(shape) * int(bits or 8) > tokens * load.rows * 32:
            found[f"{kind}{bits}{shape}"] += 1
    return found


def main() -> int:
    """Compile; 1 if a step exceeds its budget."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.compile_step", description=__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="only meshes whose names contain this")
    parser.add_argument(
        "--layer", action="store_true", help="layers instead of the step; print the launches of each"
    )
    arguments = parser.parse_args()
    if jax.__version_info__ < (0, 11):
        print(f"skipped: with jax {jax.__version__} kernels write nothing in place; use 0.11 (Python 3.12)")
        return 0
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        target.prepare(Path(folder))
        cases = [(kind + on, load, on) for kind, load in LOADS.items() for on in load.meshes]
        for what in ("PTX", "PTXAS", "SASS"):  # of some fifty kernels, minutes' worth
            os.environ.pop(f"MOSAIC_GPU_DUMP_{what}", None)
        check = check_layer if arguments.layer else check_step
        for name, load, on in cases:
            if arguments.pattern in name:
                faults += check(name, mesh_of(on), Path(folder, name), load)
        for name, experts in V4.items():
            if arguments.pattern in name and not arguments.layer:
                faults += check_v4(name, experts, Path(folder, name))
    print("\n".join(faults) or "within budget")
    return int(bool(faults))


def check_layer(name: str, mesh: Mesh, dump: Path, load: Load) -> list[str]:
    """Launches by name, and temporary memory, that a second layer adds. The rest is made once per step."""
    one, two = (compile_layers(mesh, n, dump.with_name(f"{dump.name}-{n}"), load) for n in (1, 2))
    of_one, of_two = one.names(), two.names()
    for line, launch in zip(one.launches, of_one, strict=True):
        print(line.split("grid:")[0].rstrip(), launch)
    for launch in beyond(of_two, of_one):
        print(f"{name}: the second layer adds {launch}")
    for launch in beyond(of_one, of_two):
        print(f"{name}: the second layer spares {launch}")
    each = len(two.launches) - len(one.launches)
    once = len(one.launches) - each
    print(f"{name}: {each} launches of each layer, and {once} once; {two.entries} entries of two", flush=True)
    more = two.temp_mib - one.temp_mib
    print(f"{name}: temporary memory {one.temp_mib:.1f} MiB, {more:+.1f} with the second layer", flush=True)
    found = {"launches_per_layer": each, "launches_once": once, "temp_mib_second_layer": more}
    found["entries"] = two.entries
    return [fault for what, got in found.items() for fault in over(name, what, got)]


def beyond(more: tuple[str, ...], less: tuple[str, ...]) -> list[str]:
    """The launches of a program that another has not, or not as often, in order; equal ones: the last."""
    left, found = Counter(more) - Counter(less), []
    for launch in reversed(more):
        if left[launch]:
            left[launch] -= 1
            found.append(launch)
    return found[::-1]


def check_step(name: str, mesh: Mesh, dump: Path, load: Load) -> list[str]:
    """Memory of the step, and whether it makes wider copies of weights, or arrays of all that tokens see."""
    started, cfg = time.perf_counter(), v3(4, load.indexer)
    params = fp8_params(cfg, mesh)
    program = compile_step(cfg, params, mesh, dump, load)
    memory: Any = program.compiled.memory_analysis()
    width = cfg.row.width + (load.indexer.dim if load.indexer else 0)
    of_layer = load.slots // mesh.shape["data"] * load.rows * width * 2
    cache, share = 5 * of_layer, 100 * program.temp_mib * 2**20 / (WHOLE * of_layer)
    copies = wide_copies(program.compiled, params)
    beyond = beyond_scores(program.compiled, mesh, load)
    gib = {what: getattr(memory, f"{what}_size_in_bytes") / 2**30 for what in ("argument", "alias")}
    print(
        f"{name}: {len(program.launches)} launches in {program.entries} entries; "
        f"arguments {gib['argument']:.1f} GiB, "
        f"temporary {program.temp_mib:.0f} MiB, {share:.2f} % of all {WHOLE} layers' cache of "
        f"{WHOLE * of_layer / 2**30:.1f} GiB; cache {cache / 2**30:.2f}, in place {gib['alias']:.2f} GiB; "
        f"weights in a wider type: {dict(copies) or 'none'}; "
        f"larger than scores: {dict(beyond) or 'none'}; {time.perf_counter() - started:.0f} s",
        flush=True,
    )
    kept = [] if memory.alias_size_in_bytes >= cache else [f"{name}: the cache is not updated in place"]
    found = {"temp_mib": program.temp_mib, "temp_percent": share, "wide_weights": copies.total()}
    found["beyond_scores"] = beyond.total()
    if mesh.size == 1:  # on a mesh XLA chooses here where results lie
        found |= {"moved": program.moved, "arguments": program.arguments}
    return kept + [fault for what, got in found.items() for fault in over(name, what, got)]


def check_v4(name: str, experts: str, dump: Path) -> list[str]:
    """Launches, loops and memory of DeepSeek-V4's step, as a whole."""
    started, mesh, cfg = time.process_time(), mesh_of("one"), v4(experts)
    params = abstract_params(cfg, cfg.dtype, {"fp8", "fp4"}, mesh)
    program = compile_step(cfg, params, mesh, dump, LOADS["slots1_"], page=2 * PAGE)
    text = program.compiled.as_text() or ""
    found = {"launches": len(program.launches), "entries": program.entries, "loops": text.count(" while(")}
    found |= {"temp_mib": program.temp_mib, "moved": program.moved, "arguments": program.arguments}
    found["wide_weights"] = wide_copies(program.compiled, params).total()
    told = ", ".join(f"{what} {got:.4g}" for what, got in found.items())
    print(f"{name}: {told}; {time.process_time() - started:.0f} CPU s", flush=True)
    return [fault for what, got in found.items() for fault in over(name, what, got)]


def mesh_of(on: str) -> Mesh:
    """H200s that are not there."""
    return absent.mesh_of("h200", MESHES[on], ("data", "model"))


def over(name: str, what: str, got: float) -> list[str]:
    """A fault if the budget is exceeded."""
    limit = tomllib.loads(BUDGET.read_text(encoding="utf-8"))[name][what]
    return [f"{name}: {what} {got:.4g}, at most {limit}"] if got > limit else []


if __name__ == "__main__":
    sys.exit(main())
