"""A function that a model may call."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from mtp_jax.errors import RequestError
from mtp_jax.json_object import JsonMapping
from mtp_jax.text.tools.formats import NAMES


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: letters, digits, "_", "-" and ".".
        parameters: the arguments' JSON Schema, a JSON object.
        strict: whether arguments must fit the schema; if not, they must be an object.
        description: text for the model.
    """

    name: str
    parameters: JsonMapping = field(default_factory=dict)
    strict: bool = False
    description: str = ""

    def check(self) -> None:
        """Raise RequestError for a wrong name, and for parameters whose schema is no JSON Schema."""
        if not re.fullmatch(NAMES, self.name):
            raise RequestError(
                f"the tool {self.name!r:.40}: a name has letters, digits, '_', '-' and '.' alone"
            )
        for where, schema in self._schemas():
            if not isinstance(schema, Mapping | bool):
                raise RequestError(f"{where}: {schema!r:.40} is no JSON Schema; give an object")
            for key, value in schema.items() if isinstance(schema, Mapping) else ():
                fits, expected = _KEYWORDS.get(key, (lambda _: True, ""))
                if not fits(value):
                    raise RequestError(f"{where}: {key} = {value!r:.40}; JSON Schema expects {expected}")

    def _schemas(self) -> Iterator[tuple[str, object]]:
        yield f"the tool {self.name!r}", self.parameters
        known = self.parameters.get("properties")
        for key, schema in known.items() if isinstance(known, Mapping) else ():
            yield f"the parameter {key!r:.40} of the tool {self.name!r}", schema


def _are_strings(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _is_length(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


_KEYWORDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "type": (lambda value: isinstance(value, str) or _are_strings(value), "a string or a list of strings"),
    "required": (_are_strings, "a list of strings"),
    **dict.fromkeys(
        ("properties", "$defs", "definitions"), (lambda value: isinstance(value, Mapping), "an object")
    ),
    **dict.fromkeys(
        ("enum", "anyOf", "oneOf", "allOf"), (lambda value: isinstance(value, list | tuple), "a list")
    ),
    **dict.fromkeys(("$ref", "pattern", "format"), (lambda value: isinstance(value, str), "a string")),
    **dict.fromkeys(("minLength", "maxLength"), (_is_length, "a length")),
}
