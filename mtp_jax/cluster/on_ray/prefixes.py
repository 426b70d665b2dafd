"""The choice of a prompt's replica: the replica that got its longest known beginning, unless it is too busy.

A replica keeps the cache pages of past prompts; a prompt with the same beginning is read from there on. The
replica's pages are guessed from its last prompts; a wrong guess costs time alone.
"""

import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

from pydantic_core import from_json

# Fields of requests, in the order in which their texts stand in a prompt.
_FIELDS = (
    "cache_salt",
    "tools",
    "system",
    "instructions",
    "messages",
    "prompt",
    "input",
    "text",
    "input_ids",
)
_PIECE = 256  # characters, some 64 tokens: a page of the cache
_MOST_PIECES = 1024
_MOST_READ = 2 * _PIECE * _MOST_PIECES  # bytes of a body: few prompts need more to fill the pieces
_DIGEST_BYTES = 8
_REMEMBERED = 100_000

_Replica = TypeVar("_Replica")


def digests(body: bytes) -> tuple[bytes, ...]:
    """A digest per beginning of the prompt in a request's body, each 256 characters longer than the last.

    Empty for a body without a prompt, or with a short one. Only the beginning of a long body is read, because
    one thread hands on all requests.
    """
    try:
        fields = from_json(body[:_MOST_READ], allow_partial="trailing-strings") if body else {}
    except ValueError:
        return ()
    if not isinstance(fields, dict):
        return ()
    text = "".join(_text(fields[name]) for name in _FIELDS if fields.get(name) is not None)
    before, found = b"", []
    for end in range(_PIECE, min(len(text), _PIECE * _MOST_PIECES) + 1, _PIECE):
        piece = text[end - _PIECE : end].encode("utf-8", "surrogatepass")
        before = blake2b(before + piece, digest_size=_DIGEST_BYTES).digest()
        found.append(before)
    return tuple(found)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class Prefixes(Generic[_Replica]):
    """The replicas that beginnings of prompts went to, and requests under way. One thread owns it."""

    def __init__(self, slack: int, remembered: int = _REMEMBERED) -> None:
        """slack: number of requests that the replica of a prefix may have more than the least busy replica.

        remembered: number of digests that are kept, the least recently used being forgotten first.
        """
        self._slack, self._remembered = slack, remembered
        self._where: OrderedDict[bytes, _Replica] = OrderedDict()
        self._at: dict[str, _Replica] = {}  # replica of each request under way, by the request's name
        self._load: Counter[_Replica] = Counter()
        self._turn, self._turns = 0, dict[_Replica, int]()

    def rank(self, name: str, prefixes: Sequence[bytes], replicas: Iterable[_Replica]) -> list[_Replica]:
        """The replicas for a request, the best first; the request counts as the first's until ``sent``.

        name: name of the request until ``ended``. Among equally busy replicas the first is the one whose last
        request is the longest ago.
        """
        self.ended(name)
        order = sorted(replicas, key=lambda r: (self._load[r], self._turns.get(r, -1)))
        if not order:
            return []
        there = set(order)
        self._turns = {replica: turn for replica, turn in self._turns.items() if replica in there}
        knows = next((w for d in reversed(prefixes) if (w := self._where.get(d)) in there), None)
        if knows is not None and self._load[knows] - self._load[order[0]] <= self._slack:
            order.remove(knows)
            order.insert(0, knows)
        self.sent(name, prefixes, order[0])
        return order

    def sent(self, name: str, prefixes: Sequence[bytes], replica: _Replica) -> None:
        """Record the replica that has got the request."""
        if self._at.get(name) == replica:
            return
        self.ended(name)
        self._at[name] = replica
        self._load[replica] += 1
        self._turn += 1
        self._turns[replica] = self._turn
        for digest in prefixes:
            self._where[digest] = replica
            self._where.move_to_end(digest)
        while len(self._where) > self._remembered:
            self._where.popitem(last=False)

    def ended(self, name: str) -> None:
        """Record that the request has ended, or will never be sent."""
        replica = self._at.pop(name, None)
        if replica is not None:
            self._load[replica] -= 1
            if not self._load[replica]:
                del self._load[replica]
