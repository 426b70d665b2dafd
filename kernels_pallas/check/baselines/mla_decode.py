"""Baselines that compute absorbed MLA on a GPU: XLA, and the kernels of installed packages."""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.check.case import External, Operation, UnavailableError
from kernels_pallas.mla_decode.fp8_rows import PackedRows, unpack
from kernels_pallas.visible import Window

# The arguments with which vLLM calls its kernel (v1/attention/backends/mla/triton_mla.py).
_TRITON_SPLITS = 4


def baselines(scale: float) -> Mapping[str, Operation | External]:
    """Baselines by name: functions of the kernel's inputs."""
    options = {"scale": scale}
    return {
        "xla": partial(xla, **options),
        "triton": External(partial(triton, **options)),
        "flash_mla": External(partial(flash_mla, **options)),
    }


def xla(
    q: jax.Array,
    q_rope: jax.Array,
    pages: jax.Array | PackedRows,
    page_table: jax.Array,
    visible: Window,
    *,
    scale: float,
) -> jax.Array:
    """XLA's own lowering in bfloat16: rows gathered to memory, two matrix products, a softmax in float32."""
    rank, whole = q.shape[-1], jnp.concatenate([q, q_rope], axis=-1)
    rows = jax.tree.map(lambda part: part[page_table], pages)
    rows = unpack(rows, rank).astype(q.dtype) if isinstance(rows, tuple) else rows
    rows = rows.reshape(rows.shape[0], -1, rows.shape[-1])
    mask = visible.mask(q.shape[1], rows.shape[1])
    rows = jnp.where(visible.seen(rows.shape[1])[..., None], rows, 0)
    scores = jnp.einsum("bwnc,blc->bwnl", whole, rows, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(mask[:, :, None], scores, -jnp.inf), axis=-1).astype(q.dtype)
    return jnp.einsum("bwnl,blc->bwnc", weights, rows[..., :rank])


def triton(
    q: jax.Array,
    q_rope: jax.Array,
    pages: jax.Array | PackedRows,
    page_table: jax.Array,
    visible: Window,
    *,
    scale: float,
) -> Callable[[], object]:
    """vLLM's Triton kernel. It decodes single tokens: a window's tokens become slots of their own."""
    torch = _package("torch")
    kernel = _package("vllm.v1.attention.ops.triton_decode_attention").decode_attention_fwd
    rows, lengths = _bfloat16(pages), _causal_lengths(visible, q.shape[1])
    (slots, window, heads, rank), size = q.shape, rows.shape[1]
    tokens = slots * window
    of_each = (
        jnp.concatenate([q, q_rope], axis=-1).reshape(tokens, heads, -1),
        rows[:, :, None],
        jnp.zeros((tokens, heads, rank), q.dtype),
        jnp.zeros((tokens, heads), q.dtype),
        jnp.repeat(page_table, window, axis=0),
        lengths.reshape(tokens),
        jnp.zeros((tokens, heads, _TRITON_SPLITS, rank + 1), jnp.float32),
    )
    queries, keys, out, lse, table, ends, parts = (torch.from_dlpack(x) for x in of_each)

    def call() -> object:
        kernel(queries, keys, keys[..., :rank], out, lse, table, ends, parts, _TRITON_SPLITS, scale, size)
        return out.reshape(slots, window, heads, rank)

    return call


def flash_mla(
    q: jax.Array,
    q_rope: jax.Array,
    pages: jax.Array | PackedRows,
    page_table: jax.Array,
    visible: Window,
    *,
    scale: float,
) -> Callable[[], object]:
    """FlashMLA's dense decoding kernel, with its causal window."""
    torch, package = _package("torch"), _package("flash_mla")
    rows, ends = _bfloat16(pages), _causal_lengths(visible, q.shape[1])[:, -1]
    given = jnp.concatenate([q, q_rope], axis=-1), rows[:, :, None], page_table, ends
    queries, keys, table, ends = (torch.from_dlpack(x) for x in given)
    schedule, splits = package.get_mla_metadata(ends, q.shape[1] * q.shape[2], 1)

    def call() -> object:
        out, _ = package.flash_mla_with_kvcache(
            queries, keys, table, ends, q.shape[-1], schedule, splits, softmax_scale=scale, causal=True
        )
        return out

    return call


def _package(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as e:
        raise UnavailableError(f"cannot import {name}: {e}") from e


def _bfloat16(pages: jax.Array | PackedRows) -> jax.Array:
    if isinstance(pages, tuple):
        raise UnavailableError("it reads no FP8 rows with a scale per 128 latents")
    return pages


def _causal_lengths(visible: Window, window: int) -> jax.Array:
    """Rows that each token sees, int32 [B, W]. Raises UnavailableError unless all slots have whole chains."""
    if visible.ancestors is not None or np.any(visible.first) or np.any(visible.count != window):
        raise UnavailableError("it knows causal windows only")
    return (visible.length[:, None] + jnp.arange(window)).astype(jnp.int32)
