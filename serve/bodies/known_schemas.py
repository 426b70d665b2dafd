"""Schemas of tools that clients run and send without one, as their API defines the arguments."""

from mtp_jax import JsonObject

_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_NUMBERS = {"type": "array", "items": _NUMBER}


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

_FILES = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _NUMBER,
    "insert_text": _TEXT,
    "view_range": _NUMBERS,
}
_ACTIONS = (
    "key type mouse_move left_click left_click_drag right_click middle_click double_click triple_click "
    "left_mouse_down left_mouse_up screenshot cursor_position scroll hold_key wait zoom"
)

ANTHROPIC: dict[str, tuple[str, JsonObject]] = {
    "bash": (
        "Runs a command in a bash session that stays open; restart begins a new one.",
        _object(command=_TEXT, restart={"type": "boolean"}),
    ),
    "text_editor": (
        "Views, creates and edits files.",
        _object("command path", command=_one_of("view create str_replace insert undo_edit"), **_FILES),
    ),
    "memory": (
        "Views, creates, edits, renames and deletes files of a memory that lasts, below /memories.",
        _object(
            "command",
            command=_one_of("view create str_replace insert delete rename"),
            **_FILES,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
    "computer": (
        "Uses the mouse and the keyboard of a computer.",
        _object(
            "action",
            action=_one_of(_ACTIONS),
            coordinate=_NUMBERS,
            start_coordinate=_NUMBERS,
            region=_NUMBERS,
            text=_TEXT,
            duration={"type": "number"},
            scroll_direction=_one_of("up down left right"),
            scroll_amount=_NUMBER,
        ),
    ),
}
"""The same for each family of tools of the Messages API, by its type without the date of a version."""
