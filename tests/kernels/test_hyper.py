"""Kernels of hyper-connections: oracles, and the streams that a backend with kernels makes by them."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.check.cases.hyper import RULE, EnterShape, ProjectShape, case
from kernels_pallas.hyper import api
from kernels_pallas.hyper.rule import STREAMS, InputForms
from mtp_jax.model import hyper
from mtp_jax.model.config_parts import HyperConfig
from mtp_jax.model.narrow import Fp8
from mtp_jax.model.params import Hyper, HyperHead
from mtp_jax.model.products.hopper import HopperProducts
from mtp_jax.model.products.plain import Products, Reader
from mtp_jax.model.products.stream import Parts, PendingStreams
from tests.kernels.interpreter import distance, rounded
from tests.kernels.rigged import config

WIDTH = 1024
CFG = replace(config(), hyper=HyperConfig(STREAMS, RULE.iterations, RULE.eps))


def given(shape: Any) -> Any:
    return jax.jit(case("", shape).inputs)(jax.random.key(1))


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("shape", [ProjectShape(3, 256, (2, 0), padding=1), ProjectShape(2, 256)])
def test_streams_and_products_equal_float64(shape):
    streams, results, gates, weight = given(shape)
    x, expected = wide(streams), []
    if gates is not None:
        result = sum(wide(r)[:, : shape.tokens].sum(axis=0) for r in results)
        x = np.stack(
            [
                sum(wide(gates.mix)[:, j, k, None, None] * x[:, j] for j in range(STREAMS))
                + wide(gates.out)[:, k, None, None] * result
                for k in range(STREAMS)
            ],
            axis=1,
        )
        expected = [x]
    products = np.sum(x[:, None] * wide(weight), axis=-1)
    expected += [products.reshape(*products.shape[:2], -1), np.sum(x * x, axis=-1).reshape(len(x), -1)]
    found = jax.jit(case("", shape).reference)(streams, results, gates, weight)
    for got, want in zip(found, expected, strict=True):
        assert distance(got, want) < rounded(2)  # the sublayer's result, and the new streams


def balanced(scores: np.ndarray) -> np.ndarray:
    """Section 4.2, eqs. 8 and 9: softmax of rows, then columns and rows by turns."""
    mix = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mix = mix / mix.sum(axis=-1, keepdims=True) + RULE.eps
    for turn in range(2 * RULE.iterations - 1):
        mix = mix / (mix.sum(axis=-1 - (turn + 1) % 2, keepdims=True) + RULE.eps)
    return mix


@pytest.mark.parametrize("parts", [1, 32])
def test_gates_and_input_equal_float64(parts):
    streams, projected, p = given(EnterShape(5, 512, parts=parts))
    run = partial(api.enter, rule=RULE, wanted=InputForms(total=True, plain=True), implementation="xla")
    got = jax.jit(run)(streams, projected, p)
    x, (first, second, third) = wide(streams), wide(p.scale)
    root = np.sqrt(wide(projected.squares).sum(axis=-1, keepdims=True) / x[0].size + RULE.norm_eps)
    found = wide(projected.parts).sum(axis=-1) / root
    a, b, c = np.split(found, [STREAMS, 2 * STREAMS], axis=-1)
    base_a, base_b, base_c = np.split(wide(p.base), [STREAMS, 2 * STREAMS])
    into = 1 / (1 + np.exp(-(a * first + base_a))) + RULE.eps
    total = (into[..., None] * x).sum(axis=1)
    mix = balanced((c * third + base_c).reshape(-1, STREAMS, STREAMS))
    assert distance(got.total, total) < rounded(1)
    plain = total / np.sqrt((total**2).mean(axis=-1, keepdims=True) + RULE.norm_eps) * wide(p.norm)
    assert distance(got.plain, plain) < rounded(2)
    # Sums of products, and of each of the turns: an addition of four, a division and a product.
    assert distance(got.gates.out, 2 / (1 + np.exp(-(b * second + base_b)))) < rounded(64, np.float32)
    assert distance(got.gates.mix, mix) < rounded(6 * 2 * RULE.iterations, np.float32)


@pytest.mark.parametrize(
    ("check", "shape", "dtype", "match"),
    [
        (api.check_project, (4, 3, WIDTH), "bfloat16", "number of streams is 3, must be 4"),
        (api.check_project, (65, 4, WIDTH), "bfloat16", "tokens past the most, 64, is 1, must be 0"),
        (api.check_project, (4, 4, 1536), "bfloat16", "width over 1024 is 512, must be 0"),
        (api.check_project, (4, 4, WIDTH), "float32", "dtype of streams is float32, must be bfloat16"),
        (api.check_enter, (4, 2, WIDTH), "bfloat16", "number of streams is 2, must be 4"),
        (api.check_enter, (4, 4, 256), "bfloat16", "rest of the width over 512 is 256, must be 0"),
        (api.check_enter, (4, 4, WIDTH), "float32", "dtype of streams is float32, must be bfloat16"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(check, shape, dtype, match):
    check(jax.ShapeDtypeStruct((4, 4, WIDTH), jnp.bfloat16))
    with pytest.raises(ValueError, match=match):
        check(jax.ShapeDtypeStruct(shape, dtype))


def weights(rng: np.random.Generator, outputs: int, scales: int) -> tuple[Any, ...]:
    """The product's weight, bases and scales."""
    mix = rng.normal(size=(outputs, STREAMS * WIDTH)) * WIDTH**-0.5
    base, scale = rng.normal(size=outputs), rng.uniform(0.5, 1.5, scales)
    return tuple(jnp.asarray(x, jnp.float32) for x in (mix, base, scale))


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> HopperProducts:
    """Products by kernels, of which those of hyper-connections compute by their references."""
    for name in ("project", "enter"):
        whole = getattr(api, name)

        def run(*args: Any, whole: Any = whole, implementation: str, **options: Any) -> Any:
            assert implementation == "mosaic_gpu"
            return jax.jit(partial(whole, **options, implementation="xla"))(*args)

        monkeypatch.setattr(api, name, run)
    return HopperProducts(kernels=frozenset({"hyper", "fp8_matmul"}))


