"""A response of JSON."""

from typing import Any

from pydantic_core import to_json
from starlette.responses import Response


class JsonAnswer(Response):
    """A response whose content is a value, or bytes that are its JSON already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of the body. Starlette asks."""
        return content if isinstance(content, bytes) else to_json(content)
