"""Kept programs: the same tokens without a compilation, and never a program that is another by any fact."""

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from mtp_jax.api.local import backend_of, decoding_of, local_runner, make_runner
from mtp_jax.decode import facts
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.kept import KeptPrograms
from mtp_jax.decode.keys import DraftKey, PageKey, SamplingMode, StepKey
from mtp_jax.decode.manifest import Manifest
from mtp_jax.engine.engine import Engine
from mtp_jax.errors import ConfigError
from mtp_jax.model import moe
from mtp_jax.model.params import param_specs
from mtp_jax.model.products.cpu import CpuProducts
from mtp_jax.model.sharding import make_mesh
from tests.decode.helpers import compilations as compilations
from tests.layers import imports, modules
from tests.models import GREEDY, SMALL, accepted, engine_config, finish, tiny_params

SPECS = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), param_specs(SMALL))


def engine(folder: Path | None, mesh: Mesh | None = None) -> Engine:
    sizes = engine_config(num_speculative_tokens=2, adaptive_depth=False)
    decoding = decoding_of(SMALL, sizes, backend_of(sizes, mesh))
    runner = make_runner(decoding, tiny_params(SMALL), sizes, kept=folder)
    return Engine(decoding.model.cfg, sizes, runner)


def answer(own: Engine) -> tuple[list[int], list[int]]:
    request = own.make_request([3, 1, 4, 1, 5], GREEDY)
    own.prepare([request])
    own.submit(request)
    before = local_runner(own).state
    finish(own)
    assert before.slots.length.is_deleted(), "the state is no longer donated"
    return request.progress.output, accepted(request)


def test_another_engine_answers_from_kept_programs_without_compiling(tmp_path, compilations):
    first, second = engine(tmp_path), engine(tmp_path)
    told = answer(first)
    assert sum(told[1]) > 4
    kept, again = (local_runner(own).programs.kept for own in (first, second))
    assert kept.loaded == 0
    assert kept.compiled == len([*tmp_path.iterdir()]) >= 6
    compilations.clear()
    answered = answer(second)
    assert not compilations
    assert answered == told
    assert (again.loaded, again.compiled) == (kept.compiled, 0)


@pytest.mark.rest
@pytest.mark.parametrize("mesh", [None, (2, 2)])
def test_programs_of_every_kind_are_kept(tmp_path, compilations, mesh):
    first, second = (engine(tmp_path, mesh and make_mesh(*mesh)) for _ in range(2))
    more = [PageKey(1), DraftKey(2, 4), StepKey(4, 2, 4, SamplingMode("sampled", "block", structured=True))]
    first.runner.compile(more)
    told = answer(first)
    assert sum(told[1]) > 4
    compilations.clear()
    second.runner.compile(more)
    assert not compilations
    assert answer(second) == told
    assert local_runner(second).programs.kept.compiled == 0


# Facts: everything that may make another program makes another digest.


Facts = dict[str, str]


def named(**config: Any) -> Facts:
    sizes = engine_config(**config)
    return of(decoding_of(SMALL, sizes, backend_of(sizes)))


def of(decoding: Decoding | None = None, specs: Any = SPECS) -> Facts:
    return facts.named(jax.devices()[:1], decoding=decoding, weights=specs)


def test_a_digest_does_not_depend_on_the_order_of_imports(monkeypatch):
    """A package has its modules in the order of their imports; a first process may convert a file before."""
    before, package = of(), sys.modules["mtp_jax.model"]
    first = next(name for name, value in vars(package).items() if isinstance(value, ModuleType))
    module = getattr(package, first)
    monkeypatch.delattr(package, first)
    monkeypatch.setattr(package, first, module, raising=False)
    assert [*vars(package)][-1] == first
    assert of() == before


def test_facts_are_the_same_twice():
    assert named() == named()


def other_dtype(patch: pytest.MonkeyPatch) -> Facts:
    wide = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), SPECS)
    return of(decoding_of(SMALL, sizes := engine_config(), backend_of(sizes)), wide)


def other_shape(patch: pytest.MonkeyPatch) -> Facts:
    own = replace(SPECS, embed=jax.ShapeDtypeStruct((SPECS.embed.shape[0] + 1, 32), jnp.float32))
    return of(decoding_of(SMALL, sizes := engine_config(), backend_of(sizes)), own)


def other_option(patch: pytest.MonkeyPatch) -> Facts:
    return named(suffix_drafts=True)


def other_config(patch: pytest.MonkeyPatch) -> Facts:
    sizes, own = engine_config(), replace(SMALL, rms_norm_eps=1e-3)
    return of(decoding_of(own, sizes, backend_of(sizes)))


def other_version(patch: pytest.MonkeyPatch) -> Facts:
    patch.setattr(jax, "__version__", "0.99")
    return named()


def other_flags(patch: pytest.MonkeyPatch) -> Facts:
    patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=true")
    return named()


def other_precision(patch: pytest.MonkeyPatch) -> Facts:
    with jax.default_matmul_precision("highest"):
        return named()


def other_processor(patch: pytest.MonkeyPatch) -> Facts:
    patch.setattr(platform, "machine", lambda: "another")
    return named()


def other_source(patch: pytest.MonkeyPatch) -> Facts:
    read = Path.read_bytes
    patch.setattr(Path, "read_bytes", lambda self: read(self) + b" " * (self.name == "trunk.py"))
    facts._source.cache_clear()
    found = named()
    facts._source.cache_clear()
    return found


