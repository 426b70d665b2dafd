"""A server's programs for TPUs keep within their budget, and the counts see the faults that they are for."""

import subprocess
import sys
import tomllib
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tests.kernels.compile_server import BUDGET, Counts, over
from tests.layers import ROOT

CASES = tomllib.loads(BUDGET.read_text(encoding="utf-8"))


def counts(f, *shapes, donate=(0,), least=None, **options) -> Counts:
    return Counts.of(jax.jit(f, donate_argnums=donate, **options).lower(*shapes).compile(), least)


def test_a_cache_that_is_copied_or_strewn_is_counted():
    cache = jax.ShapeDtypeStruct((4, 8, 2), jnp.float32)
    in_place = counts(lambda a: a.at[0].set(1.0), cache, least=cache.size * 4)
    assert (in_place.moved, in_place.strewn, in_place.collectives) == (0, 0, 0)
    assert in_place.read > 0
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        assert counts(lambda a: jnp.repeat(a, 2, 1) * 2, cache).moved == 1
    pages_inside = Format(Layout((1, 2, 0)), SingleDeviceSharding(jax.devices()[0]))
    strewn = jax.ShapeDtypeStruct(cache.shape, cache.dtype, sharding=pages_inside)
    assert counts(lambda a: a + 1, strewn, out_shardings=pages_inside).strewn == 1


def test_collectives_are_counted():
    split = NamedSharding(Mesh(jax.devices()[:2], ("data",)), PartitionSpec("data"))
    rows = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=split)
    assert counts(lambda a: a.sum(), rows, donate=()).collectives == 1


def test_a_count_above_its_budget_is_a_fault():
    assert over("here", "moved", 0, {"moved": 0}) == []
    assert over("here", "moved", 1, {"moved": 0}) == ["here: moved 1, at most 0"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'")
@pytest.mark.parametrize("case", CASES)
def test_every_program_keeps_within_its_budget(case):
    """Compiled in another process, which lacks the options of XLA that this suite sets."""
    run = [sys.executable, "-m", "tests.kernels.compile_server", case]
    found = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
