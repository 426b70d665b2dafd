"""The body of /generate, in SGLang's shapes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Discriminator, Field, Tag, model_validator

from mtp_jax import JsonMapping, SamplingParams
from serve.bodies.fields import MAX_PROMPTS, Name, Schema, Structured, Text, TokenIds, bounds
from serve.bodies.foreign import Refusing
from serve.bodies.schema import Sampling

_DEFAULT_MAX_TOKENS = 128
_OF_EACH = (
    *("rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"),
    "return_routed_experts",
)
_T = TypeVar("_T")
_Several = Annotated[list[_T], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]


def _form(value: object) -> str:
    return "a list" if isinstance(value, list) else "one value"


def _form_of_ids(value: object) -> str:
    several = isinstance(value, list) and bool(value) and isinstance(value[0], list)
    return "a list of lists" if several else "a list of ids"


_Each = Annotated[
    Annotated[_T, Tag("one value")] | Annotated[_Several[_T], Tag("a list")], Discriminator(_form)
]
"""One value for all prompts, or a list of a value for each prompt of a batch."""


class NativeSampling(Sampling):
    """Sampling options under SGLang's names, where they differ from OpenAI's."""

    # No text here ever has spaces between special tokens.
    without_effect: ClassVar = Sampling.without_effect | {"spaces_between_special_tokens"}

    max_new_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_new_tokens: Annotated[int, bounds("min_tokens")] | None = None
    sampling_seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    no_stop_trim: bool | None = None
    json_schema: Schema | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    structural_tag: Schema | None = None

    @model_validator(mode="after")
    def _applies(self) -> "NativeSampling":
        if len(given := [*self.form, *(["structured_outputs"] if self.structured_outputs else [])]) > 1:
            raise ValueError(f"{given[0]}: not with {given[1]}; leave one of them out")
        if self.speculative is not None and self.speculative.metrics is not None:
            raise ValueError("speculative.metrics: not on this route, see meta_info; leave it out")
        return self

    def schema_path(self, tool: str | None) -> str:
        """The same."""
        return f"sampling_params.{next(iter(self.form))}" if self.form else super().schema_path(tool)

    @property
    def form(self) -> dict[str, Any]:
        """The form of the output under SGLang's name for it; empty: any."""
        names = ("json_schema", "regex", "ebnf", "structural_tag")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Ask:
    """One prompt of a body, with the values that are its own.

    Attributes:
        rid: its name; None: the client gave none.
    """

    prompt: str | list[int]
    rid: str | None
    sampling: NativeSampling
    return_logprob: bool
    logprob_start_len: int | None
    top_logprobs_num: int
    return_routed_experts: bool

    @property
    def scores_prompt(self) -> bool:
        """Whether to score tokens of the prompt, as SGLang does from ``logprob_start_len`` on; -1: none."""
        return self.return_logprob and self.logprob_start_len not in (None, -1)

    @property
    def answers(self) -> bool:
        """Whether the model is to write tokens, rather than only to read the prompt."""
        return self.sampling.max_new_tokens != 0

    def params(self, stream: bool | None, defaults: JsonMapping) -> SamplingParams:
        """The engine's parameters; ``defaults``: values for fields not given. Raises RequestError."""
        p = self.sampling
        other = {"json_schema": "json", "ebnf": "grammar"}
        form = {other.get(name, name): value for name, value in p.form.items()}
        structured = Structured.model_validate(form) if form else None
        renamed = {
            "min_tokens": p.min_new_tokens,
            "seed": p.sampling_seed,
            "include_stop_str_in_output": p.no_stop_trim,
            "structured_outputs": structured,
        }
        p = p.model_copy(update={name: value for name, value in renamed.items() if value is not None})
        # To score a prompt the engine must generate one token, which the answer leaves out.
        most = _DEFAULT_MAX_TOKENS if p.max_new_tokens is None else max(p.max_new_tokens, 1)
        top = self.top_logprobs_num if self.return_logprob else None
        scored = top if self.scores_prompt else None
        params = p.params(most, stream, top, scored, defaults=defaults)
        kind = "cumulative" if stream else params.output_kind
        return replace(params, output_kind=kind, routed_experts=self.return_routed_experts)


class GenerateBody(Refusing):
    """/generate: one prompt, or a batch, which ``text`` or ``input_ids`` holds as a list of prompts."""

    model: Name | None = None
    text: _Each[Text] | None = None
    input_ids: (
        Annotated[
            Annotated[TokenIds, Tag("a list of ids")] | Annotated[_Several[TokenIds], Tag("a list of lists")],
            Discriminator(_form_of_ids),
        ]
        | None
    ) = None
    rid: _Each[Name] | None = None
    sampling_params: _Each[NativeSampling] | None = None
    stream: bool | None = None
    return_logprob: _Each[bool] | None = None
    logprob_start_len: _Each[Annotated[int, Field(ge=-1, lt=2**31)]] | None = None
    top_logprobs_num: _Each[Annotated[int, bounds("logprobs")]] | None = None
    return_text_in_logprobs: bool | None = None
    return_routed_experts: _Each[bool] | None = None
    routed_experts_start_len: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    @model_validator(mode="after")
    def _lists_fit(self) -> "GenerateBody":
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("text: give exactly one of text and input_ids")
        batch = len(self._given) if self.is_batch else 0
        for name in _OF_EACH:
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != batch:
                prompts, wanted = (f"{batch} prompts", f", or {batch}") if batch else ("one prompt", "")
                raise ValueError(f"{name}: a list of {len(value)} for {prompts}; give one value{wanted}")
        if isinstance(self.rid, list) and len({*self.rid}) < len(self.rid):
            raise ValueError("rid: two prompts have the same; give each its own")
        return self

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list, even if there is one prompt."""
        given = self._given
        return isinstance(given, list) and not isinstance(given[0], int)

    @property
    def _given(self) -> Any:
        return self.input_ids if self.text is None else self.text

    @property
    def asks(self) -> list[Ask]:
        """The prompts. A batch with one ``rid`` gives its prompts names that end in _0, _1 and so on."""

        def own(name: str, i: int) -> Any:
            value = getattr(self, name)
            return value[i] if isinstance(value, list) else value

        return [
            Ask(
                prompt,
                f"{self.rid}_{i}" if self.is_batch and isinstance(self.rid, str) else own("rid", i) or None,
                own("sampling_params", i) or NativeSampling(),
                own("return_logprob", i) is True,
                own("logprob_start_len", i),
                own("top_logprobs_num", i) or 0,
                own("return_routed_experts", i) is True,
            )
            for i, prompt in enumerate(self._given if self.is_batch else [self._given])
        ]

    def unknown(self, prefix: str = "") -> Iterator[str]:
        """Paths of unknown fields, of sampling parameters in a list, too."""
        yield from super().unknown(prefix)
        if isinstance(self.sampling_params, list):
            for i, params in enumerate(self.sampling_params):
                yield from params.unknown(f"{prefix}sampling_params.{i}.")
