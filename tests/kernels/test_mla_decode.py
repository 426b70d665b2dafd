"""Paged MLA decode: the reference against float64, and the kernel, interpreted, against the reference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.check.baselines.mla_decode import xla
from kernels_pallas.check.cases.mla_decode import PAGE, RANK, SCALE, DecodeShape, case, inputs, shapes
from kernels_pallas.mla_decode.api import mla_decode, splits_of
from kernels_pallas.mla_decode.fp8_rows import pack, unpack
from kernels_pallas.mla_decode.merging import merge
from kernels_pallas.visible import chain
from tests.kernels.interpreter import (
    InterpretGPUParams,
    distance,
    needs_interpreter,
    notices,
    rounded,
    without,
)

RUN = partial(mla_decode, scale=SCALE, implementation="xla")


# Query rows past the last are computed from uninitialised memory, which is NaN there.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def exact(q, q_rope, pages, page_table, mask):
    """Token by token and head by head, in float64."""
    q, pages = np.concatenate([q, q_rope], -1).astype(np.float64), np.asarray(pages, np.float64)
    slots, window, heads, _ = q.shape
    out = np.zeros((slots, window, heads, RANK))
    for b in range(slots):
        rows = pages[np.asarray(page_table[b])].reshape(-1, q.shape[-1])
        for w in range(window):
            seen = rows[np.asarray(mask[b, w])]
            if len(seen):
                scores = q[b, w] @ seen.T * SCALE
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                out[b, w] = weights / weights.sum(-1, keepdims=True) @ seen[:, :RANK]
    return out


@pytest.mark.parametrize("kind", ["plain", "nextn", "fp8"])
def test_reference_equals_float64(kind):
    shape = DecodeShape(8, 3, (-1, 0, 61, 64, 130), nextn=kind == "nextn", fp8=kind == "fp8")
    # Apart from what reads them, or XLA would leave out their rounding to bfloat16.
    q, q_rope, pages, page_table, visible = jax.jit(partial(inputs, shape))(jax.random.key(1))

    @jax.jit
    def run(*inputs):
        mask = visible.mask(shape.window, page_table.shape[1] * PAGE)
        return RUN(*inputs), xla(*inputs, scale=SCALE), mask

    reference, baseline, mask = run(q, q_rope, pages, page_table, visible)
    rows = jax.jit(lambda x: unpack(x, RANK).astype(jnp.bfloat16))(pages) if kind == "fp8" else pages
    expected, some = exact(q, q_rope, rows, page_table, mask), np.asarray(mask).any(-1)
    assert distance(reference, expected) < rounded(1)
    # Probabilities and the result are rounded.
    assert distance(np.asarray(baseline, np.float64)[some], expected[some]) < rounded(2)
    assert not np.asarray(reference, np.float64)[~some].any()


@needs_interpreter
@pytest.mark.parametrize("parts", [3, 40])
def test_merged_parts_equal_the_whole(parts):
    """Two slots of 16 query rows in two blocks, which see different parts."""
    random = np.random.default_rng(2)
    rows = (2, 16)
    weights, values = random.random((parts, *rows, 8)), random.normal(size=(parts, *rows, 8, RANK))
    weights[2, 0, 3] = 0  # a part of which this row sees nothing
    total, sums = weights.sum(-1), np.einsum("pbmn,pbmnc->pbmc", weights, values)
    each = jnp.bfloat16(sums / np.maximum(total, 1e-30)[..., None])
    lse = np.log2(np.maximum(total, 2.0**-100)).reshape(parts, 2, 2, 8)
    whole = (np.asarray(each, np.float64) * total[..., None]).sum(0) / total.sum(0)[..., None]
    lse = jnp.pad(jnp.float32(lse), ((0, 0),) * 3 + ((0, 56),), constant_values=jnp.nan)
    merged = merge(each, lse, interpret=InterpretGPUParams(detect_races=True))
    np.testing.assert_allclose(np.asarray(merged, np.float64), whole, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(("blocks", "columns"), [(1, 1), (1, 512), (8, 64), (100, 65), (512, 64)])
def test_splits_fill_the_gpu_and_leave_each_some_pages(blocks, columns):
    splits = splits_of(blocks, columns)
    assert 1 <= splits <= -(-columns // 2)
    assert blocks * splits <= max(132, blocks)


@pytest.mark.parametrize(
    ("q", "pages", "rank", "match"),
    [
        (((1, 1, 8, 576), "float32"), ((2, 64, 576), "float32"), 512, "dtype"),
        (((1, 1, 8, 320), "bfloat16"), ((2, 64, 320), "bfloat16"), 256, "latent rank is 256"),
        (((1, 1, 8, 544), "bfloat16"), ((2, 64, 544), "bfloat16"), 512, "rope dimensions is 32"),
        (((1, 1, 8, 576), "bfloat16"), ((2, 16, 576), "bfloat16"), 512, "rows per page is 16"),
        (((1, 33, 8, 576), "bfloat16"), ((2, 64, 576), "bfloat16"), 512, "most, 32, is 1"),
    ],
)
@pytest.mark.parametrize("fp8", [False, True])
def test_what_the_kernel_cannot_do_is_refused(q, pages, rank, match, fp8):

    def run(q, rows, table, length):
        rows = pack(rows, rank) if fp8 else rows
        latent, rope = jnp.split(q, [rank], axis=-1)
        return mla_decode(latent, rope, rows, table, chain(length, 1), scale=1.0, implementation="mosaic_gpu")

    numbers = [((1, 2), "int32"), ((1,), "int32")]
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(run, *(jax.ShapeDtypeStruct(*a) for a in (q, pages, *numbers)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "where"),
    [
        pytest.param("barrier_wait", "copy.<locals>.step.<locals>.<lambda>", id="a page's memory is free"),
        pytest.param("barrier_wait", "scores.<locals>.latents", id="a half of a page is there"),
        pytest.param("barrier_wait", "scores.<locals>.rope", id="its rope part is there"),
        pytest.param("barrier_wait", "even_step", id="the odd page's probabilities are there"),
        pytest.param("barrier_wait", "odd_step", id="the even page's probabilities are there"),
        pytest.param("barrier_wait", "finish", id="the other warpgroup has finished"),
        pytest.param(
            "commit_smem",
            "publish",
            id="probabilities are visible to the tensor cores",
            marks=needs_interpreter,
        ),
        pytest.param("commit_smem", "finish", id="outputs are visible to the copy", marks=needs_interpreter),
    ],
)
def test_a_missing_barrier_is_noticed(operation, where, monkeypatch, capfd):
    without(monkeypatch, operation, where)
    assert notices(case("mutant", shapes()["small-one-token"]))
    capfd.readouterr()  # every race is printed


# Words that were never expanded are multiplied as numbers of any size.
@pytest.mark.filterwarnings("ignore:overflow encountered in matmul:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "where"),
    [
        pytest.param("barrier_wait", "copy.<locals>.step.<locals>.<lambda>", id="a page's memory is free"),
        pytest.param("barrier_wait", "scores", id="the words are there"),
        pytest.param(
            "commit_smem", "publish", id="latents are visible to the other warpgroup", marks=needs_interpreter
        ),
    ],
)
def test_a_missing_barrier_is_noticed_with_fp8_rows(operation, where, monkeypatch, capfd):
    without(monkeypatch, operation, where)
    assert notices(case("mutant", shapes()["small-fp8"]))
    capfd.readouterr()  # every race is printed
