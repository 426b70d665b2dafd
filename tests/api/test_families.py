"""Llama, against equations in numpy; and a family of its own here, which no file of the source knows."""

import json
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from mtp_jax import LLM, ConfigError, SamplingParams
from mtp_jax.checkpoint import load
from mtp_jax.checkpoint.summary import summarise
from mtp_jax.checkpoint.write import save_checkpoint
from mtp_jax.json_object import JsonObject
from mtp_jax.model import trunk
from mtp_jax.model.config import GqaConfig, ModelConfig
from mtp_jax.model.family import FAMILIES, config_json, config_of
from mtp_jax.model.family.family import Family, TrunkNames
from mtp_jax.model.layer_specs import Layer, block
from tests import tiny_tokenizer
from tests.api.helpers import SIZES
from tests.checkpoint.files import assert_same
from tests.llama import (
    HEAD,
    HEADS,
    KV_HEADS,
    LAYERS,
    LLAMA,
    LLAMA3,
    VOCABULARY,
    WIDTH,
    Weights,
    frequencies,
    weights,
)
from tests.rounding import error, near, of_model

PROMPT = [5, 77, 30, 31, 32, 100, 9]


def reference(w: Weights, config: JsonObject, tokens: list[int]) -> np.ndarray:
    """Logits after each token, [T, V] in float64 (arXiv 2302.13971, 2305.13245)."""
    tensors = {name: a.astype(np.float64) for name, a in w.items()}
    angles = np.arange(len(tokens))[:, None, None] * frequencies(config)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + config["rms_norm_eps"])
        return x / scale * tensors[f"{name}.weight"]

    def rotated(x: np.ndarray) -> np.ndarray:
        if config.get("rope_interleave"):  # neighbours are a complex number
            return (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
        return (x[..., : HEAD // 2] + 1j * x[..., HEAD // 2 :]) * np.exp(1j * angles)

    def heads(x: np.ndarray, name: str) -> np.ndarray:
        return (x @ tensors[f"{name}_proj.weight"].T).reshape(len(tokens), -1, HEAD)

    x = tensors["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        p = f"model.layers.{i}"
        y = norm(x, f"{p}.input_layernorm")
        q, k, v = (heads(y, f"{p}.self_attn.{name}") for name in "qkv")
        k, v = (np.repeat(a, HEADS // KV_HEADS, axis=1) for a in (k, v))
        scores = np.einsum("tnr,lnr->ntl", rotated(q), rotated(k).conj()).real / np.sqrt(HEAD)
        scores = np.exp(np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf))
        mixed = np.einsum("ntl,lnh->tnh", scores / scores.sum(axis=-1, keepdims=True), v)
        x = x + mixed.reshape(len(tokens), -1) @ tensors[f"{p}.self_attn.o_proj.weight"].T
        y = norm(x, f"{p}.post_attention_layernorm")
        gate, up = (y @ tensors[f"{p}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ tensors[f"{p}.mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).T


def folder(path: Path, w: Weights, config: JsonObject) -> Path:
    path.mkdir()
    save_file(w, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return tiny_tokenizer.write(path, VOCABULARY)


CASES: dict[str, JsonObject] = {
    "plain": {},
    "scaled, a head of its own": {"rope_scaling": LLAMA3, "tie_word_embeddings": False},
    "neighbours are pairs": {"rope_interleave": True},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_equations(tmp_path: Path, case: str):
    config = LLAMA | CASES[case]
    w, tokens = weights(config["tie_word_embeddings"]), [*range(3, 100, 2)]
    loaded = load(folder(tmp_path / "model", w, config))

    @jax.jit
    def logits(params: Any, ids: jax.Array) -> jax.Array:
        return trunk.logits(params, trunk.forward(params, loaded.config, ids[None]))[0]

    near(
        logits(loaded.params, jnp.array(tokens)),
        reference(w, config, tokens),
        of_model(loaded.config, len(tokens)),
    )


class Toy(Family):
    """Dense layers with grouped-query attention, under keys and names of its own."""

    name, title, stem = "toy", "Toy", "Toy"
    types = ("toy",)
    architectures: ClassVar = {"ToyFor": "toy"}
    unwritten = (*FAMILIES["llama"].unwritten, "hidden_size", "num_hidden_layers")
    names = TrunkNames("table.weight", "last.weight", "out.weight")

    def translate(self, raw: JsonObject, kind: str) -> dict[str, Any]:
        sizes = {"hidden_size": raw["width"], "num_hidden_layers": raw["depth"]}
        return {**sizes, "rope_interleave": False, "gqa": GqaConfig(raw["kv_heads"], HEAD, 1.0)}

    def keys(self, cfg: ModelConfig) -> JsonObject:
        assert cfg.gqa is not None
        return {"width": cfg.hidden_size, "depth": cfg.num_hidden_layers, "kv_heads": cfg.gqa.kv_heads}

    def layer(self, cfg: ModelConfig, number: int) -> Layer:
        return block(cfg, f"blocks.{number}", moe=False, indexes=False, inputs=cfg.hidden_size)


def toy(path: Path) -> Path:
    """Llama's weights as a toy."""
    names = {"model.layers.": "blocks.", "model.embed_tokens.": "table.", "model.norm.": "last."}
    renamed = weights()
    for old, new in names.items():
        renamed = {name.replace(old, new): a for name, a in renamed.items()}
    kept = ("vocab_size", "intermediate_size", "num_attention_heads", "max_position_embeddings", "rope_theta")
    config = {
        key: LLAMA[key]
        for key in (*kept, "rms_norm_eps", "tie_word_embeddings", "eos_token_id", "torch_dtype")
    }
    return folder(
        path, renamed, config | {"model_type": "toy", "width": WIDTH, "depth": LAYERS, "kv_heads": KV_HEADS}
    )


@pytest.fixture
def model(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a family's model."""
    monkeypatch.setitem(FAMILIES, "toy", Toy())
    path = tmp_path / "model"
    return toy(path) if request.param == "toy" else folder(path, weights(), LLAMA)


@pytest.mark.parametrize("model", ["llama", "toy"], indirect=True)
def test_a_folder_answers_without_drafts_and_says_so(model: Path, caplog: pytest.LogCaptureFixture):
    llm = LLM(model, **SIZES)
    assert [r.message for r in caplog.records] == [
        f"{model.name} has no NextN layers, so no tokens are drafted; a head of draft_model could, "
        "and suffix_drafts, which needs none"
    ]
    assert llm.engine.config.num_speculative_tokens == 0
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    ids = output.outputs[0].token_ids
    wanted = reference(weights(), LLAMA, [*PROMPT, *ids])[len(PROMPT) - 1 : -1]
    slack = error(of_model(llm.config, len(PROMPT) + len(ids)), np.abs(wanted).max())
    assert (wanted.max(axis=1) - wanted[np.arange(12), ids] <= slack).all()
    assert output.outputs[0].text == tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).decode(ids)


@pytest.mark.parametrize("model", ["llama", "toy"], indirect=True)
def test_it_is_described_and_written(model: Path, tmp_path: Path):
    loaded, told = load(model), summarise(model)
    assert told.parameters == sum(a.size for a in weights().values())
    assert told.cache_bytes_per_token["float32"] == LAYERS * 2 * KV_HEADS * HEAD * 4
    assert config_of(config_json(loaded.config)) == loaded.config
    save_checkpoint(tmp_path / "copy", loaded.config, loaded.params, dtype="float32")
    assert_same(load(tmp_path / "copy").params, loaded.params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias = True is not supported; expected False"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported; expected False"),
        ({"rope_interleaved": True}, "rope_interleaved = True is not supported; expected False"),
        ({"rope_interleave": 1}, "rope_interleave = 1; expected true or false"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads = 4"),
        ({"head_dim": 7}, "head_dim = 7; expected a number above 0"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "'linear' is not supported; expected 'llama3' or 'yarn'",
        ),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2}},
            "llama3 rope scaling has no low_freq_factor, high_freq_",
        ),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1}},
            "expected factor >= 1 and high_freq_factor > low_",
        ),
        ({"max_position_embeddings": None}, "config.json lacks max_position_embeddings; a Llama config has"),
    ],
)
def test_refusals(changes: JsonObject, message: str):
    with pytest.raises(ConfigError) as caught:
        config_of(LLAMA | changes)
    assert message in str(caught.value)
