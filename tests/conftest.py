"""Settings for every test: eight CPU devices, checked shapes, and programs compiled fast and kept."""

import gc
import os
import sys
import zlib
from collections.abc import Generator, Iterator

import numpy as np
import pytest
from hypothesis import settings

from tests import compiling, shapes
from tests.cpu_time import CpuTime

# The float32 comparisons hold on the CPU; `make test-gpu` asks for a GPU. Set before jax is imported, and in
# the environment, so that programs started by tests follow.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# No test asks a hub, nor reads a user's cache of one.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"}
# Other workers, and programs that tests start, would compile every module again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--optimised", action="store_true", help="compile programs as they are for users")
    parser.addoption(
        "--lower-cpu-budget", action="store_true", help="write tests/cpu_budget.toml with less CPU time"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("optimised"):
        compiling.compile_fast()
        compiling.share_contexts()
        config.pluginmanager.register(CpuTime(config))
    # How long an example takes depends on what else the computer does. All runs but the nightly one have the
    # same examples.
    settings.register_profile("suite", deadline=None, derandomize=not config.getoption("optimised"))
    settings.load_profile("suite")
    import jax

    from mtp_jax.machine import program_folder

    shapes.install()
    shapes.check_in("")  # nothing is checked while tests are collected
    # Traces are many objects that live long: looking through all of them again and again finds nothing.
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)
    # For the sharding tests. Programs on one device run as fast with eight virtual devices as with one.
    jax.config.update("jax_num_cpu_devices", 8)
    if cache := getattr(config, "cache", None):  # unless -p no:cacheprovider
        os.environ["HOME"] = str(cache.mkdir("home"))  # where models keep their programs
        jax.config.update("jax_compilation_cache_dir", str(cache.mkdir("jax") / program_folder()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo and compiling.lacks_float16(call.excinfo.value):
        report.outcome, place = "skipped", item.reportinfo()
        report.longrepr = (str(place[0]), (place[1] or 0) + 1, f"Skipped: {compiling.NEEDS_FLOAT16}")
    return report


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random data of one test, seeded by its id: the same in any order of the tests."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="module", autouse=True)
def _shapes(request: pytest.FixtureRequest) -> None:
    room = request.path.relative_to(request.config.rootpath / "tests").parent.as_posix()
    shapes.check_in(shapes.ROOMS[0] if request.config.getoption("optimised") else room)


@pytest.fixture(scope="module")
def shared_programs() -> Iterator[None]:
    """``tests.models.sharing_programs``, for modules whose engines are alike."""
    from tests.models import sharing_programs

    with sharing_programs():
        yield


@pytest.fixture(scope="module", autouse=True)
def _few_programs() -> Iterator[None]:
    """Forget compiled programs before they are too many for one process.

    Servers collect garbage after every program that they compile. What earlier modules have left, which is
    much and lives, is not looked through each time.
    """
    yield
    from mtp_jax.api.memory import room_for_programs

    if not room_for_programs(0.5):
        import jax

        from tests import models

        models.forget_programs()
        jax.clear_caches()
        gc.unfreeze()
    gc.collect()
    gc.freeze()
