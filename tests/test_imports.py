"""Imports point one way only: from the command line down to the configuration, never back up."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.layers import FLOORS, LAYERS, ROOT, imports, modules

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# The engine is host code: it must be testable, and fast, without a device.
WITHOUT_JAX = (
    "api.admission",
    "api.hooks",
    "api.options",
    "cluster.handover.client",
    "cluster.handover.pages_protocol",
    "cluster.handover.options",
    "cluster.handover.pages",
    "cluster.handover.server",
    "decode.arrays",
    "decode.keys",
    "decode.launches",
    "decode.law",
    "engine.balance",
    "engine.buckets",
    "engine.config",
    "engine.depth",
    "engine.engine",
    "engine.inputs",
    "engine.pages",
    "engine.request",
    "engine.results",
    "engine.sampling_params",
    "engine.scheduler",
    "engine.shards",
    "engine.speculation",
    "engine.stats",
    "engine.structured",
    "engine.timings",
    "engine.turns",
    "engine.validate",
    "errors",
    "foreign",
    "hosts.channel",
    "hosts.ending",
    "hosts.follower_log",
    "hosts.hello",
    "hosts.leader_log",
    "hosts.messages",
    "hosts.options",
    "heads.blocks.declared",
    "heads.eagle3.declared",
    "heads.kinds",
    "heads.reading",
    "heads.stages.declared",
    "heads.tables",
    "json_object",
    "lab.forecast.counted",
    "lab.forecast.load",
    "lab.forecast.plot",
    "lab.forecast.replay",
    "lab.forecast.report",
    "lab.planning.check",
    "lab.planning.declared",
    "lab.planning.deployment",
    "lab.planning.exchange",
    "lab.planning.fit",
    "lab.planning.hardware",
    "lab.planning.launch_time",
    "lab.planning.memory",
    "lab.planning.plot",
    "lab.planning.prefill",
    "lab.planning.published",
    "lab.planning.step_time",
    "lab.planning.table",
    "lab.planning.text",
    "lab.planning.weights",
    "lab.planning.work",
    "machine",
    "model.attention_config",
    "model.compressed_config",
    "model.config",
    "model.config_parts",
    "model.draft_vocab",
    "model.family",
    "model.gqa_config",
    "model.head",
    "model.hf_config",
    "model.hf_quantization",
    "model.layer_specs",
    "model.mla_config",
    "model.placement",
    "model.room",
    "model.spec",
    "model.specs",
    "options",
    "simulate.device",
    "simulate.language",
    "store.memory",
    "store.page",
    "store.tier",
    "text.chat_template",
    "text.child",
    "text.compile_grammar",
    "text.dialects",
    "text.grammar",
    "text.json_schema",
    "text.plain_text",
    "text.render",
    "text.rules",
    "text.stop_strings",
    "text.structural_tags",
    "text.tokenizer",
    "text.tools.conversation",
    "text.tools.formats",
    "text.tools.grammar",
    "text.tools.parser",
    "text.tools.parts",
    "text.tools.use",
    "text.trial",
    "wire.codec",
    "wire.connection",
    "wire.credentials",
    "wire.door",
    "wire.handshake",
    "wire.secret",
    "wire.session",
    "wire.signed",
    "wire.tls",
)

# What computes by kernels, chooses among them, or shares their types.
_NAMES = (
    *("attention.hopper", "attention.latent"),
    *("experts.cpu", "experts.cpu_router", "experts.hopper", "experts.plain"),
    *("products.e4m3", "products.hopper", "products.stream"),
    *("backend", "cache", "indexer", "visible"),
)
# Beside them, the compilation for devices that are not here.
OF_KERNELS = (*(f"mtp_jax.model.{name}" for name in _NAMES), "mtp_jax.api.build_absent")

# What a wheel leaves out, the tools of kernels.
_WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
OF_A_CLONE = tuple(folder.replace("/", ".") for folder in _WHEEL["exclude"])

# Who starts servers.
OF_SERVERS = ("commands", "cluster")

# Who asks what device a program is for: the choice of a backend. The mathematics does not.
OF_DEVICES = "mtp_jax.model.backend"

# Who knows the layers that draft: their drafter, and what scores, measures or trains the model without the
# engine. Everything else knows a drafter.
DRAFTING = tuple(f"mtp_jax.model.{name}" for name in ("draft_module", "nextn"))
OF_DRAFTING = (
    "mtp_jax.model",
    "mtp_jax.decode.drafter",
    "mtp_jax.heads",
    "mtp_jax.api.score",
    "mtp_jax.lab.bench",
    "mtp_jax.lab.train",
)

# A checkpoint fills parameters and places them; it knows nothing of what the model computes.
_OF_MODEL = (
    "attention_config",
    "config",
    "config_parts",
    "device",
    "draft_vocab",
    "family",
    "head",
    "hf_config",
    "hf_quantization",
    "layer_names",
    "narrow",
    "params",
    "sharding",
    "spec",
    "specs",
)
OF_MODEL = tuple(f"mtp_jax.model.{name}" for name in _OF_MODEL)


def part(name: str) -> str:
    """The part of mtp_jax that a dotted name belongs to; names of the package itself are "__init__"."""
    _, head, *_ = [*name.split("."), "__init__"]
    return head if head in RANK or is_module(f"mtp_jax.{head}") else "__init__"


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def faults_of_floors(room: str, module: str, source: str) -> Iterator[str]:
    """Imports upwards between the folders of a room."""
    floor = {name: number for number, name in enumerate(FLOORS[room])}
    here = module.removeprefix(f"{room}.").split(".")[0]
    if here not in (*floor, "__init__"):
        yield f"{module}: {room}.{here} has no place in FLOORS of tests/layers.py; give it one"
        return
    for name in imports(module, source):
        if name.startswith(f"{room}."):
            other = name.removeprefix(f"{room}.").split(".")[0]
            if floor.get(other, len(floor)) > floor.get(here, -1):
                yield f"{module} imports {name}, which is not below it"


def faults_in_mtp_jax(module: str, source: str) -> Iterator[str]:
    here = part(module)
    if (room := f"mtp_jax.{here}") in FLOORS:
        yield from faults_of_floors(room, module, source)
    if here not in RANK:
        yield f"{module}: mtp_jax.{here} has no place in LAYERS of tests/layers.py; give it one"
        return
    for name in imports(module, source):
        top = name.split(".")[0]
        if top == "kernels_pallas" and module not in OF_KERNELS:
            yield f"{module} imports {name}; only {' and '.join(OF_KERNELS)} may"
        yield from fault_of_a_wheel(module, name)
        if top == "serve" and here not in OF_SERVERS:
            yield f"{module} imports {name}; of mtp_jax only {' and '.join(OF_SERVERS)} may"
        if top == "mtp_jax" and part(name) != here and RANK.get(part(name), len(LAYERS)) >= RANK[here]:
            yield f"{module} imports {name}, which is not below it"
        if here == "model" and name.startswith("mtp_jax.model.device") and module != OF_DEVICES:
            yield f"{module} imports {name}; only {OF_DEVICES} may ask for the device"
        if name.startswith(DRAFTING) and not module.startswith(OF_DRAFTING):
            yield f"{module} imports {name}; drafts come from a decode.drafter.protocol.Drafter"
        if here == "checkpoint" and name.startswith("mtp_jax.model.") and not name.startswith(OF_MODEL):
            yield f"{module} imports {name}; of the model it may know only {' and '.join(OF_MODEL)}"


def fault_of_a_wheel(module: str, name: str) -> Iterator[str]:
    if name.startswith(OF_A_CLONE) and not module.startswith(OF_A_CLONE):
        yield f"{module} imports {name}, which a wheel does not hold"


def faults_in_kernels(module: str, source: str) -> Iterator[str]:
    for name in imports(module, source):
        yield from fault_of_a_wheel(module, name)
        if name.split(".")[0] in ("mtp_jax", "serve", "tests", "configs"):
            yield f"{module} imports {name}; kernels stand on jax and numpy alone"


def faults_in_serve(module: str, source: str) -> Iterator[str]:
    yield from faults_of_floors("serve", module, source)
    for name in imports(module, source):
        top, *below = name.split(".")
        inside = top == "mtp_jax" and bool(below) and (len(below) > 1 or is_module(name))
        inside &= below[:1] != ["options"]  # how they are declared, for its own, too
        if top == "kernels_pallas" or inside:
            yield f"{module} imports {name}; the server uses only what `from mtp_jax import ...` offers"


def imported_modules(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules of ours that each imports: for type checkers alone and within functions, too."""
    sources = {name.removesuffix(".__init__"): source for name, source in sources.items()}

    def home(name: str) -> str:
        while name and name not in sources:
            name = name.rpartition(".")[0]
        return name

    return {
        module: {home(name) for name in imports(module, source)} - {"", module}
        for module, source in sources.items()
    }


