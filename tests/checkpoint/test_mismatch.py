"""Tensors and config that contradict each other: one error, with every file, tensor, expectation and
finding."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mtp_jax.checkpoint import load, summarise
from mtp_jax.checkpoint.folder import INDEX
from mtp_jax.errors import CheckpointError, ConfigError
from tests.checkpoint.files import Raw, Tensors, copy_folder, edit_json, edit_tensors
from tests.golden import model_dir

NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"
Q = "model.layers.0.self_attn.q_a_proj.weight"
SCALE = f"{Q}_scale_inv"
EXPERT = "model.layers.2.mlp.experts.7.up_proj.weight"
MTP_Q = "model.layers.3.self_attn.q_a_proj.weight"


def retype(t: Tensors, name: str, dtype: str, size: int) -> None:
    t[name] = replace(t[name], dtype=dtype, data=bytes(len(t[name].data) * size // 4))


def reshape(t: Tensors, name: str, shape: list[int]) -> None:
    t[name] = replace(t[name], shape=shape)


TENSORS: dict[str, tuple[str, Callable[[Tensors], object], tuple[str, ...]]] = {
    "missing": ("v3", lambda t: t.pop(NORM), (f"missing (1): {NORM}",)),
    "missing expert": ("v3", lambda t: t.pop(EXPERT), (f"missing (1): {EXPERT}",)),
    "missing NextN norm": (
        "v3",
        lambda t: t.pop("model.layers.3.hnorm.weight"),
        ("missing (1): model.layers.3.hnorm.weight",),
    ),
    "unexpected": (
        "v3",
        lambda t: t.update({"model.extra": Raw("F32", [1], bytes(4))}),
        ("unexpected (1): model.safetensors: model.extra",),
    ),
    "several at once": (
        "v3",
        lambda t: (t.pop(NORM), t.pop(EXPERT), t.update(x=t[EMBED]), retype(t, EMBED, "I32", 4)),
        (
            "missing (2):",
            NORM,
            EXPERT,
            "unexpected (1): model.safetensors: x",
            f"tensor {EMBED} has dtype I32",
        ),
    ),
    "shape": (
        "v3",
        lambda t: reshape(t, NORM, [68, 2]),
        (f"model.safetensors: tensor {NORM} has shape [68, 2]; expected [136] from config.json",),
    ),
    "transposed": (
        "v3",
        lambda t: reshape(t, Q, [136, 40]),
        (f"model.safetensors: tensor {Q} has shape [136, 40]; expected [40, 136]",),
    ),
    "dtype": (
        "v3",
        lambda t: retype(t, Q, "I32", 4),
        (f"model.safetensors: tensor {Q} has dtype I32; expected one of F32, BF16, F16, F8_E4M3",),
    ),
    "another fp8": ("v3", lambda t: retype(t, Q, "F8_E5M2", 1), (f"tensor {Q} has dtype F8_E5M2; expected",)),
    "norm in fp8": (
        "fp8",
        lambda t: retype(t, NORM, "F8_E4M3", 2),
        (f"tensor {NORM} has dtype F8_E4M3; expected",),
    ),
    "copy of another shape": (
        "v3",
        lambda t: reshape(t, "model.layers.3.embed_tokens.weight", [136, 160]),
        ("tensor model.layers.3.embed_tokens.weight has shape [136, 160]; expected [160, 136]",),
    ),
    "no scale": ("fp8", lambda t: t.pop(SCALE), (f"missing (1): {SCALE}",)),
    "scale shape": (
        "fp8",
        lambda t: t.update({SCALE: Raw("F32", [1, 1], bytes(4))}),
        (
            f"model.safetensors: tensor {SCALE} is F32 [1, 1]; expected F32 or BF16 [1, 2]",
            "128x128 block of [40, 136]",
        ),
    ),
    "scale dtype": (
        "fp8",
        lambda t: t.update({SCALE: Raw("F16", [1, 2], bytes(4))}),
        (f"tensor {SCALE} is F16 [1, 2]; expected F32 or BF16 [1, 2]",),
    ),
    "scale not finite": (
        "fp8",
        lambda t: t.update({SCALE: t[SCALE].filled(255)}),
        (f"model.safetensors: tensor {SCALE} has NaN or infinite scales; expected finite",),
    ),
    "scale of nothing": (
        "v3",
        lambda t: t.update({SCALE: Raw("F32", [1, 2], bytes(8))}),
        (f"unexpected (1): model.safetensors: {SCALE}",),
    ),
    "indexer": (
        "v3",
        lambda t: t.update({"model.layers.0.self_attn.indexer.wk.weight": Raw("F32", [1], bytes(4))}),
        (
            "unexpected (1)",
            "the tensors have an indexer, as DeepSeek-V3.2 does, and config.json has no index_topk",
        ),
    ),
    "no NextN tensors": (
        "v3",
        lambda t: [t.pop(n) for n in list(t) if n.startswith("model.layers.3.")],
        (
            "num_nextn_predict_layers = 1",
            "tensors of 0",
            "enorm.weight",
            "draft_model=",
            "num_speculative_tokens=0",
        ),
    ),
    "no head": (
        "v3",
        lambda t: t.pop("lm_head.weight"),
        ("missing (1): lm_head.weight", "tie_word_embeddings = false"),
    ),
    "tied and different": (
        "tied",
        lambda t: t.update({"lm_head.weight": t[EMBED].filled(1)}),
        ("tensor lm_head.weight differs from model.embed_tokens.weight", "tie_word_embeddings = true"),
    ),
}

CONFIG: dict[str, tuple[str, dict, tuple[str, ...]]] = {
    "hidden_size": (
        "v3",
        {"hidden_size": 128},
        (f"tensor {EMBED} has shape [160, 136]; expected [160, 128]",),
    ),
    "vocab_size": ("v3", {"vocab_size": 320}, (f"tensor {EMBED} has shape [160, 136]; expected [320, 136]",)),
    "kv_lora_rank": (
        "v3",
        {"kv_lora_rank": 16},
        ("kv_a_layernorm.weight has shape [24]; expected [16]", "has shape [32, 136]; expected [24, 136]"),
    ),
    "heads": ("v3", {"num_attention_heads": 4}, ("q_b_proj.weight has shape [48, 40]; expected [96, 40]",)),
    "q_lora_rank": ("v3", {"q_lora_rank": 20}, (f"{Q} has shape [40, 136]; expected [20, 136]",)),
    "q_lora_rank absent": (
        "v3",
        {"q_lora_rank": None},
        ("missing (4): model.layers.0.self_attn.q_proj.weight", "q_lora_rank = null", "no q_proj.weight"),
    ),
    "q_lora_rank present": (
        "no_q_lora",
        {"q_lora_rank": 40},
        ("config.json says q_lora_rank = 40; the tensors have no q_a_proj.weight",),
    ),
    "fewer layers": ("v3", {"num_hidden_layers": 2}, ("num_hidden_layers = 2", "NextN layers at 3")),
    "more layers": ("v3", {"num_hidden_layers": 4}, ("num_hidden_layers = 4", "NextN layers at 3")),
    "fewer experts": (
        "group1",
        {"n_routed_experts": 4},
        ("unexpected", "n_routed_experts = 4; the tensors have 8", "gate.weight has shape [8, 136]"),
    ),
    "more experts": (
        "v3",
        {"n_routed_experts": 16},
        ("missing (72)", "n_routed_experts = 16; the tensors have"),
    ),
    "more dense layers": (
        "v3",
        {"first_k_dense_replace": 2},
        ("first_k_dense_replace = 2 (moe_layer_freq 1); the layers with experts are 1, 2", "unexpected (29)"),
    ),
    "shared experts": (
        "shared2",
        {"n_shared_experts": 1},
        ("shared_experts.gate_proj.weight has shape [48, 136]; expected [24, 136]",),
    ),
    "no shared experts": ("v3", {"n_shared_experts": 0}, ("unexpected (9)", "shared_experts")),
    "more NextN layers": (
        "v3",
        {"num_nextn_predict_layers": 2},
        ("num_nextn_predict_layers = 2", "tensors of 1"),
    ),
    "fewer NextN layers": (
        "mtp2",
        {"num_nextn_predict_layers": 1},
        ("num_nextn_predict_layers = 1", "tensors of 2", "model.layers.4.enorm.weight is there"),
    ),
    "NextN denied": (
        "v3",
        {"num_nextn_predict_layers": 0},
        ("num_nextn_predict_layers = 0", "correct config.json"),
    ),
    "not fp8": (
        "fp8",
        {"quantization_config": None},
        (f"tensor {Q} has dtype F8_E4M3", "no quantization_config"),
    ),
    "not in fp8": (
        "v3",
        {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}},
        ("announces fp8, but no tensor has dtype F8_E4M3",),
    ),
}


def fails(folder: Path, fragments: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for fragment in (str(folder), *fragments):
        assert fragment in str(caught.value)
    assert len(str(caught.value)) < 6000


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_do_not_fit(tmp_path: Path, kind: str):
    variant, change, fragments = TENSORS[kind]
    fails(edit_tensors(model_dir(variant), tmp_path / "model", change), fragments)


@pytest.mark.parametrize("kind", CONFIG)
def test_config_that_does_not_fit(tmp_path: Path, kind: str):
    variant, changes, fragments = CONFIG[kind]
    folder = copy_folder(model_dir(variant), tmp_path / "model")
    edit_json(folder / "config.json", **changes)
    fails(folder, fragments)


def test_a_summary_finds_the_same(tmp_path: Path):
    folder = edit_tensors(model_dir("v3"), tmp_path / "model", lambda t: t.pop(NORM))
    with pytest.raises(CheckpointError, match=r"missing \(1\): model\.norm\.weight"):
        summarise(folder)


def test_unsupported_models_are_refused_first(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v41"}')
    with pytest.raises(ConfigError, match=r"deepseek_v41.*two levels"):
        load(tmp_path)


def test_unknown_dtype_to_load_as():
    with pytest.raises(ConfigError, match="'float16' is not supported; expected one of float32, bfloat16"):
        load(model_dir("v3"), dtype="float16")


@pytest.mark.parametrize(("count", "expected"), [(2, "expected 0 to 1"), (-1, "expected 0 to 1")])
def test_number_of_nextn_layers(count: int, expected: str):
    with pytest.raises(CheckpointError, match=expected):
        load(model_dir("v3"), num_nextn_layers=count)


def test_a_nextn_layer_without_its_norm_is_no_layer_of_the_trunk(tmp_path: Path):
    name = "model.layers.3.enorm.weight"
    folder = edit_tensors(model_dir("v3"), tmp_path / "model", lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=rf"missing \(1\): {name}") as error:
        load(folder)
    assert "num_hidden_layers" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 16_384}, r"num_hidden_layers = 16384; the tensors have \d trunk layers"),
        ({"n_routed_experts": 16_384}, r"n_routed_experts = 16384; the tensors have \d+"),
    ],
)
def test_more_layers_than_tensors_are_refused_before_names_are_made(tmp_path, changes, message, monkeypatch):
    folder = copy_folder(model_dir("eagle3"), tmp_path / "model")
    edit_json(folder / "config.json", **changes)
    monkeypatch.setattr("mtp_jax.checkpoint.plan.param_specs", lambda *given: pytest.fail("names were made"))
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_long_names_are_shortened(tmp_path: Path):
    """Names of tensors that nothing expects, and of an index."""
    name, head = "x" * 100_000, model_dir("eagle3", "draft")
    extra = Raw("F32", [1], bytes(4))
    folder = edit_tensors(model_dir("v3"), tmp_path / "model", lambda t: t.update({name: extra}))
    fails(folder, ("unexpected (1): model.safetensors: xxx", "xxx..."))
    drafts = edit_tensors(head, tmp_path / "head", lambda t: t.update({name: extra}))
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): model\.safetensors: x{200}\.\.\.") as error:
        load(model_dir("eagle3"), drafts)
    assert len(str(error.value)) < 6000
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"{name}y": "model.safetensors"}}))
    fails(folder, ("tensor xxx", "it is in no shard"))
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: "../x"}}))
    fails(folder, ("xxx... is said to be in '../x'",))
