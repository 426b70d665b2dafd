"""Other packages' kernels as baselines: skipped with a reason, or called with what their interfaces want.

The packages are stand-ins that compute in numpy from the arguments, as their documentation defines these.
"""

import sys
from dataclasses import replace
from functools import cache, partial
from types import ModuleType

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_pallas.check import __main__ as check
from kernels_pallas.check.case import External, UnavailableError
from kernels_pallas.check.cases.mla_decode import PAGE, RANK, ROPE, SCALE, DecodeShape, case, inputs
from kernels_pallas.mla_decode import reference
from tests.kernels.interpreter import distance, rounded
from tests.rounding import error

WINDOW = DecodeShape(16, 3, (5, 63, 130))
VLLM = "vllm.v1.attention.ops.triton_decode_attention"


def module(monkeypatch, name: str, **contents) -> None:
    found = ModuleType(name)
    vars(found).update(contents)
    monkeypatch.setitem(sys.modules, name, found)


@pytest.fixture
def torch(monkeypatch) -> None:
    module(monkeypatch, "torch", from_dlpack=np.array)


def attend(q, keys, values, table, end):
    """One token [N, 576] over the first ``end`` rows of its pages."""
    keys, values = (x[table].reshape(-1, x.shape[-1])[:end].astype(np.float64) for x in (keys, values))
    scores = q.astype(np.float64) @ keys.T * SCALE
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ values


def decode_attention_fwd(
    q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits, sm_scale, page_size=1
):
    tokens, heads, _ = q.shape
    assert num_kv_splits == attn_logits.shape[2]
    assert (attn_logits.shape, attn_logits.dtype) == ((tokens, heads, num_kv_splits, RANK + 1), np.float32)
    assert (o.shape, lse.shape) == ((tokens, heads, RANK), (tokens, heads))
    assert q.dtype == k_buffer.dtype == v_buffer.dtype == o.dtype == ml_dtypes.bfloat16
    assert req_to_token.dtype == b_seq_len.dtype == np.int32
    assert (k_buffer.shape[1:], v_buffer.shape[1:]) == ((PAGE, 1, RANK + ROPE), (PAGE, 1, RANK))
    assert (sm_scale, page_size) == (SCALE, PAGE)
    for i in range(tokens):
        o[i] = attend(q[i], k_buffer[:, :, 0], v_buffer[:, :, 0], req_to_token[i], b_seq_len[i])


def get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
    assert (num_heads_per_head_k, num_heads_k) == (3 * 16, 1)
    return "schedule", "splits"


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, schedule, splits, softmax_scale, causal
):
    assert (schedule, splits, softmax_scale, causal) == ("schedule", "splits", SCALE, True)
    assert q.dtype == k_cache.dtype == ml_dtypes.bfloat16
    assert block_table.dtype == cache_seqlens.dtype == np.int32
    assert k_cache.shape[1:] == (PAGE, 1, RANK + ROPE)
    rows, window = k_cache[:, :, 0], q.shape[1]
    values = rows[..., :head_dim_v]
    out = [
        [attend(x[w], rows, values, table, end - window + 1 + w) for w in range(window)]
        for x, table, end in zip(q, block_table, cache_seqlens, strict=True)
    ]
    return np.array(out), None


@cache
def given(shape: DecodeShape):
    return jax.jit(partial(inputs, shape))(jax.random.key(3))


def run(name: str, shape: DecodeShape):
    way = case("baseline", shape).baselines[name]
    assert isinstance(way, External)
    call = way.prepare(*given(shape))
    return distance(call(), jax.jit(partial(reference.mla_decode, scale=SCALE))(*given(shape)))


def test_vllm_gets_what_it_computes_the_same_from(torch, monkeypatch):
    module(monkeypatch, VLLM, decode_attention_fwd=decode_attention_fwd)
    assert run("triton", WINDOW) < rounded(1)  # the result


def test_flash_mla_gets_what_it_computes_the_same_from(torch, monkeypatch):
    functions = {f.__name__: f for f in (get_mla_metadata, flash_mla_with_kvcache)}
    module(monkeypatch, "flash_mla", **functions)
    assert run("flash_mla", WINDOW) < error(RANK + ROPE + 192)


@pytest.mark.parametrize(("name", "missing"), [("triton", VLLM), ("flash_mla", "flash_mla")])
def test_without_the_package_the_reason_is_printed(name, missing, torch, monkeypatch):
    for package in (missing, missing.split(".")[0]):
        monkeypatch.setitem(sys.modules, package, None)
    shown = check.baseline(case("baseline", WINDOW), name, given(WINDOW))
    assert shown.startswith(f"unavailable (cannot import {missing}")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (DecodeShape(8, 1, (5,), fp8=True), "FP8 rows"),
        (DecodeShape(8, 1, (5,), nextn=True), "causal windows only"),
    ],
)
@pytest.mark.parametrize("name", ["triton", "flash_mla"])
def test_what_they_cannot_do(name, shape, reason, torch, monkeypatch):
    for package in (VLLM, "flash_mla"):
        module(monkeypatch, package, decode_attention_fwd=None)
    with pytest.raises(UnavailableError, match=reason):
        run(name, shape)


def test_its_time_and_distance_are_printed(monkeypatch):
    class Tensor(np.ndarray):
        float = cpu = lambda self: self

        def numpy(self):
            return np.asarray(self)

    def do_bench(call, return_mode):
        call()
        return {"median": 0.25}[return_mode]

    module(monkeypatch, "triton.testing", do_bench=do_bench)
    doubling = case("baseline", WINDOW)
    doubling = replace(
        doubling,
        kernel=lambda x: 2 * x,
        baselines={"other": External(lambda x: lambda: np.asarray(2.02 * x).view(Tensor))},
    )
    assert check.baseline(doubling, "other", (jnp.ones(8),)) == "250.0 us (1.0e-02 from ours)"
