"""Schemas of tools that clients run and send without one, as their API defines the arguments."""

from mtp_jax import JsonObject

TEXT, NUMBER, REAL = {"type": "string"}, {"type": "integer"}, {"type": "number"}
TEXTS, NUMBERS = {"type": "array", "items": TEXT}, {"type": "array", "items": NUMBER}


def fields(required: str = "", /, *groups: JsonObject, **properties: JsonObject) -> JsonObject:
    """The schema of an object of these properties, and of groups that several schemas have.

    required: names of the properties that must be there.
    """
    for group in groups:
        properties |= group
    about = {"properties": properties, "required": required.split()}
    return {"type": "object", **about, "additionalProperties": False}


def one_of(names: str) -> JsonObject:
    """The schema of a string that is one of these."""
    return {"type": "string", "enum": names.split()}


def _action(kind: str, required: str = "", /, *groups: JsonObject, **properties: JsonObject) -> JsonObject:
    return fields(f"type {required}", {"type": one_of(kind)}, properties, *groups)


_AT = {"x": NUMBER, "y": NUMBER, "keys": TEXTS}
_COMPUTER = {
    "anyOf": [
        _action("click", "button x y", _AT, button=one_of("left right wheel back forward")),
        _action("double_click", "x y", _AT),
        _action(
            "drag", "path", path={"type": "array", "items": fields("x y", x=NUMBER, y=NUMBER)}, keys=TEXTS
        ),
        _action("keypress", "keys", keys=TEXTS),
        _action("move", "x y", _AT),
        _action("scroll", "x y scroll_x scroll_y", _AT, scroll_x=NUMBER, scroll_y=NUMBER),
        _action("type", "text", text=TEXT),
        _action("screenshot"),
        _action("wait"),
    ]
}
_USES = "Uses the mouse and the keyboard of a computer."


OPENAI: dict[str, tuple[str, JsonObject]] = {
    "local_shell": (
        "Runs a command in the user's shell.",
        fields(
            "action",
            action=fields(
                "type command env",
                type=one_of("exec"),
                command=TEXTS,
                env={"type": "object", "additionalProperties": TEXT},
                working_directory=TEXT,
                timeout_ms=NUMBER,
            ),
        ),
    ),
    "shell": (
        "Runs commands in the user's shell.",
        fields(
            "action",
            action=fields(
                "commands",
                commands=TEXTS,
                timeout_ms=NUMBER,
                max_output_length=NUMBER,
            ),
        ),
    ),
    "apply_patch": (
        "Creates, changes or deletes a file of the user. The diff has V4A's form.",
        fields(
            "operation",
            operation=fields(
                "type path", type=one_of("create_file update_file delete_file"), path=TEXT, diff=TEXT
            ),
        ),
    ),
    "computer": (_USES, fields("actions", actions={"type": "array", "items": _COMPUTER})),
    "computer_use_preview": (_USES, fields("action", action=_COMPUTER)),
}
"""Description of each tool of the Responses API, and a schema of the fields that the item of a call has."""

_FILES = {
    "path": TEXT,
    "file_text": TEXT,
    "old_str": TEXT,
    "new_str": TEXT,
    "insert_line": NUMBER,
    "insert_text": TEXT,
    "view_range": NUMBERS,
}
_ACTIONS = (
    "key type mouse_move left_click left_click_drag right_click middle_click double_click triple_click "
    "left_mouse_down left_mouse_up screenshot cursor_position scroll hold_key wait zoom"
)

ANTHROPIC: dict[str, tuple[str, JsonObject]] = {
    "bash": (
        "Runs a command in a bash session that stays open; restart begins a new one.",
        fields(command=TEXT, restart={"type": "boolean"}),
    ),
    "text_editor": (
        "Views, creates and edits files.",
        fields("command path", _FILES, command=one_of("view create str_replace insert undo_edit")),
    ),
    "memory": (
        "Views, creates, edits, renames and deletes files of a memory that lasts, below /memories.",
        fields(
            "command",
            _FILES,
            {"old_path": TEXT, "new_path": TEXT},
            command=one_of("view create str_replace insert delete rename"),
        ),
    ),
    "computer": (
        _USES,
        fields(
            "action",
            action=one_of(_ACTIONS),
            coordinate=NUMBERS,
            start_coordinate=NUMBERS,
            region=NUMBERS,
            text=TEXT,
            duration=REAL,
            scroll_direction=one_of("up down left right"),
            scroll_amount=NUMBER,
        ),
    ),
}
"""The same for each family of tools of the Messages API, by its type without the date of a version."""
