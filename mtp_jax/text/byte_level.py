"""The characters in which byte-level BPE writes bytes."""

import itertools
from collections.abc import Sequence

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(0x100) if byte not in _PRINTABLE)

_OF_BYTE = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(0x100 + n) for n, byte in enumerate(_OTHERS)}
_TO_LATIN = {0x100 + n: byte for n, byte in enumerate(_OTHERS)} | dict.fromkeys(_OTHERS, 0xFFFF)


def written(content: bytes) -> str:
    """Bytes as a tokenizer writes them: printable Latin-1 as itself, other bytes from U+0100 on."""
    return "".join(map(_OF_BYTE.__getitem__, content))


def read_all(texts: Sequence[str]) -> list[bytes]:
    """The bytes of each text; a text that bytes are not written as is itself, in UTF-8."""
    together = read("".join(texts))  # one call for 128 K tokens, where there is no other text
    if together is None:
        return [text.encode() if (found := read(text)) is None else found for text in texts]
    ends = [*itertools.accumulate(map(len, texts), initial=0)]
    return [together[begin:end] for begin, end in itertools.pairwise(ends)]


def read(text: str) -> bytes | None:
    """The bytes that ``written`` turns into this text; None if there are none."""
    try:
        return text.translate(_TO_LATIN).encode("latin-1")
    except UnicodeEncodeError:
        return None
