"""A model of which a config.json alone is read, or whose name is enough."""

import re
from difflib import get_close_matches
from pathlib import Path

from mtp_jax.errors import ConfigError
from mtp_jax.lab.planning.releases import KNOWN
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import config_of
from mtp_jax.model.hf_config import read_config_json


def near(name: str) -> list[str]:
    """The known names that contain a name, or that are like it; all names where none is."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    found = [known for known in KNOWN if plain(name) in plain(known)]
    return found or get_close_matches(name.lower(), KNOWN, 3) or [*KNOWN]


def declared(model: Path, trunk_alone: bool, option: str) -> tuple[str, ModelConfig]:
    """The name and the configuration of a model: a directory, its config.json, or a name of ``KNOWN``.

    A file that declares DSpark stages does not say how many there are: such a model is its trunk alone.

    trunk_alone: whether nothing will be drafted. option: the option that says so with 0, for errors. Raises
    ConfigError.
    """
    path = model if model.is_file() else model / "config.json"
    name = path.absolute().parent.name
    known = KNOWN.get(str(model).lower())
    if known is not None and not path.exists():
        return name, known
    if not model.exists() and len(model.parts) == 1:
        raise ConfigError(
            f"{model} is neither a directory nor the name of a known model; name a directory with "
            f"config.json, or one of {', '.join(near(str(model)))}"
        )
    raw = read_config_json(path)
    cfg = config_of(raw)
    if not any(key.startswith("dspark_") for key in raw):
        return name, cfg
    if not trunk_alone:
        raise ConfigError(
            f"{path} declares DSpark stages, which its tensors alone describe; take the trunk, with "
            f"{option} 0"
        )
    return name, cfg.without_drafts()
