"""JSON files of a folder in Hugging Face layout, and the messages where there is none."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject

GGUF = ".gguf"
"""The ending of a file in the format of llama.cpp."""


def missing_folder(path: Path) -> str:
    """The message where a model's path is no folder."""
    if path.suffix == GGUF and not os.path.exists(path):
        return f"{path} does not exist; name a GGUF file, or a directory with config.json and safetensors"
    message = f"{path} is not a directory; name one with config.json and safetensors, or a hub's org/name"
    return message + _gguf_hint([path] if os.path.isfile(path) else [])


def is_gguf(path: Path) -> bool:
    """Whether a path is a file in the format of llama.cpp, by its ending or its first bytes."""
    if not os.path.isfile(path):  # also False for a name that no file can have
        return False
    try:
        with path.open("rb") as file:
            return path.suffix == GGUF or file.read(4) == b"GGUF"
    except OSError:  # such as a file of another user
        return False


def _gguf_hint(files: Iterable[Path]) -> str:
    """An error sentence about a model in the format of llama.cpp."""
    found = sorted(file.name for file in files if file.suffix == GGUF)
    return f". {found[0]} is GGUF: a whole model is read from it, named as the file" if found else ""


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


def read_config_json(path: str | Path) -> JsonObject:
    """A config.json, with the quantisation that older ModelOpt writes into a file beside it.

    Raises ConfigError naming the file.
    """
    raw, beside = read_json(path), Path(path).parent / "hf_quant_config.json"
    if raw.get("quantization_config") or not beside.is_file():
        return raw
    told = read_json(beside).get("quantization")
    if not isinstance(told, dict):
        raise ConfigError(f"{beside} has quantization = {told!r:.80}; expected an object")
    return raw if told.get("quant_algo") is None else raw | {"quantization_config": _MODELOPT | told}


_MODELOPT: JsonObject = {"quant_method": "modelopt"}
