"""What config.json may say of int4 weights, and a reason for everything that is refused."""

import json
from typing import Any

import pytest

from mtp_jax.errors import ConfigError
from mtp_jax.model.family import config_json, config_of
from tests.checkpoint.compressed import BLOCKS, MXFP4
from tests.checkpoint.int4_files import CONFIG, QUANTISATION

PLAIN = config_json(CONFIG) | {"model_type": "kimi_k2"}
INT4 = PLAIN | {"quantization_config": QUANTISATION}


def changed(top: dict[str, Any] | None = None, group: Any = None, **weights: Any) -> dict[str, Any]:
    """The config with other values: of the whole, of the group of layers, of its weights."""
    quant = json.loads(json.dumps(QUANTISATION)) | (top or {})
    for first in quant["config_groups"].values():
        first["weights"] |= weights
        first |= group or {}
    return PLAIN | {"quantization_config": quant}


def test_groups_of_inputs():
    assert config_of(INT4).int4_group == 32
    assert not config_of(INT4).fp8
    assert config_of(PLAIN).int4_group is None
    assert "quantization_config" not in config_json(config_of(INT4))


NEUTRAL = {
    "dense": changed({"sparsity_config": {"format": "dense"}, "transform_config": {}}),
    "by group": changed({"format": "mixed-precision"}, {"format": "pack-quantized"}),
    "left out": changed(strategy=None, symmetric=None, dynamic=None),
    "two groups": changed(
        {"config_groups": dict.fromkeys(("group_0", "group_1"), QUANTISATION["config_groups"]["group_0"])}
    ),
}


@pytest.mark.parametrize("case", NEUTRAL)
def test_what_changes_nothing(case: str):
    assert config_of(NEUTRAL[case]).int4_group == 32


