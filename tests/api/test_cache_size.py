"""A share of the device's memory sizes the cache: what weights and programs leave of it, and no more."""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from kernels_pallas.absent import memory_of
from mtp_jax import LLM, ConfigError, SamplingParams, machine
from mtp_jax.api import cache_size
from mtp_jax.api.cache_size import POOL, sized
from mtp_jax.api.local import backend_of, decoding_of, local_runner
from mtp_jax.api.options import LLMOptions
from mtp_jax.commands.cli import make_parser
from mtp_jax.commands.options import llm_options, reporter
from mtp_jax.decode.manifest import Manifest
from mtp_jax.engine.defaults import LONG, slots
from mtp_jax.engine.pages import MOST_PAGES
from mtp_jax.machine import memory_size
from mtp_jax.model.narrow import nbytes
from mtp_jax.model.room import Room
from mtp_jax.model.sharding import make_mesh
from tests.golden import model_dir
from tests.models import TINY, engine_config, on_mesh, runner_of, tiny_params

GIB = 2**30
CONFIG = replace(engine_config(), num_pages=None, memory_fraction=0.5)


@pytest.fixture
def device(monkeypatch):
    """A device of 1 GiB, of which 100 MiB are in use; programs need 50 MiB."""
    room = Room(GIB, 0.5, 100 * 2**20, 0.0)
    monkeypatch.setattr(cache_size, "_memory", lambda mesh, fraction, asked: replace(room, fraction=fraction))
    monkeypatch.setattr(cache_size, "_programs", lambda runner, config, structured: 50.0 * 2**20)


@pytest.mark.parametrize("mesh", [None, (2, 1), (1, 2)])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_the_cache_takes_what_is_left_and_no_more(device, mesh, kv_cache_dtype):
    devices = mesh and make_mesh(*mesh)
    given = replace(CONFIG, kv_cache_dtype=kv_cache_dtype)
    decoding = decoding_of(TINY, given, backend_of(given, devices))
    config, size = sized(decoding, tiny_params(), given, given, True)
    assert (config.memory_fraction, size.room and size.room.fraction) == (None, 0.5)
    assert f"{config.num_pages:,} pages of 16 tokens (0.5 of 1.0 GiB, less " in size.why
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
        sized(decoding_of(TINY, given, backend_of(given)), tiny_params(), given, given, True)


