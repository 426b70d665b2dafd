"""A Hugging Face ``config.json`` in either dialect, read strictly.

Released DeepSeek checkpoints write ``rope_theta`` + ``rope_scaling`` + ``torch_dtype``; transformers 5 writes
``rope_parameters`` + ``dtype``. Both dialects are read. A model that the engine cannot run is refused, with
the reason.
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject, is_number
from mtp_jax.model.attention_config import GqaConfig, IndexerConfig
from mtp_jax.model.hf_quantization import quantisation
from mtp_jax.model.hf_v4 import v4_parts, yarn_source

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# Models with sparse attention, and whether the indexer's rope pairs neighbours if the config does not say.
_SPARSE = {"deepseek_v32": False, "glm_moe_dsa": True}
_GQA = "glm4_moe"
_V4 = "deepseek_v4"
_MODEL_TYPES = {"deepseek_v3", "kimi_k2", "glm4_moe_lite", "joyai_llm_flash", _GQA, _V4, *_SPARSE}
_HYBRID = "its layers mix other kinds of attention with MLA"
_REFUSED = {
    "deepseek_v41": "its layers share compressed caches and choose in two levels, which DeepSeek-V4's do not",
    "deepseek_v2": "its softmax router is not implemented",
    "glm5_next": _HYBRID,
    "kimi_k3": _HYBRID,
    "mistral4": "its softmax router and query scaling are not implemented",
    "longcat_flash": "its double attention blocks and zero experts are not implemented",
}


# Multimodal models, and the names of the text model that each of them nests.
_NESTING = {"kimi_k25": ("deepseek_v3", "kimi_k2")}
# Keys that the outer config may have for the text model, each read under the first name that is present.
_FROM_OUTSIDE = (
    ("quantization_config",),
    ("torch_dtype", "dtype"),
    ("bos_token_id",),
    ("eos_token_id",),
    ("tie_word_embeddings",),
)


def missing_folder(path: Path) -> str:
    """The message where a model's path is no folder; the name of a model on a hub gets a hint."""
    message = f"{path} is not a directory; name one with config.json and safetensors"
    if _HUB_NAME.fullmatch(str(path)):
        message += f". Nothing is downloaded here: hf download {path} --local-dir DIR, then name DIR"
    return message + _gguf_hint([path] if os.path.isfile(path) else [])


def _gguf_hint(files: Iterable[Path]) -> str:
    """An error sentence about a model in the format of llama.cpp."""
    found = sorted(file.name for file in files if file.suffix == ".gguf")
    return f". {found[0]} is GGUF, which is not read: take the safetensors of the release" if found else ""


def read_json(path: str | Path) -> JsonObject:
    """A JSON object from a file. Raises ConfigError naming the file."""
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        message = f"{path} does not exist; a model directory holds config.json and safetensors"
        if not os.path.isdir(path.parent):
            raise ConfigError(missing_folder(path.parent)) from e
        raise ConfigError(message + _gguf_hint(path.parent.iterdir())) from e
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is not readable JSON: {e}") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value


def text_part(raw: JsonObject) -> JsonObject:
    """The config of the text model in that of a multimodal one; any other config as it is.

    Raises ConfigError for a multimodal model without a known text model.
    """
    kind = _model_type(raw)
    if kind not in _NESTING:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, dict) or _model_type(text) not in _NESTING[kind]:
        got = _model_type(text) if isinstance(text, dict) else text
        raise ConfigError(
            f"{kind} with a text_config of {got!r:.80} is not supported; expected an object with model_type "
            f"{' or '.join(_NESTING[kind])}"
        )
    outside = {}
    for names in _FROM_OUTSIDE:
        if all(text.get(name) is None for name in names):
            outside |= {name: raw[name] for name in names if raw.get(name) is not None}
    both = [config.get("quantization_config") for config in (raw, text)]
    if all(both) and both[0] != both[1]:
        raise ConfigError("quantization_config differs from that in text_config; expected one of them")
    return text | outside