@pytest.mark.parametrize("slots", [3, pytest.param(33, marks=pytest.mark.rest)])
def test_two_sublayers_and_the_end_equal_xla(rng, on, slots):
    """The first sublayer leaves two results, one of them in parts. 66 tokens are too many for ``project``."""
    p = [Hyper(*weights(rng, 2 * STREAMS + STREAMS**2, 3)) for _ in range(2)]
    head, norm = HyperHead(*weights(rng, STREAMS, 1)), jnp.asarray(rng.uniform(0.5, 1.5, WIDTH))
    tokens = 2 * slots
    few = tokens <= api.MOST
    values = jnp.asarray(rng.normal(size=(2, tokens + 3, WIDTH)), jnp.float32)
    outs = Parts(values, (slots, 2, WIDTH), 1), jnp.asarray(rng.normal(size=(slots, 2, WIDTH)), jnp.bfloat16)
    w = Fp8(jnp.zeros((128, WIDTH), jnp.float8_e4m3fn), jnp.ones((1, WIDTH // 128)))
    x = jnp.asarray(rng.normal(size=(slots, 2, STREAMS, WIDTH)), jnp.bfloat16)

    def through(products: Products, readers: Any) -> tuple[Any, ...]:
        first, rows = products.enter(x, p[0], CFG, norm, readers)
        left = products.leave(first, *outs)
        assert isinstance(left, PendingStreams) == (few and products is on)
        second, again = products.enter(left, p[1], CFG, norm)
        streams = products.streams(products.leave(second, outs[1]))
        return rows, products.plain(again), left, streams, products.collapse(streams, head, CFG)

    got, want = (through(products, (None, Reader(w))) for products in (on, Products()))
    assert got[0].quantised is not None
    low = got[0].quantised.expand()[:tokens].reshape(want[0].shape)
    assert distance(low, want[0]) < rounded(1, jnp.float8_e4m3fn) + rounded(2)
    # Roundings to bfloat16: of inputs, results and streams, each of which may tip the next.
    for a, b in zip((got[0].plain, got[1], on.streams(got[2]), *got[3:]), (want[0], *want[1:]), strict=True):
        assert distance(a, b) < rounded(6)
    # One of the tokens alone, as drafts are collapsed.
    one = on.collapse(got[3][:, 0], head, CFG)
    assert distance(one, hyper.collapse(want[3][:, 0], head, CFG, Products().exactly)) < rounded(6)
