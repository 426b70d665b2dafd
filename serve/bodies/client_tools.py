"""Names of a client's tools: each has one in the prompt, and another that its client knows."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mtp_jax import JsonObject, RequestError
from serve.bodies.tools import LONGEST_NAME, MOST_TOOLS

_PLAIN = ("", "functions")  # namespaces whose tools keep their names
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True)
class Identity:
    """A tool as its client knows it.

    Attributes:
        kind: type of the tool, such as "function" or "custom".
        namespace: empty where it has none.
    """

    kind: str
    name: str
    namespace: str = ""


Entry = tuple[Identity, JsonObject]
"""A tool, and its fields on the chat route without its name."""


class ClientTools:
    """The tools of one request, wherever it has them, by their names in the prompt.

    A tool keeps its name if it has no namespace, or ``functions``; the name of any other is
    ``namespace__name``. The tool that comes first has a name that two would have, so that a tool which a
    later request adds renames none.

    Attributes:
        tools: the tools as the chat route has them.
        also: further names that a call may use, each of one tool alone, and its name in the prompt.
    """

    def __init__(self, tools: Iterable[Entry]) -> None:
        """tools: the same tool may come again; its newest fields hold.

        Raises RequestError for too many tools.
        """
        self._names: dict[Identity, str] = {}
        self._identities: dict[str, Identity] = {}
        self._within: dict[str, list[str]] = defaultdict(list)
        forms: dict[str, JsonObject] = {}
        numbers: dict[str, int] = {}
        for identity, form in tools:
            name = self._names.get(identity)
            if name is None:
                if len(self._names) == MOST_TOOLS:
                    raise RequestError(f"tools: at most {MOST_TOOLS} are allowed together; send fewer")
                name = next(n for n in _candidates(identity, numbers) if n not in self._identities)
                self._names[identity], self._identities[name] = name, identity
                self._within[identity.namespace].append(name)
            forms[name] = form
        self.tools = [_named(self._identities[name], name, form) for name, form in forms.items()]
        self.also = self._further()

    def identity(self, name: str) -> Identity:
        """The tool of a name in the prompt; a function of this name where no tool has it."""
        return self._identities.get(name) or Identity("function", name)

    def name(self, identity: Identity) -> str:
        """The name in the prompt, also of a tool that the request does not have, as a history's may be."""
        if (known := self._names.get(identity)) is not None:
            return known
        name = next(_candidates(identity, {}))
        return name if name in self._identities else self.also.get(name, name)

    def paths(self, places: Iterable[tuple[Identity, str]]) -> dict[str, str]:
        """Paths of tools' schemas in the chat route's form, and the client's own, which are ``places``."""
        sent = dict(places)
        numbered = enumerate(self._identities.values())
        return {f"tools.{i}.function.parameters": sent[tool] for i, tool in numbered if tool in sent}

    def call(self, id: str, identity: Identity, given: str) -> JsonObject:
        """A call of a history, as the chat route has it. given: arguments as JSON text, or a text."""
        name = self.name(identity)
        if identity.kind == "custom":
            return {"id": id, "type": "custom", "custom": {"name": name, "input": given}}
        return {"id": id, "function": {"name": name, "arguments": given}}

    def within(self, namespace: str) -> list[str]:
        """Names in the prompt of the tools of a namespace."""
        return self._within.get(namespace, [])

    def _further(self) -> Mapping[str, str]:
        spelt: dict[str, set[str]] = defaultdict(set)
        for name, identity in self._identities.items():
            for spelling in _spellings(identity):
                spelt[spelling].add(name)
        return {
            spelling: next(iter(names))
            for spelling, names in spelt.items()
            if len(names) == 1 and spelling not in self._identities
        }


def _named(identity: Identity, name: str, form: JsonObject) -> JsonObject:
    kind = "custom" if identity.kind == "custom" else "function"
    return {"type": kind, kind: {"name": name, **form}}


def _qualified(identity: Identity) -> str:
    """The name with its namespace, of characters that a name may have."""
    space, name = _NO_NAME.sub("_", identity.namespace), identity.name
    if not space or name.startswith(space):
        return name
    return f"{space.rstrip('_')}__{name}"


def _candidates(identity: Identity, numbers: dict[str, int]) -> Iterator[str]:
    """Names for a tool in the prompt, the best first, without an end.

    numbers: the last number that a tool of each name has tried; all before it are taken.
    """
    if identity.namespace in _PLAIN:
        yield identity.name
    name = _qualified(identity)
    yield name[-LONGEST_NAME:]
    while True:
        numbers[name] = numbers.get(name, 1) + 1
        end = f"_{numbers[name]}"
        yield name[len(end) - LONGEST_NAME :] + end


def _spellings(identity: Identity) -> Iterator[str]:
    """Names that models write for a tool."""
    yield identity.name
    if identity.namespace:
        yield f"{identity.namespace}__{identity.name}"
        yield f"{identity.namespace}.{identity.name}"
