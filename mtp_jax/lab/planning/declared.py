"""A model of which a config.json alone is read, or whose name is enough."""

from pathlib import Path

from mtp_jax.errors import ConfigError
from mtp_jax.lab.planning.releases import KNOWN
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import config_of
from mtp_jax.model.hf_config import read_config_json


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
