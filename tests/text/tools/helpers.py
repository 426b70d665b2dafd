"""Random tools."""

import random
from typing import Any

from mtp_jax.text.tools.tool import Tool

TEXT = {"type": "string", "maxLength": 6}
VALUES: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 0, "maximum": 99},
    {"type": "boolean"},
    {"type": "string", "enum": ["c", 'a "b"', "</arg_value"]},
    {"const": "x"},
    {"enum": [1, None, "a"]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    TEXT,
    {"$ref": "#/$defs/thing"},
    {"anyOf": [{"type": "null"}, TEXT]},
    {"type": "string", "pattern": "^[a-c/]{1,3}$"},
    {"type": "string", "minLength": 2, "maxLength": 5, "pattern": "[0-9]"},
    {"type": ["string", "integer", "null"], "maxLength": 4, "maximum": 99, "minimum": 0},
    {"allOf": [TEXT, {"minLength": 1}, {"pattern": "^a?"}]},
    {"type": ["string", "array"], "items": {"type": "null"}, "maxItems": 2, "maxLength": 3},
]


def random_tool(rng: random.Random, name: str) -> Tool:
    keys = rng.sample(["a", "b c", "d-e", "f"], rng.randrange(4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: rng.choice(VALUES) for key in keys},
        "required": [key for key in keys if rng.random() < 0.7],
        "additionalProperties": False,
        "$defs": {"thing": {"type": "integer", "minimum": 1, "maximum": 3}},
    }
    return Tool(name, schema, strict=True)
