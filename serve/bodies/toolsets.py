"""Toolsets of the Messages API: one entry stands for many tools, all of which the client runs."""

from mtp_jax import JsonObject
from serve.bodies.known_schemas import NUMBER, NUMBERS, REAL, TEXT, TEXTS, fields, one_of

_DIRECTION = one_of("up down left right")
_HELD = {"text": TEXT, "coordinate": NUMBERS}  # keys that are held meanwhile; x and y, or where the mouse is
_POINT = fields("type x y", type=one_of("coordinate"), x=NUMBER, y=NUMBER)
_ELEMENT = fields("type ref", type=one_of("ref"), ref=TEXT)
_PLACE = {"anyOf": [_POINT, _ELEMENT]}
_TAB = {"tab_id": TEXT}  # left out: the active tab

_Members = dict[str, tuple[str, JsonObject]]

_COMPUTER: _Members = {
    "key": ("Presses a key, or several at once (ctrl+s).", fields("text", text=TEXT, repeat=NUMBER)),
    "hold_key": (
        "Holds a key down for some seconds.",
        fields("text duration", text=TEXT, duration=NUMBER),
    ),
    "type": ("Types a text.", fields("text", text=TEXT)),
    "cursor_position": ("Says where the mouse is.", fields()),
    "mouse_move": ("Moves the mouse without a click.", fields("coordinate", coordinate=NUMBERS)),
    "left_mouse_down": ("Presses the left button and holds it.", fields()),
    "left_mouse_up": ("Releases the left button.", fields()),
    "left_click": ("Clicks.", fields("", _HELD)),
    "left_click_drag": (
        "Drags from one place to another.",
        fields("start_coordinate coordinate", _HELD, start_coordinate=NUMBERS),
    ),
    "right_click": ("Clicks with the right button.", fields("", _HELD)),
    "middle_click": ("Clicks with the middle button.", fields("", _HELD)),
    "double_click": ("Clicks twice.", fields("", _HELD)),
    "triple_click": ("Clicks three times.", fields("", _HELD)),
    "scroll": (
        "Turns the wheel of the mouse by a number of clicks.",
        fields("scroll_direction scroll_amount", _HELD, scroll_direction=_DIRECTION, scroll_amount=NUMBER),
    ),
    "wait": ("Waits for some seconds.", fields("duration", duration=NUMBER)),
    "screenshot": ("Takes a picture of the screen.", fields()),
    "zoom": ("Takes a picture of a region: x0, y0, x1, y1.", fields("region", region=NUMBERS)),
}
_CLICK = fields("target", _TAB, target=_PLACE, modifiers=TEXT)
_AT_POINT = fields("target", _TAB, target=_POINT)
_TEXT_OF_TAB = fields("text", _TAB, text=TEXT)
_BROWSER: _Members = {
    "navigate": ("Opens an address, or goes back, forward or reload.", fields("url", _TAB, url=TEXT)),
    "list_tabs": ("Lists the tabs.", fields()),
    "new_tab": ("Opens an empty tab.", fields()),
    "switch_tab": ("Makes a tab the active one.", fields("tab_id", tab_id=TEXT)),
    "close_tab": ("Closes a tab.", fields("tab_id", tab_id=TEXT)),
    "read_page": (
        "Returns the tree of the page's elements, with references such as ref_7.",
        fields("", _TAB, depth=NUMBER, filter=one_of("all interactive"), ref=TEXT),
    ),
    "get_page_text": ("Returns the text of the page.", fields("", _TAB)),
    "read_console": ("Returns new lines of the console.", fields("", _TAB)),
    "read_network": ("Returns new requests of the page.", fields("", _TAB)),
    "find": ("Finds elements by a description.", fields("query", _TAB, query=TEXT)),
    "form_input": (
        "Sets the value of an element of a form.",
        fields("target value", _TAB, target=_ELEMENT, value={"type": ["string", "number", "boolean"]}),
    ),
    "file_upload": (
        "Gives files to an element, by paths or by document_ids.",
        fields("target", _TAB, target=_ELEMENT, paths=TEXTS, document_ids=TEXTS),
    ),
    "scroll_to": ("Scrolls to an element.", fields("target", _TAB, target=_ELEMENT)),
    "screenshot": ("Takes a picture of the page.", fields("", _TAB)),
    "zoom": ("Takes a picture of a region: x0, y0, x1, y1.", fields("region", _TAB, region=NUMBERS)),
    "left_click": ("Clicks.", _CLICK),
    "right_click": ("Clicks with the right button.", _CLICK),
    "middle_click": ("Clicks with the middle button.", _CLICK),
    "double_click": ("Clicks twice.", _CLICK),
    "triple_click": ("Clicks three times.", _CLICK),
    "hover": ("Moves the mouse without a click.", fields("target", _TAB, target=_PLACE)),
    "left_click_drag": (
        "Drags from one place to another.",
        fields("from target", _TAB, **{"from": _POINT}, target=_POINT),
    ),
    "left_mouse_down": ("Presses the left button and holds it.", _AT_POINT),
    "left_mouse_up": ("Releases the left button.", _AT_POINT),
    "mouse_move": ("Moves the mouse without a click.", _AT_POINT),
    "scroll": (
        "Turns the wheel of the mouse, by 3 clicks where none are given.",
        fields(
            "target scroll_direction", _TAB, target=_POINT, scroll_direction=_DIRECTION, scroll_amount=NUMBER
        ),
    ),
    "type": ("Types a text.", _TEXT_OF_TAB),
    "key": (
        "Presses a key, several at once (ctrl+a), or one after the other, between spaces.",
        fields("text", _TAB, text=TEXT, repeat=NUMBER),
    ),
    "hold_key": (
        "Holds a key down for some seconds.",
        fields("text duration", _TAB, text=TEXT, duration=REAL),
    ),
    "wait": ("Waits for some seconds.", fields("duration", _TAB, duration=REAL)),
    "javascript_exec": ("Runs JavaScript and returns the last expression's value.", _TEXT_OF_TAB),
}
TOOLSETS: dict[str, tuple[str, _Members]] = {
    "computer_toolset": ("computer", _COMPUTER),
    "browser_toolset": ("browser", _BROWSER),
}
"""The name of a toolset, and its tools with descriptions and schemas, for its type without the date."""
