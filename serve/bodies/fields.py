"""Kinds of fields of request bodies, and the objects inside them."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WrapValidator,
    model_validator,
)
from pydantic.fields import FieldInfo

from mtp_jax import JsonObject, SamplingParams
from mtp_jax.options import declared
from serve.base.settings import MAX_NAME, SpecMetrics
from serve.bodies.counting import Objects

MAX_N = 128
MAX_PROMPTS = 1024
_MOST_STOPS = 32
_MOST_STRUCTURES = 1024
_MOST_IDS = 1024
_SHOWN_CHARACTERS = 60
MOST_SCORES = 2**22
Text = Annotated[str, Field(max_length=4 * 2**20)]
Name = Annotated[str, Field(max_length=MAX_NAME)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Lists fail at their first wrong item: a body could make millions of errors, of which one is reported.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=2**20)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
# Stricter than Python's int(), which takes " 1", "1_0" and "01".
_TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Ids = Annotated[list[TokenId], Field(fail_fast=True, max_length=_MOST_IDS)]


def bounds(name: str) -> FieldInfo:
    """The range that a field has in ``SamplingParams``."""
    about = declared(SamplingParams)[name]
    return Field(ge=about.low, le=about.high)


def form(value: object) -> str:
    """Choose one of a field's forms by its value, so that errors are about the form that was meant."""
    return "a list" if isinstance(value, list) else "a string"


def told(tell: Callable[[object], str | None], expected: str) -> Discriminator:
    """Choose the form that ``tell`` names; the error ``expected`` where it names none."""
    return Discriminator(tell, custom_error_type="form", custom_error_message=expected)


def member(value: object, name: str) -> object:
    """A member of a JSON object, or of the body that was made of it; None where it is not there."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def kind_of(value: object) -> str | None:
    """The ``type`` of an object, as the client names it."""
    kind = member(value, "type")
    return kind if isinstance(kind, str) else None


def _schema_form(value: object) -> str | None:
    return "a string" if isinstance(value, str) else "an object" if isinstance(value, dict) else None


def _stop_form(value: object) -> str | None:
    return form(value) if isinstance(value, (str, list)) else None


def _prompt_form(value: object) -> str | None:
    inner = {str: "a list of strings", list: "a list of lists"}
    if not isinstance(value, list):
        return "a string" if isinstance(value, str) else None
    return inner.get(type(value[0]), "a list of ids") if value else "a list of ids"


def one_of(
    tags: Mapping[str | None, str],
    expected: str = "",
    *,
    of_text: str | None = None,
    other: str | None = None,
) -> Discriminator:
    """Choose the class of an object by its ``type``.

    tags: the tag of each type, and of None, no type. of_text: the tag of a string. other: the tag of any
    other type; None: ``expected`` is its error.
    """

    def tell(value: object) -> str | None:
        return of_text if of_text and isinstance(value, str) else tags.get(kind_of(value), other)

    return told(tell, expected)


def first_wrong(value: object, check: Callable[[object], object]) -> object:
    """Check the number of members, then one after the other, as mappings do not fail at a wrong member."""
    if isinstance(value, dict):
        if len(value) > _MOST_IDS:
            raise ValueError(f"at most {_MOST_IDS} tokens are allowed, got {len(value)}")
        for name, member in value.items():
            check({name: member})
    return check(value)


Biases = Annotated[dict[_TokenKey, Annotated[float, Field(ge=-100, le=100)]], WrapValidator(first_wrong)]
Stops = Annotated[
    Annotated[Stop, Tag("a string")]
    | Annotated[list[Stop], Field(fail_fast=True, max_length=_MOST_STOPS), Tag("a list")],
    told(_stop_form, "Input should be a string or a list of strings"),
]
_T = TypeVar("_T")
TextOr = Annotated[
    Annotated[Text, Tag("a string")] | Annotated[list[_T], Field(fail_fast=True), Tag("a list")],
    Discriminator(form),
]
"""A text, or a list of parts of this kind."""
Words = Annotated[list[Stop], Field(fail_fast=True, max_length=_MOST_STOPS)]
Schema = Annotated[
    Annotated[Text, Tag("a string")] | Annotated[JsonObject, Tag("an object")],
    told(_schema_form, "Input should be a JSON Schema: an object, or its text"),
]
Prompts = Annotated[
    Annotated[Text, Tag("a string")]
    | Annotated[TokenIds, Tag("a list of ids")]
    | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("a list of strings")]
    | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("a list of lists")],
    told(
        _prompt_form,
        "Input should be a string, a list of strings, a list of token ids or a list of such lists",
    ),
]


@cache
def _names(kind: type[BaseModel]) -> tuple[str, ...]:
    """The names of a body's fields, which pydantic makes anew each time."""
    return tuple(kind.model_fields)