FAULTS = {"mtp_jax": faults_in_mtp_jax, "kernels_pallas": faults_in_kernels, "serve": faults_in_serve}


@pytest.mark.parametrize("package", FAULTS)
def test_imports_point_downwards(package):
    found = [f for module, source in modules(package).items() for f in FAULTS[package](module, source)]
    assert not found, "\n".join(found)


def test_modules_are_in_no_circle():
    """One that imports what imports it, however far away, is read as one file with it."""
    everything = {name: source for package in FAULTS for name, source in modules(package).items()}
    tuple(TopologicalSorter(imported_modules(everything)).static_order())


def test_circles_are_found():
    package = {"p.__init__": "", "p.a": "if TYPE_CHECKING:\n    from p.b import x"}
    with pytest.raises(CycleError) as caught:
        TopologicalSorter(imported_modules({**package, "p.b": "def f():\n    from p import a"})).prepare()
    assert set(caught.value.args[1]) == {"p.a", "p.b"}
    TopologicalSorter(imported_modules({**package, "p.b": "from p import q\nimport os"})).prepare()


# Imports each of the modules that are named, and prints a line for every one that fails.
WITHOUT = """
import importlib, sys

sys.modules["jax"] = sys.modules["jaxlib"] = None
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
"""


def test_host_code_runs_without_jax():
    """Transitively, in a process in which jax cannot be imported."""

    def failed(*names: str) -> str:
        command = [sys.executable, "-c", WITHOUT, *(f"mtp_jax.{name}" for name in names)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert not failed(*WITHOUT_JAX)
    assert "mtp_jax.decode.step: " in failed("decode.step")


@pytest.mark.parametrize("package", FAULTS)
def test_no_private_jax(package):
    found = []
    for module, source in modules(package).items():
        found += [f"{module}: {name}" for name in imports(module, source) if "_src" in name.split(".")]
        found += [
            f"{module}: line {node.lineno}"
            for node in (ast.walk(ast.parse(source)) if "_src" in source else ())
            if isinstance(node, ast.Attribute) and node.attr == "_src"
        ]
    assert not found, f"private JAX names break with its next release: {found}"


@pytest.mark.parametrize(
    ("package", "module", "source"),
    [
        ("mtp_jax", "mtp_jax.model.trunk", "from mtp_jax.checkpoint import load"),
        ("mtp_jax", "mtp_jax.model.trunk", "def f():\n    from ..decode import cache"),
        ("mtp_jax", "mtp_jax.model.config", "import mtp_jax"),
        ("mtp_jax", "mtp_jax.checkpoint.hf", "from mtp_jax.model import trunk"),
        ("mtp_jax", "mtp_jax.decode.step", "import kernels_pallas.mla_decode"),
        ("mtp_jax", "mtp_jax.decode.step", "from mtp_jax.model import nextn"),
        ("mtp_jax", "mtp_jax.engine.engine", "from mtp_jax.model.nextn import run"),
        ("mtp_jax", "mtp_jax.api.llm", "from serve.http.app import main"),
        ("kernels_pallas", "kernels_pallas.mla_decode.api", "from mtp_jax.errors import ConfigError"),
        ("mtp_jax", "mtp_jax.model.backend", "from kernels_pallas.deviceless import target"),
        ("kernels_pallas", "kernels_pallas.top_k.api", "from kernels_pallas.check.case import Case"),
        ("serve", "serve.http.app", "from mtp_jax.errors import RequestError"),
        ("serve", "serve.http.app", "from mtp_jax import errors"),
        ("serve", "serve.answers.calls", "from serve.routes.chat import ask"),
        ("serve", "serve.base.state", "def f():\n    from serve import http"),
        ("mtp_jax", "mtp_jax.lab.planning.work", "from mtp_jax.lab.bench.cost import Cost"),
        ("mtp_jax", "mtp_jax.commands.serve", "from mtp_jax.cluster.on_ray.options import RayOptions"),
        ("serve", "serve.chat", "import json"),
    ],
)
def test_faults_are_found(package, module, source):
    assert list(FAULTS[package](module, source))


@pytest.mark.parametrize(
    ("package", "module", "source"),
    [
        (
            "mtp_jax",
            "mtp_jax.commands.serve",
            "from mtp_jax.api.llm import LLM\nfrom serve.http.app import main",
        ),
        ("mtp_jax", "mtp_jax.model.trunk", "from . import layers\nfrom ..errors import ConfigError"),
        ("mtp_jax", "mtp_jax.checkpoint.hf", "from mtp_jax.model.params import Params"),
        ("mtp_jax", "mtp_jax.heads.build", "from mtp_jax.model import nextn"),
        ("serve", "serve.http.app", "from mtp_jax import LLM, RequestError"),
        ("serve", "serve.http.app", "from serve.http.access import Access\nfrom serve.routes import chat"),
    ],
)
def test_allowed_imports_pass(package, module, source):
    assert not list(FAULTS[package](module, source))