ACTIVATIONS = {"num_bits": 8, "type": "int", "dynamic": True}
OTHER = {"weights": QUANTISATION["config_groups"]["group_0"]["weights"] | {"group_size": 16}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "awq": (
        PLAIN | {"quantization_config": {"quant_method": "awq", "bits": 4}},
        "quantization 'awq' is not supported; expected fp8 with 128x128 blocks, int4 as compressed-tensors",
    ),
    "a word": (PLAIN | {"quantization_config": "fp8"}, "'fp8' is not supported, as it is no object"),
    "gptq": (PLAIN | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq' is not supported"),
    "nvfp4": (PLAIN | {"quantization_config": {"quant_method": "modelopt"}}, "'modelopt' is not supported"),
    "nvfp4, packed": (changed({"format": "nvfp4-pack-quantized"}), "weights.type = 'int'"),
    "mxfp4 of integers": (changed(group={"format": "mxfp4-pack-quantized"}), "weights.type = 'int'"),
    "int8": (
        changed({"format": "int-quantized"}),
        "group_0.format = 'int-quantized' is not supported; expected 'pack-quantized' or 'float-quantized'",
    ),
    "8 bits": (changed(num_bits=8), "group_0.weights.num_bits = 8 is not supported; expected 4"),
    "3 bits": (changed(num_bits=3), "num_bits = 3"),
    "floats": (changed(type="float"), "type = 'float' is not supported; expected 'int'"),
    "asymmetric": (changed(symmetric=False), "symmetric = False is not supported; expected True"),
    "actorder": (changed(actorder="group"), "actorder = 'group' is not supported; expected None"),
    "static actorder": (changed(actorder="static"), "actorder = 'static'"),
    "by channel": (changed(strategy="channel", group_size=None), "strategy = 'channel'"),
    "no group": (changed(group_size=-1), "group_size = -1 is not supported; expected a number of inputs"),
    "no number": (changed(group_size=True), "group_size = True"),
    "does not divide": (changed(group_size=48), "hidden_size = 64; expected a multiple of 48"),
    "of experts": (changed(group_size=64), "moe_intermediate_size = 32; expected a multiple of 64"),
    "dynamic": (changed(dynamic=True), "dynamic = True"),
    "inputs": (changed(group={"input_activations": ACTIVATIONS}), "group_0.input_activations = {"),
    "outputs": (changed(group={"output_activations": ACTIVATIONS}), "group_0.output_activations = {"),
    "no weights": (changed(group={"weights": None}), "group_0.weights = None; expected an object"),
    "cache": (changed({"kv_cache_scheme": ACTIVATIONS}), "kv_cache_scheme = {"),
    "sparse": (changed({"sparsity_config": {"format": "sparse-24-bitmask"}}), "sparsity_config = {"),
    "rotated": (changed({"transform_config": {"config_groups": {"u": {}}}}), "transform_config = {"),
    "not packed": (changed({"quantization_status": "frozen"}), "quantization_status = 'frozen'"),
    "no groups": (changed({"config_groups": {}}), "config_groups = {}; expected an object each"),
    "two sizes": (
        changed({"config_groups": QUANTISATION["config_groups"] | {"group_1": OTHER}}),
        "groups of 16 and 32 inputs is not supported; expected one group_size",
    ),
}  # fmt: skip


def fp8(group: Any = None, **weights: Any) -> dict[str, Any]:
    """A config of FP8 blocks, with other values of its group and of the group's weights."""
    quant = json.loads(json.dumps(BLOCKS))
    quant["config_groups"]["group_0"] |= group or {}
    quant["config_groups"]["group_0"]["weights"] |= weights
    return PLAIN | {"quantization_config": quant}


REFUSED |= {
    "fp8 per channel": (fp8(strategy="channel"), "strategy = 'channel' is not supported; expected 'block'"),
    "fp8 per tensor": (fp8(strategy="tensor"), "strategy = 'tensor' is not supported; expected 'block'"),
    "fp8 of other blocks": (fp8(block_structure=[64, 64]), "block_structure = [64, 64]"),
    "fp8 of no blocks": (fp8(block_structure=None), "block_structure = None is not supported; expected [128"),
    "fp8 of integers": (fp8(type="int"), "type = 'int' is not supported; expected 'float'"),
    "fp8 with static inputs": (
        fp8({"input_activations": {"num_bits": 8, "type": "float", "dynamic": False}}),
        "group_0.input_activations = {",
    ),
    "fp8 of the release, other blocks": (
        PLAIN | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
        "weight_block_size [64, 64]",
    ),
}


@pytest.mark.parametrize("inputs", ["as they come", "left alone"])
def test_fp8_in_blocks(inputs: str):
    left = {"input_activations": None} if inputs == "left alone" else {}
    found = config_of(fp8(left))
    assert (found.fp8, found.fp4, found.int4_group) == (True, False, None)


def test_groups_of_several_formats():
    groups = {
        "attention": BLOCKS["config_groups"]["group_0"] | {"format": "float-quantized"},
        "experts": QUANTISATION["config_groups"]["group_0"] | {"format": "pack-quantized"},
    }
    quant = BLOCKS | {"format": "mixed-precision", "config_groups": groups}
    found = config_of(PLAIN | {"quantization_config": quant})
    assert (found.fp8, found.fp4, found.int4_group) == (True, False, 32)
    groups["experts"] = MXFP4
    found = config_of(PLAIN | {"quantization_config": quant})
    assert (found.fp8, found.fp4, found.int4_group) == (True, True, None)


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str):
    raw, message = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        config_of(raw)
    assert message in str(error.value)


def nested(outer: dict[str, Any] | None = None, **text: Any) -> dict[str, Any]:
    """As Kimi-K2.5's: a text model in a config that has more beside it."""
    inner = INT4 | {k: v for k, v in text.items() if k != "text_config"}
    return {"model_type": "kimi_k25", "text_config": inner, "vision_config": {}} | (outer or {})


def test_the_text_part_of_a_multimodal_config():
    plain = config_of(INT4)
    assert config_of(nested()) == plain
    assert config_of(nested(model_type="deepseek_v3")) == plain
    moved = nested({"quantization_config": QUANTISATION}, quantization_config=None)
    assert config_of(moved) == plain
    assert config_of(nested({"quantization_config": QUANTISATION})) == plain
    outside = nested(
        {"dtype": "float32", "eos_token_id": [3, 4]}, torch_dtype=None, dtype=None, eos_token_id=None
    )
    assert config_of(outside).dtype == "float32"
    assert config_of(outside).eos_token_ids == (3, 4)
    assert config_of(nested({"dtype": "float16"})).dtype == plain.dtype


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "kimi_k25"}, "kimi_k25 with a text_config of None is not supported"),
        (nested(model_type="llama"), "text_config of 'llama' is not supported; expected an object"),
        (nested({"quantization_config": {"quant_method": "fp8"}}), "quantization_config differs"),
    ],
    ids=["no text", "another model", "two quantisations"],
)  # fmt: skip
def test_what_it_must_nest(raw: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as error:
        config_of(raw)
    assert message in str(error.value)
