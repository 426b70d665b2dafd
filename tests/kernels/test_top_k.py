"""The best scores: XLA's sort is the oracle, what the interpreter finds, ties above all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.check.cases.top_k import TopKShape, case, shapes
from kernels_pallas.mosaic import ordered
from kernels_pallas.router import mosaic_gpu as router
from kernels_pallas.top_k import api, mosaic_gpu, reference
from tests.kernels.interpreter import interpret, needs_interpreter, notices, without


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
        got = jax.jit(reference.top_k, static_argnums=1)(scores, count)
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
    numbers = np.asarray(jax.jit(ordered)(rising))
    assert (np.diff(numbers.astype(np.int64)) > 0).all()
    assert numbers[0].astype(np.int64) + 2**31 + 1 == mosaic_gpu._LEAST
    assert numbers[0] == router._DROPPED > router._TAKEN
    x = np.random.default_rng(0).integers(-(2**31), 2**31, 200).astype(np.int32)
    np.testing.assert_array_equal(jax.jit(mosaic_gpu._set_bits)(x), np.bitwise_count(x.view(np.uint32)))


def test_other_scores_than_float32_are_refused():
    with pytest.raises(ValueError, match="scores in bfloat16, must be float32"):
        api.top_k(jnp.zeros((1, 64), jnp.bfloat16), 2, implementation="mosaic_gpu")


def test_more_scores_than_halves_of_words_count_are_refused():
    with pytest.raises(ValueError, match="2080769 scores, at most 2080768; use 'xla'"):
        api.check(jax.ShapeDtypeStruct((1, mosaic_gpu.MOST + 1), jnp.float32))


def eight_small_blocks(monkeypatch, held):
    """A case of a cluster of eight thread blocks of a warpgroup each; the interpreter has few threads."""
    monkeypatch.setattr(mosaic_gpu, "READERS", 1)
    monkeypatch.setattr(mosaic_gpu, "HELD", held)
    shape = TopKShape(1, 10240, 2048, values=300)
    assert mosaic_gpu.cluster(shape.tokens, shape.entries // mosaic_gpu.CHUNK) == 8
    return case("cluster", shape)


@needs_interpreter
@pytest.mark.parametrize("held", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_eight_thread_blocks_choose_what_a_sort_does_without_races(monkeypatch, held):
    """Scores in registers, and scores that are read again each time."""
    run = interpret(eight_small_blocks(monkeypatch, held))
    assert not run.races
    assert run.distance == 0


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 8])
def test_a_missing_wait_is_noticed(monkeypatch, capfd, blocks):
    without(monkeypatch, "barrier_wait", "exchange")
    assert notices(
        case("mutant", shapes()["small-ties"]) if blocks == 1 else eight_small_blocks(monkeypatch, 2)
    )
    capfd.readouterr()  # every race is printed


@pytest.mark.parametrize(
    ("tokens", "scores", "blocks"),
    [(4, 131072, 8), (4, 163840, 8), (4, 32768, 2), (160, 12288, 1), (160, 131072, 4), (2048, 32768, 1)],
)
def test_a_tokens_scores_are_read_once(tokens, scores, blocks):
    chunks = scores // mosaic_gpu.CHUNK
    assert mosaic_gpu.cluster(tokens, chunks) == blocks
    assert chunks <= blocks * mosaic_gpu.READERS * mosaic_gpu.HELD


@needs_interpreter
@pytest.mark.slow
def test_another_choice_among_equals_is_noticed(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "_set_bits", lambda x: x * 0)
    assert notices(case("mutant", shapes()["small-ties"]))
