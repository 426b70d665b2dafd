"""Releases that come with an encoder instead of a chat template, and conversations with tools."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

from mtp_jax.api.demo import demo_model
from mtp_jax.text.tokenizer import Tokenizer

# The bar is U+FF5C and the low line U+2581.
BOS, EOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER, ASSISTANT = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLS: list[dict[str, Any]] = [
    {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'},
    },
    {"id": "2", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}},
]


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def release(folder: Path, family: str, encoder: str | None = None) -> Path:
    """A tokenizer without a template, a config.json that names the family, and the text of its encoder."""
    shutil.copy(demo_model() / "tokenizer.json", folder)
    (folder / "config.json").write_text(json.dumps({"model_type": family}), encoding="utf-8")
    names = {"bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    if encoder is not None:
        (folder / "encoding").mkdir()
        (folder / "encoding" / "encoding_dsv4.py").write_text(encoder, encoding="utf-8")
    return folder


def loaded(folder: Path) -> Tokenizer:
    found = Tokenizer.from_dir(folder)
    assert found is not None
    return found


@functools.cache
def demo() -> Tokenizer:
    """The demo model's tokenizer, read once."""
    return loaded(demo_model())