def other_constant(patch: pytest.MonkeyPatch) -> Facts:
    patch.setattr(moe, "_TILES", (16, 128))
    return named()


def other_method(patch: pytest.MonkeyPatch) -> Facts:
    patch.setattr(CpuProducts, "norm", CpuProducts.add)
    return named()


# The names under which a user hears of them.
OTHERS = {
    other_config: "decoding.model.cfg.rms_norm_eps",
    other_constant: "constants",
    other_dtype: "weights.embed",
    other_flags: "XLA_FLAGS",
    other_method: "constants",
    other_option: "decoding.drafter",
    other_precision: "jax_default_matmul_precision",
    other_processor: "jaxlib, processor and cores",
    other_shape: "weights.embed",
    other_source: "source of mtp-jax",
    other_version: "jax",
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_fact_makes_another_digest_and_has_a_name(monkeypatch, tmp_path, other):
    there, here = named(), other(monkeypatch)
    assert {name for name in {**there, **here} if there.get(name) != here.get(name)} >= {OTHERS[other]}
    with pytest.raises(ConfigError, match=f"do not fit this process: .*{OTHERS[other]}"):
        Manifest(there, {}, {}).check_facts(tmp_path, here)
    Manifest(there, {}, {}).check_facts(tmp_path, there)


def test_keys_that_differ_in_nothing_but_their_mode_have_other_digests():
    """The name of a program does not say all of it."""
    keys = [StepKey(1, 2, 4, SamplingMode("sampled", verifier)) for verifier in ("block", "coupled")]
    assert len({facts.digest("", "step", key) for key in keys}) == 2


def test_values_that_look_alike_have_other_digests():
    alike = [
        1,
        True,
        1.0,
        "1",
        b"1",
        (1,),
        [1],
        ("1",),
        frozenset({1}),
        {1: ()},
        ((1, ()),),
        None,
        "None",
        (),
    ]
    alike += [
        ("ab", "c"),
        ("a", "bc"),
        np.int32(1),
        np.float32(1),
        np.ones(1),
        jax.ShapeDtypeStruct((1,), int),
    ]
    assert len({facts.digest(value) for value in alike}) == len(alike)


def test_functions_whose_source_nothing_names_are_refused(monkeypatch):
    for outside in (answer, lambda: 1, Outside(), np.random.default_rng(1)):
        with pytest.raises(facts.Unknown):
            facts.digest(outside)
    monkeypatch.setattr(moe, "moved", answer, raising=False)
    with pytest.raises(facts.Unknown, match="test_kept"):
        named()


class Outside:
    """An object of a class that the digest does not know."""


def test_a_process_whose_source_was_written_since_it_began_has_no_digest(monkeypatch):
    monkeypatch.setattr(facts, "_began", lambda: 0.0)
    with pytest.raises(facts.Unknown, match="since this process began"):
        named()


def test_the_digest_holds_the_source_of_all_that_traces():
    tracing = [(n, source) for n, source in modules("mtp_jax").items() if n.split(".")[1] in facts.TRACING]
    assert len(tracing) > 100
    for name, source in tracing:
        used = {i.split(".")[1] for i in imports(name, source) if i.startswith("mtp_jax.")}
        assert used <= facts.TRACING, name


# Files. The program is the one that was asked for, whatever a file holds.


def lowered(factor: int) -> Callable[[], jax.stages.Compiled]:
    return lambda: jax.jit(lambda x: x * factor).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()


def product(kept: KeptPrograms, factor: int) -> float:
    return float(kept.get("product", factor, lowered(factor))(jnp.ones(3))[0])


def damaged(data: bytes, other: bytes) -> list[bytes]:
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    return [b"", data[:9], data[:-1], data + b"1", flipped, other, b"foreign" * 99]


def test_a_file_that_is_damaged_or_of_another_program_is_written_anew_and_said_once(tmp_path, caplog):
    assert product(KeptPrograms(tmp_path), 2) == 2
    (path,) = tmp_path.iterdir()
    assert product(KeptPrograms(tmp_path), 3) == 3
    (other,) = {*tmp_path.iterdir()} - {path}
    whole = path.read_bytes()
    for data in damaged(whole, other.read_bytes()):
        assert data != whole
        path.write_bytes(data)
        kept = KeptPrograms(tmp_path)
        caplog.clear()
        assert product(kept, 2) == 2
        assert (kept.loaded, kept.compiled) == (0, 1)
        assert [path.name in told for told in caplog.messages] == [True]
        assert product(KeptPrograms(tmp_path), 2) == 2
    path.write_bytes(b"")
    other.write_bytes(b"")
    kept = KeptPrograms(tmp_path)
    caplog.clear()
    assert (product(kept, 2), product(kept, 3)) == (2, 3)
    assert len(caplog.messages) == 1


def test_a_kept_program_is_never_one_that_jaxs_cache_has_loaded(tmp_path, monkeypatch):
    """XLA would serialise it without its code."""
    option, seen = "jax_enable_compilation_cache", []
    before, make = jax.config.values[option], lowered(5)

    def compile() -> jax.stages.Compiled:
        seen.append(jax.config.values[option])
        return make()

    KeptPrograms(tmp_path).get("product", 5, compile)
    assert seen == [False]
    assert jax.config.values[option] == before


def test_a_folder_that_cannot_be_written_costs_the_keeping_alone(tmp_path):
    kept = KeptPrograms(tmp_path / "nowhere")
    assert product(kept, 2) == product(kept, 2) == 2
    assert kept.compiled == 2
