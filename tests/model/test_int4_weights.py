"""Experts that stay packed in four bits: the same model as with their values in full."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.checkpoint import Loaded, load
from mtp_jax.checkpoint.int4 import dequantise
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.errors import ConfigError
from mtp_jax.lab.bench.cost import of_trunk
from mtp_jax.model import nextn, trunk
from mtp_jax.model.backend import Backend, mosaic_gpu, xla, xla_cpu
from mtp_jax.model.narrow import Int4, expand, is_narrow
from mtp_jax.model.params import Attention, Moe, Params
from mtp_jax.model.sharding import make_mesh
from tests.checkpoint.int4_files import CONFIG, Models, write_models
from tests.models import GREEDY, Reference, Told, accepted, apart, make_engine, prompts, serve
from tests.rounding import near, of_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return write_models(tmp_path_factory.mktemp("int4"))


@pytest.fixture(scope="module")
def packed(models: Models) -> Loaded:
    return load(models.packed)


@pytest.fixture(scope="module")
def plain(models: Models) -> Loaded:
    return load(models.plain)


def experts(params: Params) -> Iterator[Any]:
    for layer in (*params.layers, *(p.layer for p in params.nextn)):
        if isinstance(layer.mlp, Moe):
            yield from (layer.mlp.gate_up, layer.mlp.down)


PLAINLY, CPU, LENGTH = xla(), xla_cpu(form="absorbed"), 9


@functools.partial(jax.jit, static_argnames="on")
def _forward(params: Params, on: Backend) -> jax.Array:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, LENGTH)))
    hidden = trunk.forward(params, CONFIG, tokens, on)
    drafted = nextn.teacher_forced(params, CONFIG, 0, tokens, hidden, on)
    return jnp.stack([trunk.logits(params, hidden), nextn.logits(params, 0, drafted)])


def forward(params: Params, on: Backend = PLAINLY) -> np.ndarray:
    """Logits of the trunk and of the NextN layer behind it."""
    return np.asarray(_forward(params, on), np.float64)


def same(got: np.ndarray, want: np.ndarray) -> None:
    near(got, want, of_model(CONFIG, LENGTH))


expanded = jax.jit(expand, static_argnums=1)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.rest)])
def test_experts_expand_to_their_values_rounded_once(models, dtype):
    packed, plain = (load(path, dtype=dtype).params for path in (models.packed, models.plain))
    kinds = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
    pairs = list(zip(experts(packed), experts(plain), strict=True))
    assert len(pairs) == 4
    for own, want in pairs:
        assert isinstance(own, Int4)
        assert (own.words.dtype, own.scale.dtype) == (jnp.int32, jnp.bfloat16)
        assert own.shape == want.shape
        np.testing.assert_array_equal(expanded(own, kinds[dtype]), want)


def test_four_bits_and_their_scales_are_all_that_is_in_memory(packed, plain):
    for own, want in zip(experts(packed.params), experts(plain.params), strict=True):
        assert sum(a.nbytes for a in jax.tree.leaves(own)) == want.size // 2 + want.size // 32 * 2
    whole, narrow = (sum(a.nbytes for a in jax.tree.leaves(x.params)) for x in (plain, packed))
    saved = sum(w.size * 4 - w.size // 2 - w.size // 32 * 2 for w in experts(plain.params))
    assert whole - narrow == saved
    assert of_trunk(packed.params).expert < of_trunk(plain.params).expert / 6


@pytest.mark.parametrize("on", apart([xla(experts="dense"), xla(), CPU], CPU))
def test_same_logits(packed, plain, on):
    same(forward(packed.params, on), forward(plain.params, PLAINLY))


@pytest.mark.rest
def test_same_logits_in_bfloat16(models):
    """Weights are equal, sums may be in another order: about twenty results of a layer are rounded."""
    got, want = (forward(load(path, dtype="bfloat16").params) for path in (models.packed, models.plain))
    near(got, want, 20 * (CONFIG.num_hidden_layers + 1), jnp.bfloat16)


def test_dequantised_at_load(models, plain):
    whole = load(models.packed, narrow="dequantise").params
    assert not any(map(is_narrow, jax.tree.leaves(whole, is_leaf=is_narrow)))
    for own, want in zip(jax.tree.leaves(whole), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_array_equal(own, want)


TOKENS = 16
JOBS = [(p, replace(GREEDY, max_tokens=TOKENS)) for p in prompts(3, vocab=CONFIG.vocab_size)]


def told(plain: Loaded) -> list[Told]:
    """What the plain loop says of the same values, unpacked."""
    reference = Reference(plain.params, CONFIG)
    return [reference.speculate(prompt, TOKENS, 3) for prompt, _ in JOBS]


def as_told(requests: list[Request], want: list[Told]) -> None:
    assert [(r.progress.output, accepted(r)) for r in requests] == [(t.ids, t.accepted) for t in want]
    assert (
        sum(r.progress.speculation.accepted for r in requests)
        > sum(r.progress.speculation.steps for r in requests) / 2
    )


def without_drafts(engine: Engine) -> list[list[int]]:
    jobs = [(prompt, replace(params, num_speculative_tokens=0)) for prompt, params in JOBS]
    return [r.progress.output for r in serve(engine, jobs, compiled=True)]


@pytest.mark.slow
def test_same_tokens_at_any_depth(packed, plain):
    engine, want = make_engine(packed.params, CONFIG), told(plain)
    as_told(serve(engine, JOBS), want)
    assert without_drafts(engine) == [t.ids for t in want]


@pytest.mark.slow
def test_same_tokens_at_any_depth_in_bfloat16(models):
    packed, plain = (load(path, dtype="bfloat16").params for path in (models.packed, models.plain))
    own, other = (make_engine(params, CONFIG, dtype="bfloat16") for params in (packed, plain))
    got, want = serve(own, JOBS), serve(other, JOBS)
    assert [(r.progress.output, accepted(r)) for r in got] == [(r.progress.output, accepted(r)) for r in want]
    assert without_drafts(own) == [r.progress.output for r in want]
    assert (
        sum(r.progress.speculation.accepted for r in got) > sum(r.progress.speculation.steps for r in got) / 2
    )


@pytest.mark.rest
def test_experts_are_split_over_eight_devices(models, packed):
    mesh = make_mesh(2, 4)
    split = load(models.packed, mesh=mesh).params
    for own, want in zip(experts(split), experts(packed.params), strict=True):
        for array, whole in zip(jax.tree.leaves(own), jax.tree.leaves(want), strict=True):
            assert {s.data.nbytes for s in array.addressable_shards} == {whole.nbytes // 8}
    same(forward(split, xla(mesh=mesh)), forward(packed.params))


@pytest.mark.slow
def test_same_tokens_over_eight_devices(models, plain):
    mesh = make_mesh(2, 4)
    split = load(models.packed, mesh=mesh).params
    as_told(serve(make_engine(split, CONFIG, mesh=mesh), JOBS), told(plain))


@pytest.mark.rest
def test_no_kernel_multiplies_them(packed, plain):
    """Where a kernel must, that is an error; where it may, XLA does it."""
    given: dict[str, Any] = {"kernels": frozenset(("fp8_matmul", "grouped_matmul"))}
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.dtype == jnp.float32 else a, packed.params)
    with pytest.raises(ConfigError, match="weights are Int4, must be FP8, FP4 or arrays"):
        forward(half, mosaic_gpu(**given, strict=True))
    same(forward(packed.params, mosaic_gpu(**given)), forward(plain.params))


@pytest.mark.parametrize(("group", "kind"), [(8, np.float16), (16, np.float32), (32, np.float16)])
def test_other_groups_and_scales(tmp_path: Path, group: int, kind: type):
    models = write_models(tmp_path, group, kind)
    packed, plain = load(models.packed).params, load(models.plain).params
    for own, want in zip(experts(packed), experts(plain), strict=True):
        assert own.scale.dtype == kind
        np.testing.assert_array_equal(expanded(own, jnp.float32), want)


@pytest.mark.rest
def test_linear_layers_may_be_packed_too(tmp_path: Path):
    """Those whose matrix is the parameter stay packed; what is split into heads is dequantised."""
    models = write_models(
        tmp_path, 16, packs=lambda n: n.endswith("_proj.weight") and "kv_b" not in n and "eh_" not in n
    )
    packed, plain = load(models.packed), load(models.plain)
    layer = packed.params.layers[0]
    assert isinstance(layer.attention, Attention)
    assert isinstance(layer.attention.q_a, Int4)
    assert isinstance(layer.mlp.down, Int4)
    assert not is_narrow(layer.attention.o)
    same(forward(packed.params), forward(plain.params))
    with pytest.raises(ConfigError, match="48 of mlp do not divide over 2 devices in int4 blocks of 16"):
        load(models.packed, mesh=make_mesh(1, 2))


def test_any_rectangle(rng):
    words = rng.integers(-(2**31), 2**31, (5, 6), dtype=np.int32)
    scale = rng.uniform(0.1, 2, (5, 2)).astype(np.float32)
    whole = np.empty((5, 48), np.float32)
    dequantise(words, scale, range(48), whole)
    np.testing.assert_array_equal(whole, expand(Int4(jnp.asarray(words), jnp.asarray(scale)), jnp.float32))
    for top, bottom, left, right in [(0, 5, 0, 1), (1, 3, 7, 9), (2, 2, 5, 30), (0, 4, 23, 48), (3, 5, 8, 8)]:
        out = np.empty((bottom - top, right - left), np.float32)
        dequantise(words[top:bottom], scale[top:bottom], range(left, right), out)
        np.testing.assert_array_equal(out, whole[top:bottom, left:right])


def test_a_word_by_hand():
    """The lowest bits first, each value with 8 added; scales -0.5 and 3."""
    words = np.array([[0xFEDCBA98, 0x76543210]], np.uint32).view(np.int32)
    got = expand(Int4(jnp.asarray(words), jnp.asarray([[-0.5, 3]])), jnp.float32)
    assert got.tolist() == [[-0.5 * v for v in range(8)] + [3.0 * v for v in range(-8, 0)]]
