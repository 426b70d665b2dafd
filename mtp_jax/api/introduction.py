"""A model's words about itself for somebody who tries it: introduction.json beside its weights."""

import reprlib
from dataclasses import dataclass
from pathlib import Path

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.model.hf_config import read_json

FILE = "introduction.json"


@dataclass(frozen=True)
class Introduction:
    """A sentence about a model, and messages to try it with."""

    about: str
    prompts: tuple[str, ...]

    def as_json(self) -> JsonObject:
        """Turns the introduction into the object of its file."""
        return {"about": self.about, "prompts": list(self.prompts)}


def introduction(folder: Path) -> Introduction | None:
    """The introduction in a model's folder; None where it has no such file.

    Raises ConfigError unless the file has a text "about" and a list of texts "prompts".
    """
    if not (folder / FILE).is_file():
        return None
    told = read_json(folder / FILE)
    about, prompts = told.get("about"), told.get("prompts", [])
    if isinstance(about, str) and isinstance(prompts, list) and all(isinstance(p, str) for p in prompts):
        return Introduction(about, tuple(prompts))
    raise ConfigError(
        f"{folder / FILE} has {reprlib.repr(told)}; expected "
        '{"about": a sentence, "prompts": [messages]}: mend the file, or remove it'
    )
