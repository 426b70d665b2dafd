"""DeepSeek-V4 over a whole sequence against numbers of an independent implementation."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from mtp_jax.checkpoint import Loaded, load
from mtp_jax.model import draft_module, trunk
from mtp_jax.model.backend import Backend, xla, xla_cpu
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.nextn_streams import StreamNextN
from mtp_jax.model.params import Params
from mtp_jax.model.trunk import STREAMS
from tests.golden import V4, expected, model_dir
from tests.rounding import near, of_model

# Attention has one form in XLA; experts have several.
DENSE = xla(experts="dense")
CASES = [
    *((v, DENSE) for v in V4),
    *(pytest.param(v, on, marks=pytest.mark.slow) for v in V4 for on in (xla(experts="sparse"), xla_cpu())),
]


@functools.cache
def loaded(variant: str) -> Loaded:
    return load(model_dir(variant))


@functools.partial(jax.jit, static_argnames=("cfg", "on"))
def forward(params: Params, tokens: jax.Array, cfg: ModelConfig, on: Backend) -> dict[str, Any]:
    traced = trunk.forward_traced(params, cfg, tokens, on, [*range(cfg.num_hidden_layers + 1), STREAMS])
    return vars(traced) | {"logits": trunk.logits(params, traced.hidden, on)}


@functools.cache
def computed(variant: str, on: Backend) -> dict[str, Any]:
    """The prompt and the greedy text but its last token, of which no logits are known."""
    found, want = loaded(variant), expected(variant)
    tokens = np.concatenate([want["input_ids"], want["greedy_ids"][:-1]])
    return jax.device_get(forward(found.params, tokens[None], found.config, on))


def terms(variant: str) -> int:
    """Roundings of a pass over the prompt and the greedy text."""
    want = expected(variant)
    return of_model(loaded(variant).config, len(want["input_ids"]) + len(want["greedy_ids"]))


@pytest.mark.parametrize(("variant", "on"), CASES)
def test_streams_and_logits_agree(variant: str, on: Backend):
    want, out = expected(variant), computed(variant, on)
    rows, streams, n = want["rows"], want["streams"], terms(variant)
    for layer in range(len(streams)):
        near(out["taps"][layer][0, rows], streams[layer].mean(axis=1), n, name=f"layer {layer}")
    near(out["taps"][STREAMS][0, rows].reshape(streams[-1].shape), streams[-1], n)
    near(out["hidden"][0, rows], want["hidden"], n)
    near(out["logits"][0, rows], want["logits"], n)
    text = np.argmax(out["logits"][0, len(want["input_ids"]) - 1 :], axis=-1)
    np.testing.assert_array_equal(text, want["greedy_ids"])


@pytest.mark.parametrize("variant", V4)
def test_the_same_entries_and_experts_are_chosen(variant: str):
    want, out = expected(variant), computed(variant, DENSE)
    indexed = {f"index_set.{layer}": c for layer, (c,) in enumerate(out["choices"]) if c is not None}
    assert indexed.keys() == {key for key in want if key.startswith("index_set.")}
    for key, chosen in indexed.items():
        tokens, entries = want[key].shape
        got = (chosen[0, :tokens, :, None] == np.arange(entries)).any(axis=1)
        np.testing.assert_array_equal(got, want[key], err_msg=key)
    assert len(out["routing"]) == loaded(variant).config.num_hidden_layers
    for layer, r in enumerate(out["routing"]):
        weights = want[f"router_dense.{layer}"]
        got = np.zeros_like(weights)
        np.put_along_axis(got, np.asarray(r.ids[0, want["rows"]]), r.weights[0, want["rows"]], axis=-1)
        np.testing.assert_array_equal(got != 0, weights != 0)
        near(got, weights, terms(variant))


@functools.partial(jax.jit, static_argnames="cfg")
def drafted(params: Params, tokens: jax.Array, rows: jax.Array, cfg: ModelConfig):
    module = StreamNextN(cfg)
    z = draft_module.teacher_forced(module, params, DENSE, 0, tokens, rows)
    return z, module.logits(params, 0, z, DENSE)


@pytest.mark.parametrize("variant", V4)
def test_the_layer_and_its_drafts_agree(variant: str):
    """Every draft after the first merges the streams behind the layer itself."""
    want, found = expected(variant), loaded(variant)
    ids, drafts, at = want["input_ids"], want["draft_rec_ids"], want["mtp_rows"]
    length, count = len(ids), len(drafts)
    streams = computed(variant, DENSE)["taps"][STREAMS]
    tokens = np.zeros((1, length + count), np.int32)
    tokens[0, :length] = [*ids[1:], want["greedy_ids"][0]]
    rows = np.zeros((1, length + count, streams.shape[-1]), np.float32)
    rows[:, :length] = streams[:, :length]
    for j in range(count):
        z, logits = map(np.asarray, drafted(found.params, tokens, rows, found.config))
        n = (j + 1) * terms(variant)
        if j == 0:
            near(z[0, at].reshape(want["mtp_streams.0"].shape), want["mtp_streams.0"], n)
            near(logits[0, at], want["mtp_logits.0"], n)
        row = logits[0, length - 1 + j]
        near(row, want["draft_rec_logits"][j], n)
        assert np.argmax(row) == drafts[j]
        tokens[0, length + j] = drafts[j]
        rows[:, length + j] = z[:, length - 1 + j]
