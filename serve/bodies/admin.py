"""Bodies of the routes that need an admin key."""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from serve.bodies.fields import Body, Name, Text, TokenIds, form

_Tags = Annotated[
    list[
        Annotated[
            Literal["weights", "draft", "cache"],
            BeforeValidator(lambda tag: "cache" if tag == "kv_cache" else tag),  # SGLang's name
        ]
    ],
    Field(fail_fast=True),
]
_Probe = Annotated[Annotated[Text, Tag("a string")] | Annotated[TokenIds, Tag("a list")], Discriminator(form)]


class UpdateBody(Body):
    """/update_weights_from_disk. Fields are arguments of ``AsyncLLM.update_weights``."""

    model: Name | None = None
    model_path: Text
    draft_model_path: Text | None = None
    keep_draft: bool | None = None
    weight_version: Name | None = None
    probe: Annotated[list[_Probe], Field(fail_fast=True, max_length=64)] | None = None
    abort_all_requests: bool | None = None
    # Values that have no effect: there is one way to read weights, and an update always flushes the cache.
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: Literal[True] | None = None


class ReleaseBody(Body):
    """/release_memory_occupation. Fields are arguments of ``AsyncLLM.release_memory``."""

    model: Name | None = None
    tags: _Tags | None = None
    backup: bool | None = None
    abort_all_requests: bool | None = None


class ResumeBody(Body):
    """/resume_memory_occupation."""

    model: Name | None = None
    tags: _Tags | None = None


class VersionBody(Body):
    """/update_weight_version."""

    new_version: Name
    abort_all_requests: bool | None = None


class PauseBody(Body):
    """/pause_generation. mode: SGLang's; "abort" unless given."""

    mode: Literal["abort", "retract", "in_place"] | None = None


class ContinueBody(Body):
    """/continue_generation."""

    without_effect: ClassVar = frozenset({"torch_empty_cache"})


class AbortBody(Body):
    """/abort_request. rid: the name of a request, of any route. abort_all: end all of them."""

    without_effect: ClassVar = frozenset({"abort_message", "finished_reason"})

    rid: Name | None = None
    abort_all: bool | None = None

    @model_validator(mode="after")
    def _names_some(self) -> "AbortBody":
        if not self.rid and not self.abort_all:
            raise ValueError("rid: which request to end? give its rid, or abort_all = true")
        return self


class HiddenStatesBody(Body):
    """/hidden_states. positions: positions of tokens, from the end where negative; none: all tokens.

    layers: see ``LLM.hidden_states``.
    """

    model: Name | None = None
    input_ids: TokenIds
    positions: Annotated[list[int], Field(fail_fast=True, min_length=1, max_length=2**20)] | None = None
    layers: Annotated[list[int], Field(fail_fast=True, min_length=1, max_length=2**10)] | None = None
