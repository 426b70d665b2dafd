"""Families of models: a file each. A further family is a file, and a line in ``FAMILIES``."""

import re
from pathlib import Path

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family.deepseek_v3 import DeepSeekV3
from mtp_jax.model.family.deepseek_v4 import DeepSeekV4
from mtp_jax.model.family.family import Family
from mtp_jax.model.family.glm4_moe import Glm4Moe
from mtp_jax.model.family.llama import Llama
from mtp_jax.model.hf_config import read_config_json

FAMILIES: dict[str, Family] = {
    family.name: family for family in (DeepSeekV3(), Glm4Moe(), DeepSeekV4(), Llama())
}
"""Families by name, ``ModelConfig.family``."""

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


def family_of(cfg: ModelConfig) -> Family:
    """The family of a model."""
    return FAMILIES[cfg.family]


def config_of(raw: JsonObject) -> ModelConfig:
    """The model that a parsed config.json describes; a multimodal model is read as its text part.

    Raises ConfigError for a model that the engine cannot run.
    """
    raw = text_part(raw)
    kind = model_type(raw)
    found = next((family for family in FAMILIES.values() if kind in family.types), None)
    if found is None:
        plain = re.sub("[_.]", "", kind.lower())
        reasons = [r for k, r in _REFUSED.items() if plain.startswith(k.replace("_", ""))]
        known = ", ".join(sorted({*_NESTING, *(kind for f in FAMILIES.values() for kind in f.types)}))
        why = f": {reasons[0]}" if reasons else f"; expected one of {known}"
        raise ConfigError(f"model_type {kind!r} is not supported{why}")
    return found.read(raw, kind)


def config_of_file(path: str | Path) -> ModelConfig:
    """The model that a config.json describes. Raises ConfigError for unreadable JSON, too."""
    return config_of(read_config_json(path))


def config_json(cfg: ModelConfig) -> JsonObject:
    """``config.json`` in the dialect of the release, without quantisation."""
    return family_of(cfg).write(cfg)


def text_part(raw: JsonObject) -> JsonObject:
    """The config of the text model in that of a multimodal one; any other config as it is.

    Raises ConfigError for a multimodal model without a known text model.
    """
    kind = model_type(raw)
    if kind not in _NESTING:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, dict) or model_type(text) not in _NESTING[kind]:
        got = model_type(text) if isinstance(text, dict) else text
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


def model_type(raw: JsonObject) -> str:
    """model_type, or the type in the architecture's name; for a lone NextN layer that of its trunk."""
    kind = raw.get("model_type")
    if kind is None:
        named = raw.get("architectures")
        first = str(named[0]) if isinstance(named, list) and named else "DeepseekV3ForCausalLM"
        known = (item for family in FAMILIES.values() for item in family.architectures.items())
        kind = next((k for prefix, k in known if first.startswith(prefix)), first)
    return str(kind).removesuffix("_mtp")  # xLLM's name for an export of the NextN layer
