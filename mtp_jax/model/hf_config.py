"""A Hugging Face ``config.json`` in either dialect, read strictly.

Released DeepSeek checkpoints write ``rope_theta`` + ``rope_scaling`` + ``torch_dtype``; transformers 5 writes
``rope_parameters`` + ``dtype``. Both are read. What the engine cannot run is refused here, with the reason.
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mtp_jax.errors import ConfigError

FP8_BLOCK = 128

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_MODEL_TYPES = {"deepseek_v3", "kimi_k2", "glm4_moe_lite", "joyai_llm_flash"}
_INDEXER = "its sparse attention indexer is not implemented"
_HYBRID = "its layers mix other kinds of attention with MLA"
_REFUSED = {
    "deepseek_v4": "its compressed sparse attention and hyper-connections are a different architecture",
    "deepseek_v32": _INDEXER,
    "deepseek_v2": "its softmax router is not implemented",
    "glm_moe_dsa": _INDEXER,
    "glm5_next": _HYBRID,
    "glm4_moe": "it uses grouped-query attention instead of MLA",
    "kimi_k3": _HYBRID,
    "kimi_k25": "it nests a text model beside a vision model",
    "mistral4": "its softmax router and query scaling are not implemented",
    "longcat_flash": "its double attention blocks and zero experts are not implemented",
}


def missing_folder(path: Path) -> str:
    """The message where a model's path is no folder; the name of a model on a hub gets a hint."""
    message = f"{path} is not a directory; name one with config.json and safetensors"
    if _HUB_NAME.fullmatch(str(path)):
        message += f". Nothing is downloaded here: hf download {path} --local-dir DIR, then name DIR"
    return message + _gguf_hint([path] if path.is_file() else [])


def _gguf_hint(files: Iterable[Path]) -> str:
    """What to say of a model in the format of llama.cpp."""
    found = sorted(file.name for file in files if file.suffix == ".gguf")
    return f". {found[0]} is GGUF, which is not read: take the safetensors of the release" if found else ""


