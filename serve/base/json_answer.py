"""JSON of answers, and a response of JSON."""

from functools import partial
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response

# JSON has no infinity and no NaN, and Python reads both: 1e400 of a client, or arguments of a model.
as_json = partial(to_json, inf_nan_mode="null")
"""The JSON of a value, in bytes. Raises ValueError for text that UTF-8 cannot hold, and for deep nesting."""


class JsonAnswer(Response):
    """A response whose content is a value, or bytes that are its JSON already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of the body. Starlette asks."""
        return content if isinstance(content, bytes) else as_json(content)
