"""Parts of a JSON value by their JSON pointers."""

from collections.abc import Mapping
from urllib.parse import unquote


def referred(schema: object, reference: str) -> object:
    """The part that a JSON pointer such as "#/$defs/a" names; None if there is none."""
    path, found = unquote(reference).split("/"), schema
    if path[0] != "#":
        return None
    for step in path[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(step)
        elif (
            isinstance(found, list | tuple) and step.isdecimal() and len(step) < 9 and int(step) < len(found)
        ):
            found = found[int(step)]
        else:
            return None
    return found