def test_a_gpus_slots_and_length_follow_its_memory(device, monkeypatch):
    """The least memory of all hosts decides."""
    monkeypatch.setattr(cache_size, "platform", lambda: "gpu")
    monkeypatch.setattr(cache_size, "OVERHEAD", 0.0)
    given = replace(CONFIG, prefill_chunk=LONG, max_model_len=10**6)
    decoding = decoding_of(TINY, given, backend_of(given))
    asked: list[int] = []

    def least(mine: int) -> int:
        asked.append(mine)
        return mine // 2

    config, _ = sized(decoding, tiny_params(), given, LLMOptions(), True, least)
    assert config.max_num_seqs == slots(given, asked[0] // 2, 1) > 8
    assert config.max_model_len == given.held(asked[0] // 2) < 10**6
    assert config.num_pages == asked[1] // 2
    # Slots take memory, too: of which the first estimate knows nothing.
    assert 0.8 * asked[0] < asked[1] < asked[0]
    kept, _ = sized(decoding, tiny_params(), given, given, True)
    assert (kept.max_num_seqs, kept.max_model_len) == (given.max_num_seqs, 10**6)


@pytest.mark.parametrize("mesh", [None, (1, 2)])
def test_pages_of_an_absent_card_follow_its_description(mesh, monkeypatch):
    """Nothing is measured there: programs get an allowance, and weights take a device's part."""
    for name in ("_memory", "_programs", "allocatable"):
        monkeypatch.setattr(cache_size, name, None)
    card: Any = SimpleNamespace(devices=np.array(SimpleNamespace(device_kind="NVIDIA H200")))
    devices, params, total = mesh and make_mesh(*mesh), tiny_params(), memory_of(card)
    params = params if devices is None else on_mesh(params, devices)
    decoding = decoding_of(TINY, CONFIG, backend_of(CONFIG, devices))
    config, size = sized(decoding, params, CONFIG, CONFIG, True, card=total)
    assert size.room is not None
    assert (size.room.total, size.room.programs) == (151397597184, cache_size.OVERHEAD)
    assert config.num_pages == min(size.room.holds(cache_size._page_bytes(decoding, CONFIG)), MOST_PAGES)
    assert cache_size._bytes_on_device(params) <= nbytes(params)
    assert (cache_size._bytes_on_device(params) < 0.75 * nbytes(params)) == (mesh is not None)


def test_a_processors_pages_are_in_half_of_its_memory(monkeypatch):
    given = replace(CONFIG, memory_fraction=None, max_num_seqs=2, max_model_len=10**6)
    decoding, params, options = decoding_of(TINY, given, backend_of(given)), tiny_params(), LLMOptions()
    page = cache_size._page_bytes(decoding, given)
    monkeypatch.setattr(cache_size, "memory_size", lambda: 2 * 5000 * page + nbytes(params))
    config, size = sized(decoding, params, given, options, True)
    assert (config.num_pages, config.max_model_len, size.room) == (5000, given.held(5000), None)
    assert sized(decoding, params, given, options, True, lambda mine: mine - 1)[0].num_pages == 4999


class Gpu:
    device_kind = "a GPU"

    def __init__(self, stats: dict[str, int] | None) -> None:
        self.memory_stats = lambda: stats


def _mesh(monkeypatch: pytest.MonkeyPatch, *stats: dict[str, int] | None) -> Any:
    """A mesh of all GPUs of this process, one for each of the stats."""
    gpus = [Gpu(each) for each in stats]
    monkeypatch.setattr(jax, "local_devices", lambda: gpus)
    return SimpleNamespace(local_devices=gpus)


@pytest.mark.parametrize(
    ("fraction", "share", "total"),
    [(0.5, None, 80 * GIB), (0.9, "0.9", 80 * GIB), (0.6, "0.6", 120 * GIB)],
)
def test_the_memory_of_a_gpu_is_more_than_jax_may_take(monkeypatch, fraction, share, total):
    """JAX knows a limit, which is a share of the whole."""
    limit = round(total * float(share or 0.75))
    fuller, emptier = ({"bytes_limit": limit, "bytes_in_use": used} for used in (7, 3))
    monkeypatch.setattr(cache_size, "platform", lambda: "gpu")
    mesh = _mesh(monkeypatch, emptier, fuller)
    monkeypatch.delenv(POOL, raising=False)
    if share:
        monkeypatch.setenv(POOL, share)
    asked = cache_size._memory(mesh, fraction, True)
    assert asked is not None
    assert abs(asked.total - total) <= 2
    assert asked == Room(asked.total, fraction, 7, 0.0)
    # Unless it was asked for, a share is what JAX takes at most.
    found = cache_size._memory(mesh, 0.94, False)
    assert found is not None
    assert found.fraction == float(share or 0.75)


def test_a_gpu_of_which_jax_may_take_less_is_refused(monkeypatch):
    monkeypatch.setattr(cache_size, "platform", lambda: "gpu")
    monkeypatch.delenv(POOL, raising=False)
    mesh = _mesh(monkeypatch, {"bytes_limit": 60 * GIB, "bytes_in_use": 0})
    with pytest.raises(ConfigError, match=f"JAX takes 0.75 of a GPU's memory; set {POOL}=0.9"):
        cache_size._memory(mesh, 0.9, True)
    mesh = _mesh(monkeypatch, None)
    with pytest.raises(ConfigError, match="does not say how much memory it has; give num_pages"):
        cache_size._memory(mesh, 0.5, True)
    assert cache_size._memory(mesh, 0.5, False) is None


def test_the_command_line_lets_jax_take_that_share(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop(POOL, None)
    args = make_parser().parse_args(["generate", "-q", "-p", "x", "--memory-fraction", "0.8"])
    assert llm_options(args, reporter(args), 1)["memory_fraction"] == 0.8
    assert os.environ[POOL] == "0.8"
    folder = tmp_path / "programs"
    folder.mkdir()
    Manifest({}, {"num_pages": 9}, {}).write(folder)  # for which that share of the memory had room
    asked = ([], "0.94"), (["--num-pages", "9"], None), (["--programs", str(folder)], "0.94")
    for given, share in asked:
        os.environ.pop(POOL, None)
        args = make_parser().parse_args(["generate", "-q", "-p", "x", *given])
        llm_options(args, reporter(args), 1)
        assert os.environ.get(POOL) == share


def test_what_excludes_it():
    with pytest.raises(ConfigError, match=r"memory_fraction = 0\.5 with num_pages = 8: both say"):
        LLMOptions(memory_fraction=0.5, num_pages=8)
    with pytest.raises(ConfigError, match="memory_fraction = 2; expected"):
        LLMOptions(memory_fraction=2)
    with pytest.raises(ConfigError, match=r"= 0.5 with simulate = \(0.5,\): a simulated model"):
        LLMOptions(memory_fraction=0.5, simulate=(0.5,))


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
    assert llm.size.room is not None
    assert llm.size.room.programs > 0
    assert (
        llm.engine.pages
        == llm.engine.config.num_pages
        == llm.size.room.holds(local_runner(llm.engine).page_bytes)
    )
    (output,) = llm.generate([[3, 1, 4]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert output.speculation.accepted > 0
