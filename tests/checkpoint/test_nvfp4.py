"""NVFP4 checkpoints in the layouts of ModelOpt and of compressed-tensors, and a twin dequantised by hand."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from mtp_jax.checkpoint import load, make_random, save_checkpoint, summarise
from mtp_jax.checkpoint.update import read_update
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.lab.planning.weights import Storage
from mtp_jax.model.family import config_json, config_of
from mtp_jax.model.narrow import Nvfp4, expand, is_narrow
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import make_mesh
from tests.checkpoint.files import (
    Raw,
    Tensors,
    assert_same,
    copy_folder,
    edit_json,
    edit_tensors,
    read_folder,
    write_raw,
)
from tests.checkpoint.int4_files import CONFIG, raw
from tests.models import GREEDY, accepted, make_engine, prompts, rigged, serve

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
CFG = replace(CONFIG, intermediate_size=64)  # so that a mesh splits no group
UP = "model.layers.1.mlp.experts.3.up_proj.weight"  # [32, 64]
_OF_WEIGHTS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
MODELOPT: dict[str, Any] = {
    "config_groups": {"group_0": {"weights": _OF_WEIGHTS, "targets": ["Linear"]}},
    "ignore": ["lm_head", "model.layers.*.self_attn*"],
    "quant_algo": "NVFP4",
    "quant_method": "modelopt",
}
COMPRESSED: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": "local", "num_bits": 4, "type": "float", "group_size": 16},
            "output_activations": None,
            "weights": {**_OF_WEIGHTS, "strategy": "tensor_group", "symmetric": True},
        }
    },
    "format": "nvfp4-pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


@dataclass(frozen=True)
class Folders:
    """One model in both layouts, and the twins that their weights are."""

    modelopt: Path
    compressed: Path
    plain: Path
    plain_compressed: Path


def quantised(w: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random codes, two to a byte, positive e4m3 scales, and a number for the whole weight."""
    codes = rng.integers(0, 256, (w.shape[0], w.shape[1] // 2)).astype(np.uint8)
    scale = rng.uniform(0.01, 448, (w.shape[0], w.shape[1] // 16)).astype(ml_dtypes.float8_e4m3fn)
    return codes, scale, np.array(rng.uniform(0.5, 2) / 3000, np.float32)


def wide(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Values times scales of their groups, product by product."""
    out = np.zeros((codes.shape[0], codes.shape[1] * 2), np.float32)
    for row, column in np.ndindex(*codes.shape):
        byte, own = int(codes[row, column]), scale[row, column // 8]
        out[row, 2 * column] = np.float32(E2M1[byte & 15]) * own
        out[row, 2 * column + 1] = np.float32(E2M1[byte >> 4]) * own
    return out


def write(folder: Path, tensors: Tensors, config: dict[str, Any], quant: dict[str, Any] | None) -> Path:
    folder.mkdir()
    write_raw(folder / "model.safetensors", tensors)
    told = config if quant is None else config | {"quantization_config": quant}
    (folder / "config.json").write_text(json.dumps(told))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """All MLPs are narrow but the NextN layer's, which stays in float32 as do attention and head."""
    at, rng = tmp_path_factory.mktemp("nvfp4"), np.random.default_rng(5)
    save_checkpoint(at / "source", CFG, rigged(CFG), dtype="float32")
    tensors, config = read_folder(at / "source"), json.loads((at / "source" / "config.json").read_text())
    found = [dict(tensors) for _ in range(4)]
    modelopt, compressed, plain, divided = found
    for name in [n for n in tensors if ".mlp." in n and n.endswith("proj.weight") and ".layers.2." not in n]:
        w = np.frombuffer(tensors[name].data, np.float32).reshape(tensors[name].shape)
        codes, scale, whole = quantised(w, rng)
        over, stem = np.array(1 / whole, np.float32), name.removesuffix("weight")
        del modelopt[name], compressed[name]
        modelopt |= {name: raw(codes), f"{name}_scale": raw(scale)}
        modelopt |= {f"{name}_scale_2": raw(whole), f"{stem}input_scale": raw(np.array(0.1, np.float32))}
        compressed |= {f"{name}_packed": raw(codes), f"{name}_scale": raw(scale)}
        compressed |= {f"{name}_global_scale": raw(over[None]), f"{stem}input_global_scale": raw(over[None])}
        plain[name] = raw(wide(codes, scale.astype(np.float32) * whole))
        divided[name] = raw(wide(codes, scale.astype(np.float32) / over))
    modelopt["model.layers.0.self_attn.k_proj.k_scale"] = raw(np.array(1, np.float32))
    return Folders(
        write(at / "modelopt", modelopt, config, MODELOPT),
        write(at / "compressed", compressed, config, COMPRESSED),
        write(at / "plain", plain, config, None),
        write(at / "divided", divided, config, None),
    )


def expanded(params: Params) -> Params:
    grown = jax.jit(lambda p: jax.tree.map(lambda w: expand(w, "float32"), p, is_leaf=is_narrow))
    return grown(params)


@pytest.mark.parametrize("layout", ["modelopt", "compressed"])
def test_weights_are_the_twin_s(folders, layout):
    """To the bit, kept narrow or not; a weight in bfloat16 is rounded once."""
    folder = getattr(folders, layout)
    twin = folders.plain if layout == "modelopt" else folders.plain_compressed
    want = load(twin).params
    kept = load(folder, narrow="keep")
    narrow = [w for w in jax.tree.leaves(kept.params, is_leaf=is_narrow) if is_narrow(w)]
    assert {type(w) for w in narrow} == {Nvfp4}
    assert len(narrow) == 2 + 4  # a dense layer's, and an MoE layer's with its shared expert
    assert_same(expanded(kept.params), want)
    assert_same(load(folder, narrow="dequantise").params, want)
    halves = load(folder, dtype="bfloat16", narrow="dequantise").params
    assert_same(halves, jax.tree.map(lambda a, b: a.astype(b.dtype), want, halves))
    assert kept.config.nvfp4 == ("modelopt" if layout == "modelopt" else "compressed-tensors")


def test_a_config_of_modelopt_beside_the_model_s(folders, tmp_path):
    folder = copy_folder(folders.modelopt, tmp_path / "model")
    edit_json(folder / "config.json", quantization_config=None)
    told = {"producer": {}, "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": []}}
    (folder / "hf_quant_config.json").write_text(json.dumps(told))
    assert_same(load(folder).params, load(folders.modelopt).params)
    assert "nvfp4" in summarise(folder).text()


def test_it_is_described(folders, tmp_path):
    """A folder without weights has its experts in NVFP4, and random weights of their types."""
    assert "as nvfp4" in summarise(folders.modelopt).text()
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folders.modelopt / "config.json").read_text())
    assert "as nvfp4" in summarise(bare).text()
    made = make_random(bare, narrow="keep").params
    own = [w for w in jax.tree.leaves(made, is_leaf=is_narrow) if is_narrow(w)]
    assert {type(w) for w in own} == {Nvfp4}
    assert Storage.of(load(folders.modelopt).config).experts.name == "nvfp4"


@pytest.mark.rest
def test_over_a_mesh_and_in_an_update(folders):
    mesh = make_mesh(2, 2)
    split = load(folders.modelopt, narrow="keep", mesh=mesh)
    assert_same(expanded(split.params), load(folders.plain).params)
    now = load(folders.modelopt, narrow="keep")
    new = read_update(now.config, now.params, folders.modelopt, None, dtype="float32", keep_draft=False)
    assert_same(new, now.params)


@pytest.mark.rest
def test_an_engine_multiplies_them(folders):
    """Tokens and accepted drafts are those of the twin."""
    kept, plain = load(folders.modelopt), load(folders.plain)
    assert any(isinstance(w, Nvfp4) for w in jax.tree.leaves(kept.params, is_leaf=is_narrow))
    jobs = [(p, GREEDY) for p in prompts(3)]
    got, want = (serve(make_engine(found.params, found.config), jobs) for found in (kept, plain))
    for a, b in zip(got, want, strict=True):
        assert (a.progress.output, accepted(a)) == (b.progress.output, accepted(b))
    assert sum(map(sum, map(accepted, got))) > 0


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


WRONG: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "no scales": ("modelopt", without(f"{UP}_scale"), rf"missing \(1\): {UP}_scale"),
    "no whole": ("modelopt", without(f"{UP}_scale_2"), rf"missing \(1\): {UP}_scale_2"),
    "fewer": (
        "modelopt",
        lambda t: t.update({f"{UP}_scale": Raw("F8_E4M3", [32, 2], bytes(64))}),
        r"is F8_E4M3 \[32, 2\]; expected F8_E4M3 \[32, 4\]: one scale per 16 inputs",
    ),
    "NaN": (
        "compressed",
        lambda t: t.update({f"{UP}_scale": t[f"{UP}_scale"].filled(0x7F)}),
        "has NaN or infinite scales",
    ),
    "by nothing": (
        "compressed",
        lambda t: t.update({f"{UP}_global_scale": t[f"{UP}_global_scale"].filled(0)}),
        "is 0, which divides",
    ),
    "a zero point": (
        "compressed",
        lambda t: t.update({f"{UP}_zero_point": raw(np.zeros(1, np.float32))}),
        r"unexpected \(1\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_do_not_fit(folders, tmp_path, case):
    layout, change, message = WRONG[case]
    with pytest.raises(CheckpointError, match=message):
        load(edit_tensors(getattr(folders, layout), tmp_path / "model", change))


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        (MODELOPT | {"group_size": 32}, "NVFP4 with groups of .*32.* inputs is not supported; expected 16"),
        (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, "'modelopt' is not supported, quant_algo = 'MIXED"),
        (MODELOPT | {"quant_algo": None}, "'modelopt' is not supported"),
    ],
)
def test_what_config_json_may_not_say(quant, message):
    with pytest.raises(ConfigError, match=message):
        config_of(config_json(CFG) | {"quantization_config": quant})
