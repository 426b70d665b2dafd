"""Parts of messages that a model of text cannot read: pictures, sounds, files, and parts of unknown types."""

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from pydantic import ConfigDict, Field

from serve.bodies.fields import Body, Name

_NOT_TEXT = "is not text; this server takes no images, audio or files; got the type {!r}"
# The noun of a part whose type has one of these words in it.
_NOUNS = {
    **dict.fromkeys(("image", "screenshot"), "an image"),
    "audio": "a recording",
    "video": "a video",
    "document": "a document",
    **dict.fromkeys(("file", "upload"), "a file"),
}


_Parts = str | Sequence[object] | None


class Unread(Body):
    """A part whose contents are dropped when it is parsed, as agents send all of their history each time."""

    model_config: ClassVar = ConfigDict(extra="ignore")

    type: Name
    said: object = Field(None, validation_alias="text")

    @property
    def noun(self) -> str | None:
        """The kind of thing that it is; None for a part of an unknown type."""
        return next((noun for word, noun in _NOUNS.items() if word in self.type), None)

    @property
    def text(self) -> str:
        """The text that stands in its place: its own, if it has any."""
        if self.noun:
            return f"[{self.noun}, which this model cannot read]"
        return self.said if isinstance(self.said, str) else ""

    def unknown(self, prefix: str = "") -> Iterator[str]:
        """Path of the part."""
        if self.noun or not self.text:
            yield prefix + self.type


def unread(parts: _Parts, path: str) -> Iterator[str]:
    """Paths of the parts of a message that the model does not see. path: of the parts."""
    for i, part in _each(parts):
        if isinstance(part, Unread):
            yield from part.unknown(f"{path}.{i}.")


def check_newest(parts: _Parts, path: str, first: int = 0) -> None:
    """Raise ValueError for the first thing that a user shows now and that the model would not see.

    In a history, and in results of tools, a text stands in the place of such a thing: there a refusal would
    end the conversation, as its client sends all of it again. first: number of the first part to look at.
    """
    for i, part in _each(parts):
        if i >= first and isinstance(part, Unread) and part.noun:
            raise ValueError(f"{path}.{i}: {_NOT_TEXT.format(part.type)}")


def _each(parts: _Parts) -> Iterable[tuple[int, object]]:
    return enumerate(() if parts is None or isinstance(parts, str) else parts)