def read_json(path: str | Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError naming the file."""
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        message = f"{path} does not exist; a model directory holds config.json and safetensors"
        if not path.parent.is_dir():
            raise ConfigError(missing_folder(path.parent)) from e
        raise ConfigError(message + _gguf_hint(path.parent.iterdir())) from e
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is not readable JSON: {e}") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value


def translate(raw: dict[str, Any]) -> dict[str, Any]:
    """What the dialects write in their own ways, as values of the fields of ``ModelConfig``.

    ``rope_scaling`` holds the arguments of ``YarnConfig``, None without. Raises ConfigError for a model that
    the engine cannot run.
    """
    _refuse_unsupported(raw)
    eos = raw.get("eos_token_id")
    return {
        **_dense_layers(raw),
        **_rope(raw),
        "dtype": _dtype(raw),
        "fp8": _fp8(raw),
        "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    }


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    kind = raw.get("model_type")
    if kind is None:  # the architecture's name says it as well
        named = raw.get("architectures")
        first = str(named[0]) if isinstance(named, list) and named else "DeepseekV3ForCausalLM"
        kind = "deepseek_v3" if first.startswith(("DeepseekV3For", "DeepseekMTPFor")) else first
    if str(kind).removesuffix("_mtp") not in _MODEL_TYPES:  # xLLM's name for an export of the NextN layer
        plain = str(kind).lower().replace("_", "")
        reasons = [r for k, r in _REFUSED.items() if plain.startswith(k.replace("_", ""))]
        why = f": {reasons[0]}" if reasons else f"; expected one of {', '.join(sorted(_MODEL_TYPES))}"
        raise ConfigError(f"model_type {kind!r} is not supported{why}")
    if raw.get("index_topk") is not None or raw.get("index_n_heads") is not None:
        raise ConfigError(f"the config has index_topk, as DeepSeek-V3.2 does: {_INDEXER}")
    for key, allowed in (
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("partial_rotary_factor", 1),
    ):
        for given in (raw, raw.get("rope_parameters")):
            got = given.get(key) if isinstance(given, dict) else None
            if got is not None and got != allowed:
                raise ConfigError(f"{key} = {got!r:.200} is not supported; expected {allowed!r}")


def _dense_layers(raw: dict[str, Any]) -> dict[str, Any]:
    """first_k_dense_replace from transformers 5's list of layer types."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return {}
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if not isinstance(kinds, list) or kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise ConfigError(
            f"mlp_layer_types = {kinds!r:.200} is not supported; expected 'dense's, then 'sparse's"
        )
    return {} if raw.get("first_k_dense_replace") is not None else {"first_k_dense_replace": dense}


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    rope, scaling = (raw.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    if not isinstance(rope, dict) or not isinstance(scaling, dict):
        raise ConfigError(
            f"rope_parameters = {rope!r:.200}, rope_scaling = {scaling!r:.200}; expected objects or null"
        )
    given = [d["rope_theta"] for d in (raw, scaling, rope) if d.get("rope_theta") is not None]
    thetas = {_number("rope_theta", value) for value in given} or {10000.0}
    if len(thetas) > 1:
        both = " and ".join(map(str, sorted(thetas)))
        raise ConfigError(f"rope_theta is given as {both}; expected one value")
    yarn = _yarn(raw, scaling) or _yarn(raw, rope)
    return {"rope_theta": thetas.pop(), "rope_scaling": yarn}


def _yarn(raw: dict[str, Any], scaling: dict[str, Any]) -> dict[str, Any] | None:
    kind = scaling.get("rope_type") or scaling.get("type") or ("none" if "factor" in scaling else "default")
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(f"rope scaling {kind!r} is not supported; expected 'yarn' or null")
    if scaling.get("truncate") is False:
        raise ConfigError(
            "yarn rope scaling with truncate = false is not supported; expected true or no such key"
        )
    names = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
    values = {name: _number(name, scaling[name]) for name in names if scaling.get(name) is not None}
    if "factor" not in values:
        raise ConfigError(f"yarn rope scaling has no factor: {scaling!r:.200}")
    original = scaling.get("original_max_position_embeddings") or raw.get("max_position_embeddings")
    return {"original_max_position_embeddings": original, **values}


def _number(name: str, value: Any) -> float:
    if not is_number(value):
        raise ConfigError(f"{name} = {value!r:.200}; expected a number")
    return float(value)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number that a float can hold; JSON has longer ones, and NaN."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _dtype(raw: dict[str, Any]) -> str:
    """The narrowest dtype that holds the weights exactly and that programs compute in.

    float16 has three more bits of precision than bfloat16 and less range, so that float32 it is.
    """
    name = str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype {name!r:.80} is not supported; expected float32, bfloat16 or float16")
    return "float32" if name == "float16" else name


def _fp8(raw: dict[str, Any]) -> bool:
    """Whether weights are stored as e4m3 in 128x128 blocks; their scales may be powers of two or not."""
    quant, mlx = raw.get("quantization_config"), raw.get("quantization")
    if isinstance(mlx, dict) and "group_size" in mlx:  # which mlx repeats under the other name
        raise ConfigError(
            f"quantization of {mlx.get('bits')} bits by mlx is not supported; expected fp8 with 128x128 "
            "blocks, or none"
        )
    if not quant:  # xLLM's export writes the empty string
        return False
    if not isinstance(quant, dict) or quant.get("quant_method") != "fp8":
        method = quant.get("quant_method") if isinstance(quant, dict) else quant
        raise ConfigError(f"quantization {method!r} is not supported; expected fp8 with 128x128 blocks")
    if quant.get("weight_block_size") != [FP8_BLOCK, FP8_BLOCK] or quant.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(
            f"fp8 with weight_block_size {quant.get('weight_block_size')} and fmt {quant.get('fmt')} is not "
            "supported; expected [128, 128] and e4m3"
        )
    if quant.get("activation_scheme", "dynamic") != "dynamic":
        raise ConfigError(
            f"fp8 with activation_scheme {quant['activation_scheme']!r} is not supported; expected 'dynamic'"
        )
    return True
