"""A model's own sampling options: generation_config.json beside its weights."""

from pathlib import Path

from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError, RequestError
from mtp_jax.json_object import JsonObject
from mtp_jax.model.hf_config import read_json

FILE = "generation_config.json"
_SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Options of ``SamplingParams``, and the file's names of them.
NAMES = {**dict(zip(_SAME, _SAME, strict=True)), "max_tokens": "max_new_tokens"}


def sampling_defaults(folder: Path, source: str) -> JsonObject:
    """Options of ``SamplingParams`` that a request does not set; none if ``source`` is "none".

    ``max_tokens`` is that of prompts without parameters and of chats.

    Raises ConfigError for values out of range.
    """
    if source == "none" or not (folder / FILE).is_file():
        return {}
    told = read_json(folder / FILE)
    found = {name: told[theirs] for name, theirs in NAMES.items() if told.get(theirs) is not None}
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ConfigError(
            f"{folder / FILE}: {error}; mend it, or leave its values out with --sampling-defaults none"
        ) from error
    return found


def described(defaults: JsonObject) -> str:
    """A line at the start: "temperature 0.6, top_p 0.95 unless given (generation_config.json; ...)"."""
    if not defaults:
        return f"temperature 1 where a request names none; nothing from {FILE}"
    named = ", ".join(f"{name} {value:.10g}" for name, value in defaults.items())
    return f"{named} unless given ({FILE}; --sampling-defaults none leaves it out)"
