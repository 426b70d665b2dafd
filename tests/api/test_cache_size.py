"""A share of the device's memory sizes the cache: what weights and programs leave of it, and no more."""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_jax import LLM, ConfigError, SamplingParams, machine
from mtp_jax.api import cache_size
from mtp_jax.api.cache_size import POOL, sized
from mtp_jax.api.local import backend_of, decoding_of, local_runner
from mtp_jax.api.options import LLMOptions
from mtp_jax.commands.cli import make_parser
from mtp_jax.commands.options import llm_options, reporter
from mtp_jax.machine import memory_size
from mtp_jax.model.sharding import make_mesh
from tests.golden import model_dir
from tests.models import TINY, engine_config, runner_of, tiny_params

GIB = 2**30
CONFIG = replace(engine_config(), num_pages=None, memory_fraction=0.5)


@pytest.fixture
def device(monkeypatch):
    """A device of 1 GiB, of which 100 MiB are in use; programs need 50 MiB."""
    monkeypatch.setattr(cache_size, "_memory", lambda mesh, fraction: (GIB, 100 * 2**20))
    monkeypatch.setattr(cache_size, "_programs", lambda runner, config, structured: 50.0 * 2**20)


@pytest.mark.parametrize("mesh", [None, (2, 1), (1, 2)])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_the_cache_takes_what_is_left_and_no_more(device, mesh, kv_cache_dtype):
    devices = mesh and make_mesh(*mesh)
    given = replace(CONFIG, kv_cache_dtype=kv_cache_dtype)
    config, room = sized(decoding_of(TINY, given, backend_of(given, devices)), tiny_params(), given, True)
    assert (config.memory_fraction, room.total, room.fraction) == (None, GIB, 0.5)
    runner = runner_of(TINY, tiny_params(), replace(config, num_pages=10), devices)
    page, small = runner.page_bytes, cache_size.state_bytes(runner)
    assert config.num_pages is not None
    # The state with all its pages, as this one has ten: within the share, and not a page more would be.
    state = small + (config.num_pages - 10) * page
    left = GIB / 2 - 150 * 2**20
    assert left - page < state <= left


def test_a_share_without_room_for_a_page_is_refused(device):
    given = replace(CONFIG, memory_fraction=0.14)
    with pytest.raises(ConfigError, match=r"0\.14 of 1\.0 GiB, less 0\.1 in use and 0\.0 for programs"):
        sized(decoding_of(TINY, given, backend_of(given)), tiny_params(), given, True)


class Gpu:
    device_kind = "a GPU"

    def __init__(self, stats: dict[str, int] | None) -> None:
        self.memory_stats = lambda: stats


@pytest.mark.parametrize(
    ("fraction", "share", "total"),
    [(0.5, None, 80 * GIB), (0.9, "0.9", 80 * GIB), (0.6, "0.6", 120 * GIB)],
)
def test_the_memory_of_a_gpu_is_more_than_jax_may_take(monkeypatch, fraction, share, total):
    """JAX knows a limit, which is a share of the whole."""
    limit = round(total * float(share or 0.75))
    fuller, emptier = ({"bytes_limit": limit, "bytes_in_use": used} for used in (7, 3))
    monkeypatch.setattr(cache_size, "platform", lambda: "gpu")
    mesh: Any = SimpleNamespace(local_devices=[Gpu(emptier), Gpu(fuller)])
    monkeypatch.delenv(POOL, raising=False)
    if share:
        monkeypatch.setenv(POOL, share)
    assert cache_size._memory(mesh, fraction) == (pytest.approx(total, abs=2), 7)


def test_a_gpu_of_which_jax_may_take_less_is_refused(monkeypatch):
    monkeypatch.setattr(cache_size, "platform", lambda: "gpu")
    monkeypatch.delenv(POOL, raising=False)
    mesh: Any = SimpleNamespace(local_devices=[Gpu({"bytes_limit": 60 * GIB, "bytes_in_use": 0})])
    with pytest.raises(ConfigError, match=f"JAX takes 0.75 of a GPU's memory; set {POOL}=0.9"):
        cache_size._memory(mesh, 0.9)
    mesh = SimpleNamespace(local_devices=[Gpu(None)])
    with pytest.raises(ConfigError, match="does not say how much memory it has; give num_pages"):
        cache_size._memory(mesh, 0.5)


def test_the_command_line_lets_jax_take_that_share(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop(POOL, None)
    args = make_parser().parse_args(["generate", "-q", "-p", "x", "--memory-fraction", "0.8"])
    assert llm_options(args, reporter(args), 1)["memory_fraction"] == 0.8
    assert os.environ[POOL] == "0.8"


def test_what_excludes_it():
    with pytest.raises(ConfigError, match=r"memory_fraction = 0\.5 with num_pages = 8: both say"):
        LLMOptions(memory_fraction=0.5, num_pages=8)
    with pytest.raises(ConfigError, match="memory_fraction = 2; expected"):
        LLMOptions(memory_fraction=2)
    with pytest.raises(ConfigError, match=r"= 0.5 with simulate = \(0.5,\): a simulated model"):
        LLMOptions(memory_fraction=0.5, simulate=(0.5,))
    group: Any = object()
    with pytest.raises(ConfigError, match=r"with group = <object .*>: caches of several hosts must"):
        LLMOptions(memory_fraction=0.5, group=group)


def test_a_computers_memory_is_that_of_its_container(monkeypatch, tmp_path):
    whole = memory_size()
    for text, wanted in (("max\n", whole), ("1048576\n", 1048576), (f"{2**62}\n", whole)):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(machine, "_LIMITS", (str(tmp_path / "memory.max"), str(tmp_path / "none")))
        assert memory_size() == min(wanted, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


@pytest.mark.slow
def test_an_engine_runs_in_its_share():
    share = 2 * GIB / memory_size()
    llm = LLM(model_dir("rigged"), max_num_seqs=2, max_model_len=96, page_size=16, memory_fraction=share)
    assert llm.room is not None
    assert llm.room.programs > 0
    assert (
        llm.engine.pages == llm.engine.config.num_pages == llm.room.holds(local_runner(llm.engine).page_bytes)
    )
    (output,) = llm.generate([[3, 1, 4]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert output.speculation.accepted > 0