def translate(raw: JsonObject) -> JsonObject:
    """Fields of ``ModelConfig`` that the dialects write in different ways.

    ``rope_scaling``, ``indexer``, ``gqa``, ``compressed`` and ``hyper`` hold the arguments of their classes,
    None without. Raises
    ConfigError for a model that the engine cannot run.
    """
    _refuse_unsupported(raw)
    eos, v4 = raw.get("eos_token_id"), _model_type(raw) == _V4
    if v4:
        own = v4_parts(raw) | {"rope_scaling": _yarn(raw, yarn_source(raw)), "indexer": None, "gqa": None}
    else:
        own = {**_dense_layers(raw), **_rope(raw), "indexer": _indexer(raw), **_gqa(raw), **_NOT_V4}
    return {
        **own,
        **quantisation(raw),
        "dtype": _dtype(raw),
        "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    }


_NOT_V4 = {"compressed": None, "hyper": None, "swiglu_limit": None, "num_hash_layers": 0}


def _refuse_unsupported(raw: JsonObject) -> None:
    kind = _model_type(raw)
    if kind not in _MODEL_TYPES:
        plain = re.sub("[_.]", "", str(kind).lower())
        reasons = [r for k, r in _REFUSED.items() if plain.startswith(k.replace("_", ""))]
        known = ", ".join(sorted({*_MODEL_TYPES, *_NESTING}))
        why = f": {reasons[0]}" if reasons else f"; expected one of {known}"
        raise ConfigError(f"model_type {kind!r} is not supported{why}")
    for key, allowed in (
        ("scoring_func", "sqrtsoftplus" if kind == _V4 else "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("hidden_act", "silu"),
        *(() if kind == _GQA else (("attention_bias", False),)),
        *(() if kind in (_GQA, _V4) else (("partial_rotary_factor", 1),)),
    ):
        for given in (raw, raw.get("rope_parameters")):
            got = given.get(key) if isinstance(given, dict) else None
            if got is not None and got != allowed:
                raise ConfigError(f"{key} = {got!r:.200} is not supported; expected {allowed!r}")


_ARCHITECTURES = {
    "DeepseekV3For": "deepseek_v3",
    "DeepseekMTPFor": "deepseek_v3",
    "DeepseekV32For": "deepseek_v32",
    "GlmMoeDsaFor": "glm_moe_dsa",
    "Glm4MoeFor": "glm4_moe",
    "DeepseekV4For": "deepseek_v4",
}


def _model_type(raw: JsonObject) -> str:
    """model_type, or the type in the architecture's name; for a lone NextN layer that of its trunk."""
    kind = raw.get("model_type")
    if kind is None:
        named = raw.get("architectures")
        first = str(named[0]) if isinstance(named, list) and named else "DeepseekV3ForCausalLM"
        kind = next((k for prefix, k in _ARCHITECTURES.items() if first.startswith(prefix)), first)
    return str(kind).removesuffix("_mtp")  # xLLM's name for an export of the NextN layer


def _indexer(raw: JsonObject) -> JsonObject | None:
    """The sparse attention's indexer: arguments of ``IndexerConfig``, None without."""
    kind = _model_type(raw)
    found = {f: raw[name] for f, name in IndexerConfig.KEYS.items() if raw.get(name) is not None}
    needed = {field: IndexerConfig.KEYS[field] for field in ("heads", "dim", "topk")}
    if not found.keys() & needed.keys() and kind not in _SPARSE:
        return None
    if lacks := [name for field, name in needed.items() if field not in found]:
        raise ConfigError(f"config.json lacks {', '.join(lacks)}; sparse attention needs {_listed(needed)}")
    return {"interleaved": _SPARSE.get(kind, False), "shared": _shared(raw), **found}


def _gqa(raw: JsonObject) -> JsonObject:
    """Grouped-query attention: arguments of ``GqaConfig``, None where attention is MLA."""
    if _model_type(raw) != _GQA:
        return {"gqa": None}
    names = GqaConfig.KEYS
    nested = raw.get("rope_parameters")
    given = (nested if isinstance(nested, dict) else {}, raw)
    found: JsonObject = {}
    for field, name in names.items():
        values = [d[name] for d in given if d.get(name) is not None]
        if any(v != values[0] for v in values):
            both = " and ".join(f"{v!r:.80}" for v in values)
            raise ConfigError(f"{name} is given as {both}; expected one value")
        found |= {field: values[0]} if values else {}
    # Without the other two keys the checkpoint lacks such tensors, which a load would report.
    if lacks := [names[field] for field in ("kv_heads", "head_dim", "rotary") if field not in found]:
        raise ConfigError(f"config.json lacks {', '.join(lacks)}; {_GQA} has grouped-query attention")
    interleaved = raw.get("rope_interleave")
    return {"gqa": found, "rope_interleave": False if interleaved is None else interleaved}


def _listed(names: dict[str, str]) -> str:
    return " and ".join((", ".join([*names.values()][:-1]), [*names.values()][-1]))


def _shared(raw: JsonObject) -> tuple[bool, ...]:
    """Whether each layer attends to the choice of the layer before it.

    config.json gives a list, letters, or a frequency and an offset: the first that is there counts (SGLang).
    """
    layers = raw.get("num_hidden_layers")
    count = layers if type(layers) is int and 0 < layers <= 2**16 else 0  # ``_check`` reports the fault
    for name, full, shared in (("indexer_types", "full", "shared"), ("index_topk_pattern", "F", "S")):
        given = raw.get(name)
        if given is None:
            continue
        if not isinstance(given, (list, str)) or len(given) != count or {*given} - {full, shared}:
            raise ConfigError(
                f"{name} = {given!r:.200}; expected {full!r} or {shared!r} for each of {count} layers"
            )
        return tuple(kind == shared for kind in given)
    freq, offset = raw.get("index_topk_freq"), raw.get("index_skip_topk_offset")
    freq, offset = 1 if freq is None else freq, 2 if offset is None else offset
    if type(freq) is not int or type(offset) is not int or freq < 1 or offset < 0:
        raise ConfigError(
            f"index_topk_freq = {freq!r:.80}, index_skip_topk_offset = {offset!r:.80}; expected whole "
            "numbers, the first of 1 or more, the second of 0 or more"
        )
    return tuple(max(layer - offset + 1, 0) % freq != 0 for layer in range(count))


def _dense_layers(raw: JsonObject) -> JsonObject:
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


def _rope(raw: JsonObject) -> JsonObject:
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


def _yarn(raw: JsonObject, scaling: JsonObject) -> JsonObject | None:
    kind = scaling.get("rope_type") or scaling.get("type") or ("none" if "factor" in scaling else "default")
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(f"rope scaling {kind!r} is not supported; expected 'yarn' or null")
    truncate = scaling.get("truncate", True)
    if type(truncate) is not bool:
        raise ConfigError(f"yarn rope scaling with truncate = {truncate!r:.80}; expected true or false")
    names = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
    values = {name: _number(name, scaling[name]) for name in names if scaling.get(name) is not None}
    if "factor" not in values:
        raise ConfigError(f"yarn rope scaling has no factor: {scaling!r:.200}")
    original = scaling.get("original_max_position_embeddings") or raw.get("max_position_embeddings")
    return {"original_max_position_embeddings": original, "truncate": truncate, **values}


def _number(name: str, value: object) -> float:
    if not is_number(value):
        raise ConfigError(f"{name} = {value!r:.200}; expected a number")
    return float(value)


def _dtype(raw: JsonObject) -> str:
    """The narrowest dtype that holds the weights exactly and that programs compute in.

    float16 has three more bits of precision than bfloat16 and less range, so float32 is taken.
    """
    name = str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype {name!r:.80} is not supported; expected float32, bfloat16 or float16")
    return "float32" if name == "float16" else name
