"""The best scores: XLA's sort is the oracle, what the interpreter finds, ties above all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.checking.registry import cases
from kernels_pallas.mosaic import ordered
from kernels_pallas.router import mosaic_gpu as router
from kernels_pallas.top_k import api, mosaic_gpu, reference
from kernels_pallas.top_k.cases import case, shapes
from tests.kernels.interpreter import interpret, notices, without

CASES = {c.name.split("/")[1]: c for c in cases("top_k/") if c.small}
FAST = "small-ties"
needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="Pallas interprets this kernel from jax 0.11 on"
)


def chosen(row: np.ndarray, count: int) -> list[int]:
    """By Python's sort, which keeps the order of equals; 0.0 is more than -0.0."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], np.signbit(row[i])))
    best = sorted(i for i in order[:count] if row[i] > -np.inf)
    return [-1] * (count - len(best)) + best


@pytest.mark.parametrize("values", [1, 2, 7, 1000])
def test_the_reference_is_a_plain_sort(values):
    rng = np.random.default_rng(values)
    scores = (rng.integers(0, values, size=(6, 90)) - values // 2).astype(np.float32)
    scores[rng.random(scores.shape) < 0.3] *= -1
    scores[0, 12:], scores[1, 5:40], scores[2, ::3] = -np.inf, np.inf, -0.0
    for count in (1, 20, 90):
        got = reference.top_k(jnp.asarray(scores), count)
        np.testing.assert_array_equal(got, [chosen(row, count) for row in scores])


@pytest.mark.parametrize("share", [0, 0.02, 0.5, 1])
def test_bits_become_numbers_in_order(share):
    rng = np.random.default_rng(5)
    bits = rng.random((3, 256)) < share
    count = int(bits.sum(axis=1).max()) + 7
    words = (bits.reshape(3, -1, 32) << np.arange(32, dtype=np.uint32)).sum(axis=-1).astype(np.uint32)
    before = np.cumsum(bits.reshape(3, -1, 32).sum(axis=-1), axis=1)
    before = np.concatenate([np.zeros((3, 1)), before[:, :-1]], axis=1).astype(np.int32)
    nothing = np.full((3, -(-count // 128) * 128), -1, np.int32)
    got = jax.jit(api.entries, static_argnums=3)(words.view(np.int32), before, nothing, count)
    for row, numbers in zip(bits, got, strict=True):
        want = np.flatnonzero(row)
        np.testing.assert_array_equal(numbers, [-1] * (count - len(want)) + want.tolist())


def test_integers_are_in_the_order_of_floats():
    rising = np.array([-np.inf, -3e38, -1.5, -1e-45, -0.0, 0.0, 1e-45, 1.5, 3e38, np.inf], np.float32)
    numbers = np.asarray(ordered(jnp.asarray(rising)))
    assert (np.diff(numbers.astype(np.int64)) > 0).all()
    assert numbers[0] + 1 == mosaic_gpu._LEAST
    assert numbers[0] == router._DROPPED > router._TAKEN
    x = jnp.asarray(np.random.default_rng(0).integers(-(2**31), 2**31, 200), jnp.int32)
    np.testing.assert_array_equal(mosaic_gpu._set_bits(x), jax.lax.population_count(x))


def test_other_scores_than_float32_are_refused():
    with pytest.raises(ValueError, match="scores in bfloat16, must be float32"):
        api.top_k(jnp.zeros((1, 64), jnp.bfloat16), 2, implementation="mosaic_gpu")


@needs_interpreter
@pytest.mark.parametrize("name", [n if n == FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_kernel_chooses_what_a_sort_does_without_races(name):
    run = interpret(CASES[name])
    assert not run.races
    assert run.distance == 0


@needs_interpreter
@pytest.mark.slow
def test_a_missing_wait_is_noticed(monkeypatch, capfd):
    without(monkeypatch, "barrier_wait", "exchange")
    assert notices(case("mutant", shapes()["small-ties"]))
    capfd.readouterr()  # every race is printed


@needs_interpreter
@pytest.mark.slow
def test_another_choice_among_equals_is_noticed(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "_set_bits", lambda x: x * 0)
    assert notices(case("mutant", shapes()["small-ties"]))
