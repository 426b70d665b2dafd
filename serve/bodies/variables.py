"""Variables of a chat template, as clients' APIs name them: most of them switch thinking."""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import reduce
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, PrivateAttr, Tag, model_validator

from mtp_jax import JsonObject, Tokenizer
from serve.bodies.fields import Body, bounds, member

_MOST_VALUES = 4096  # of all variables of a request; templates take switches, a few names or a list of texts

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_Think = Annotated[
    Annotated[Effort, Tag("a string")] | Annotated[bool, Tag("a boolean")],
    Discriminator(lambda value: "a string" if isinstance(value, str) else "a boolean"),
]


class Thinking(Body):
    """Field ``thinking`` of Anthropic's, DeepSeek's, GLM's and Moonshot's APIs: whether to think, how much.

    Attributes:
        clear_thinking: whether thoughts of earlier turns are left out (GLM).
        keep: "all": they stay in the prompt (Moonshot).
    """

    without_effect: ClassVar = frozenset({"display"})

    type: Literal["enabled", "disabled", "adaptive", "auto", "between_tools"]
    budget_tokens: Annotated[int, bounds("max_thinking_tokens")] | None = None
    clear_thinking: bool | None = None
    keep: Literal["all"] | None = None


class TemplateOptions(Body):
    """Variables of a chat template, of any name but the names that the server sets itself."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: object) -> object:
        if isinstance(value, dict):
            if own := sorted(Tokenizer.OWN_VARIABLES.intersection(value)):
                raise ValueError(f"{own[0]}: the server sets this variable; leave it out")
            if _has_more_values(value, _MOST_VALUES):
                raise ValueError(f"at most {_MOST_VALUES} values are allowed; send fewer")
        return value

    def unknown(self, prefix: str = "") -> Iterator[str]:
        """No field: the template itself shows which variables have no effect."""
        del prefix
        yield from ()

    @property
    def given(self) -> JsonObject:
        """The variables, without null."""
        return {name: value for name, value in self.model_dump().items() if value is not None}


def _has_more_values(value: Mapping[str, object], most: int) -> bool:
    """Whether a value holds more than ``most`` values inside; counting ends there."""
    found, inner = 0, [value]
    while inner and found <= most:
        one: Any = inner.pop()
        items = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        found += len(items)
        inner += islice(items, most)
    return found > most


class Reasoning(Body):
    """Field ``reasoning`` of OpenAI's Responses API and of OpenRouter: how much to think."""

    without_effect: ClassVar = frozenset({"context", "generate_summary", "summary"})

    enabled: bool | None = None
    effort: Effort | None = None
    max_tokens: Annotated[int, bounds("max_thinking_tokens")] | None = None


def _switched(thinks: bool) -> JsonObject:
    """The variables that tell the templates of every family whether the model thinks."""
    return {"thinking": thinks, "enable_thinking": thinks}


def _kept(keeps: bool) -> JsonObject:
    """Variables that tell GLM, Kimi and DeepSeek-V4 whether earlier turns' thoughts stay in the prompt."""
    return {"preserve_thinking": keeps, "clear_thinking": not keeps, "drop_thinking": not keeps}


def _effort(effort: Effort) -> JsonObject:
    return {"reasoning_effort": effort, **_switched(effort != "none")}


# The variables of each field, by its path; a later field goes before an earlier field.
_VARIABLES: Mapping[str, Callable[[Any], JsonObject]] = {
    "think": lambda think: _switched(think) if isinstance(think, bool) else _effort(think),
    "reasoning.effort": _effort,
    "reasoning_effort": _effort,
    "reasoning.enabled": _switched,
    "enable_thinking": _switched,
    "thinking": lambda thinking: _switched(thinking.type != "disabled"),
    "clear_thinking": lambda clears: _kept(not clears),
    "preserve_thinking": _kept,
    "thinking.clear_thinking": lambda clears: _kept(not clears),
    "thinking.keep": lambda keep: _kept(True),
}


class Switches(Body):
    """Fields for variables of the chat template: any of them, or whether to think and to keep thoughts."""

    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None
    think: _Think | None = None
    enable_thinking: bool | None = None
    clear_thinking: bool | None = None
    preserve_thinking: bool | None = None
    _sent: dict[str, str] = PrivateAttr(default_factory=dict)

    def sent_as(self, paths: dict[str, str]) -> Self:
        """Record the client's own paths of fields, where another API was converted; returns the body."""
        self._sent.update(paths)
        return self

    def _variables(self) -> Iterator[tuple[str, JsonObject]]:
        """The variables of each field that the request has, with its path."""
        for path, variables in _VARIABLES.items():
            value: Any = reduce(member, path.split("."), self)
            if value is not None:
                yield path, variables(value)
        for name, value in self.chat_template_kwargs.given.items() if self.chat_template_kwargs else ():
            yield f"chat_template_kwargs.{name}", {name: value}

    def template_options(self) -> JsonObject:
        """Variables for the chat template; an effort also switches thinking, where no other field does."""
        return {name: value for _, given in self._variables() for name, value in given.items()}

    def unread(self, reads: Collection[str]) -> list[str]:
        """Paths of fields that have no effect on a template which reads these variables alone."""
        unread = [path for path, given in self._variables() if not any(name in reads for name in given)]
        return [self._sent.get(path, path) for path in unread]