class Body(BaseModel):
    """A JSON object; unknown fields are kept for a warning.

    Attributes:
        without_effect: fields that clients send and that do not change an answer here; they cause no warning.
    """

    without_effect: ClassVar[frozenset[str]] = frozenset()

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _counted(cls, value: object, info: ValidationInfo) -> object:
        """Count an object of a request; a conversion of bodies has no count."""
        if isinstance(info.context, Objects) and isinstance(value, dict):
            info.context.add(value, len(_names(cls)))
        return value

    def unknown(self, prefix: str = "") -> Iterator[str]:
        """Paths of unknown fields that are not null."""
        for name, value in (self.model_extra or {}).items():
            # Every prefix is cached.
            if value is not None and name != "cache_control" and name not in self.without_effect:
                yield prefix + name
        for name in _names(self.__class__):
            value = getattr(self, name)
            if isinstance(value, Body):
                yield from value.unknown(f"{prefix}{name}.")


def all_names(kind: type[BaseModel]) -> set[str]:
    """The names of a body's fields, under which a client may send them."""
    aliases = (field.validation_alias for field in kind.model_fields.values())
    others = [alias.choices for alias in aliases if isinstance(alias, AliasChoices)]
    return {*kind.model_fields, *(name for names in others for name in names if isinstance(name, str))}


class StreamOptions(Body):
    """include_usage: a last chunk with the usage. continuous_usage_stats: the usage so far in every chunk."""

    without_effect: ClassVar = frozenset({"include_obfuscation"})  # there is none

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculative(Body):
    """enabled: whether to draft. max_tokens: most drafts per step.

    suffix: whether drafts may come from a suffix match; None: unless the request samples. metrics: the
    results of drafting to report at the end.
    """

    enabled: bool | None = None
    max_tokens: Annotated[int, bounds("num_speculative_tokens")] | None = None
    suffix: bool | None = None
    metrics: SpecMetrics | None = None


class JsonSchema(Body):
    """The schema of a response format. ``strict`` refuses a schema of which a part cannot be enforced."""

    name: Name | None = None
    description: str | None = None
    schema_: Annotated[JsonObject, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's ``response_format``; other servers take the schema without an object around it."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    format: JsonObject | None = None
    structures: Annotated[list[JsonObject], Field(fail_fast=True, max_length=_MOST_STRUCTURES)] | None = None
    triggers: Annotated[list[Text], Field(fail_fast=True, max_length=_MOST_STRUCTURES)] | None = None

    @model_validator(mode="after")
    def _matches(self) -> "ResponseFormat":
        if self.json_schema is not None and (self.type != "json_schema" or self.schema_ is not None):
            raise ValueError("json_schema goes with the type json_schema, and without schema beside it")
        if self.type == "json_schema" and self.wanted is None:
            raise ValueError("the type json_schema needs json_schema, an object with the schema in it")
        if self.type == "text" and self.wanted is not None:
            raise ValueError("schema: not with the type text; use the type json_schema")
        if (self.type == "structural_tag") != bool(self.tags):
            raise ValueError("the type structural_tag, and no other, has format, or structures and triggers")
        return self

    @property
    def tags(self) -> JsonObject:
        """The description of structural tags; empty: there is none."""
        found = {"format": self.format, "structures": self.structures, "triggers": self.triggers}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def strict(self) -> bool:
        """Whether the whole schema must be enforced."""
        return self.json_schema is not None and self.json_schema.strict is True

    @property
    def wanted(self) -> JsonObject | None:
        """The schema; None: there is none."""
        return self.json_schema.schema_ if self.json_schema else self.schema_


class Structured(Body):
    """vLLM's ``structured_outputs``: exactly one of these fields."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=4096)] | None = None
    grammar: Text | None = None
    structural_tag: Schema | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _names_one(self) -> "Structured":
        names = ("json_", "regex", "choice", "grammar", "structural_tag")
        given = [name for name in names if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            got = [name.strip("_") for name in given] or sorted(self.model_extra or {}) or ["nothing"]
            shown, known = ", ".join(got)[:_SHOWN_CHARACTERS], ", ".join(n.strip("_") for n in names)
            raise ValueError(f"got {shown}; give exactly one of {known} and json_object")
        return self
