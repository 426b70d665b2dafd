"""Schemas of tools that clients run and send without one, as their API defines the arguments."""

from mtp_jax import JsonObject

_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}


def _object(required: str = "", **properties: JsonObject) -> JsonObject:
    """An object's schema. required: names of the properties that must be there."""
    return {"type": "object", "properties": properties, "required": required.split()}


def _one_of(names: str) -> JsonObject:
    return {"type": "string", "enum": names.split()}


OPENAI: dict[str, tuple[str, JsonObject]] = {
    "local_shell": (
        "Runs a command in the user's shell.",
        _object(
            "action",
            action=_object(
                "type command env",
                type=_one_of("exec"),
                command={"type": "array", "items": _TEXT},
                env={"type": "object", "additionalProperties": _TEXT},
                working_directory=_TEXT,
                timeout_ms=_NUMBER,
            ),
        ),
    ),
    "shell": (
        "Runs commands in the user's shell.",
        _object(
            "action",
            action=_object(
                "commands",
                commands={"type": "array", "items": _TEXT},
                timeout_ms=_NUMBER,
                max_output_length=_NUMBER,
            ),
        ),
    ),
    "apply_patch": (
        "Creates, changes or deletes a file of the user. The diff has V4A's form.",
        _object(
            "operation",
            operation=_object(
                "type path", type=_one_of("create_file update_file delete_file"), path=_TEXT, diff=_TEXT
            ),
        ),
    ),
}
"""Description of each tool of the Responses API, and a schema of the fields that the item of a call has."""
