"""Residual streams handed on from a pass over pages: the oracle's, however the pass is cut and spread."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.checkpoint import load
from mtp_jax.decode.bookkeeping import abstract_state, empty_state
from mtp_jax.decode.drafter.nothing import Nothing
from mtp_jax.decode.state import StateShape
from mtp_jax.model import stack, trunk
from mtp_jax.model.backend import Backend, mosaic_gpu, xla, xla_cpu
from mtp_jax.model.cache import PagedView
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import data_size, make_mesh
from mtp_jax.model.trunk import Model, Taps
from mtp_jax.model.visible import chain
from tests.golden import expected, model_dir
from tests.models import on_mesh
from tests.rounding import near, of_model

SLOTS = 8


def tapped(params: Params, cfg: ModelConfig, on: Backend, *wanted: tuple[int, ...]) -> list[Taps]:
    """Streams of eight slots that read the golden prompt, of a pass for each of ``wanted``."""
    tokens = jnp.tile(jnp.asarray(expected("v3")["input_ids"], jnp.int32), (SLOTS, 1))
    positions, each = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), SLOTS // data_size(on.mesh)
    groups = [len(g) if isinstance(g, stack.Stack) else None for g in params.layers]
    shape = StateShape(SLOTS, each, tokens.shape[1], 1)
    state = empty_state(abstract_state(Model(cfg, on), Nothing(cfg.vocab_size), shape, None, groups))
    table, seen = jnp.arange(SLOTS)[:, None] % each, jnp.full(SLOTS, tokens.shape[1])
    views = (PagedView(table, positions, chain(jnp.zeros_like(seen), seen)),)

    @jax.jit
    def run(params, caches):
        return [
            trunk.run(params, Model(cfg, on), tokens, positions, caches, views, taps).taps for taps in wanted
        ]

    return jax.device_get(run(params, state.trunk))


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["whole", "stacked", "parts left", "mesh", "micro-batches"])
def test_streams_are_the_oracles(kind):
    found = load(model_dir("v3"), dtype="float32")
    cfg, params, on = found.config, found.params, xla_cpu(form="absorbed")
    every = tuple(range(cfg.num_hidden_layers + 1))
    if kind == "stacked":
        groups = [stack.stacked(g) if len(g) > 1 else g[0] for g in stack.alike(params.layers)]
        params = replace(params, layers=tuple(groups))
        assert len(groups) < cfg.num_hidden_layers
    elif kind == "parts left":
        on = mosaic_gpu(form="absorbed", kernels=frozenset())
    elif kind != "whole":
        mesh = make_mesh(4, 2)
        on = xla(mesh, form="absorbed", micro_batches=2 if kind == "micro-batches" else 1)
        params = on_mesh(params, mesh, cfg)
    # A part of the streams is handed on as it is with all.
    parts = every, every[1::2]
    for taps, got in zip(parts, tapped(params, cfg, on, *parts), strict=True):
        assert sorted(got) == sorted(taps)
        for number in taps:
            want = np.broadcast_to(expected("v3")["resid"][number], got[number].shape)
            near(got[number], want, of_model(cfg, want.shape[1]), name=f"{number}")
