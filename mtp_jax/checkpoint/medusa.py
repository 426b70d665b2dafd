"""Folders of Medusa heads, in FasterDecoding's names (``N.0.linear.weight``, ``N.1.weight``) or vLLM's.

The names here are vLLM's: ``blocks.N.layers.M.weight``, ``lm_heads.N.weight``, behind ``DRAFT_HEAD``.
"""

import re
from collections.abc import Collection

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.head_config import Captures, MedusaConfig

_BLOCK = re.compile(r"(\d{1,9})\.(\d{1,9})\.linear\.(weight|bias)")
_TABLE = re.compile(r"(\d{1,9})\.\d{1,9}\.weight")
# Options of vLLM's heads, and the values at which they change nothing.
_NEUTRAL = {"logit_scale": 1, "original_lm_head": False}
# Heads, and blocks of one. Parameters are specified for every block that a file asks for, and five heads are
# enough (arXiv 2401.10774): a number past this one is a slip, refused before anything is made for it.
_MOST = 64


def is_medusa(raw: JsonObject) -> bool:
    """Whether a config.json is that of Medusa heads."""
    names = raw.get("architectures")
    said = [*(names if isinstance(names, list) else ()), raw.get("model_type")]
    return "medusa_num_heads" in raw or any("medusa" in str(name).lower() for name in said)


def medusa_name(name: str) -> str:
    """The name here of a tensor in either naming; a name outside of both as it is."""
    name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    if match := _BLOCK.fullmatch(name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    return f"lm_heads.{match[1]}.weight" if (match := _TABLE.fullmatch(name)) else name


def medusa_config(
    raw: JsonObject, cfg: ModelConfig, names: Collection[str], captures: Captures | None
) -> MedusaConfig:
    """The heads that config.json and the names of their tensors describe, for the trunk of ``cfg``.

    Raises ConfigError for heads that do not fit the trunk, or are not supported.
    """
    for name, wanted in (
        ("hidden_size", cfg.hidden_size),
        ("vocab_size", cfg.vocab_size),
        ("truncated_vocab_size", cfg.vocab_size),
    ):
        if (got := raw.get(name)) not in (None, wanted):
            raise ConfigError(f"the head is made for {name} = {got!r:.80}, the model has {wanted}")
    for key, neutral in _NEUTRAL.items():
        if raw.get(key, neutral) != neutral:
            raise ConfigError(
                f"{key} = {raw[key]!r:.80} of Medusa heads is not supported; expected {neutral}"
            )
    if captures is not None:
        raise ConfigError(f"draft_captures = {captures!r}, but Medusa heads read no taps; leave it out")

    def whole(*keys: str, default: int | None = None) -> int:
        key, value = next(((k, raw[k]) for k in keys if k in raw), (keys[0], default))
        if type(value) is not int or not 1 <= value <= _MOST:
            raise ConfigError(f"{key} = {value!r:.80}; expected a whole number from 1 to {_MOST}")
        return value

    return MedusaConfig(
        heads=whole("medusa_num_heads", "num_heads"),
        layers=whole("medusa_num_layers", "num_hidden_layers", default=1),
        bias=any(name.endswith(".bias") for name in names),
    )
