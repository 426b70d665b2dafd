"""Released models whose name is enough for a plan: their configurations, read from ``releases.toml``."""

import tomllib
from pathlib import Path

from mtp_jax.json_object import JsonObject
from mtp_jax.model.family import config_of

_DATA: JsonObject = tomllib.loads(Path(__file__).with_name("releases.toml").read_text(encoding="utf-8"))


def _keys(name: str) -> JsonObject:
    """The keys of a model's config.json, with the keys of its base that it has not."""
    own = dict(_DATA[name])
    return (_keys(own.pop("base")) if "base" in own else {}) | own


KNOWN = {name: config_of(_keys(name)) for name in _DATA}
"""Configurations by name."""

DEEPSEEK_V3 = KNOWN["deepseek-v3"]
