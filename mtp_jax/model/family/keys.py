"""Keys of a Hugging Face ``config.json`` that families share, in either dialect, read strictly.

Released DeepSeek checkpoints write ``rope_theta`` + ``rope_scaling`` + ``torch_dtype``; transformers 5 writes
``rope_parameters`` + ``dtype``.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject, is_number
from mtp_jax.model.config_parts import RopeScaling, YarnConfig

Scalings = Mapping[str, Callable[[JsonObject, JsonObject], RopeScaling]]
"""Functions that read a scaling from config.json and the object in it that describes the scaling, by type."""


def dense_layers(raw: JsonObject) -> JsonObject:
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


def rope(raw: JsonObject, known: Scalings | None = None) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling``. known: see ``scaled``. Raises ConfigError."""
    nested, scaling = (raw.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    if not isinstance(nested, dict) or not isinstance(scaling, dict):
        raise ConfigError(
            f"rope_parameters = {nested!r:.200}, rope_scaling = {scaling!r:.200}; expected objects or null"
        )
    given = [d["rope_theta"] for d in (raw, scaling, nested) if d.get("rope_theta") is not None]
    thetas = {_number("rope_theta", value) for value in given} or {10000.0}
    if len(thetas) > 1:
        both = " and ".join(map(str, sorted(thetas)))
        raise ConfigError(f"rope_theta is given as {both}; expected one value")
    return {
        "rope_theta": thetas.pop(),
        "rope_scaling": scaled(raw, scaling, known) or scaled(raw, nested, known),
    }


def scaled(raw: JsonObject, scaling: JsonObject, known: Scalings | None = None) -> RopeScaling | None:
    """The scaling that an object describes; None without.

    known: functions that read it, by its type; None: YaRN's alone. Raises ConfigError for another type.
    """
    known = known or {"yarn": yarn}
    kind = scaling.get("rope_type") or scaling.get("type") or ("none" if "factor" in scaling else "default")
    if kind == "default":
        return None
    if kind not in [*known]:  # it may be a list
        raise ConfigError(
            f"rope scaling {kind!r:.80} is not supported; expected {' or '.join(map(repr, known))} or null"
        )
    return known[kind](raw, scaling)


def yarn(raw: JsonObject, scaling: JsonObject) -> YarnConfig:
    """YaRN as an object describes it. Raises ConfigError."""
    truncate = scaling.get("truncate", True)
    if type(truncate) is not bool:
        raise ConfigError(f"yarn rope scaling with truncate = {truncate!r:.80}; expected true or false")
    names = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
    values = numbers(scaling, names, ("factor",))
    # The check of ``YarnConfig`` reports a value of another type.
    original: Any = scaling.get("original_max_position_embeddings") or raw.get("max_position_embeddings")
    return YarnConfig(original_max_position_embeddings=original, truncate=truncate, **values)


def numbers(scaling: JsonObject, names: Iterable[str], needed: Iterable[str]) -> dict[str, float]:
    """The numbers that describe a scaling. Raises ConfigError without the needed numbers."""
    values = {name: _number(name, scaling[name]) for name in names if scaling.get(name) is not None}
    if lacks := [name for name in needed if name not in values]:
        kind = scaling.get("rope_type") or scaling.get("type")
        raise ConfigError(f"{kind} rope scaling has no {', '.join(lacks)}: {scaling!r:.200}")
    return values


def _number(name: str, value: object) -> float:
    if not is_number(value):
        raise ConfigError(f"{name} = {value!r:.200}; expected a number")
    return float(value)


def dtype_of(raw: JsonObject) -> str:
    """The narrowest dtype that holds the weights exactly and that programs compute in.

    float16 has three more bits of precision than bfloat16 and less range, so float32 is taken.
    """
    name = str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype {name!r:.80} is not supported; expected float32, bfloat16 or float16")
    return "float32" if name == "float16" else name
