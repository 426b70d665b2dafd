"""The body of /generate, in SGLang's shapes."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mtp_jax import JsonMapping, SamplingParams
from serve.bodies.fields import Name, Schema, Structured, Text, bounds
from serve.bodies.foreign import Refusing
from serve.bodies.schema import Sampling

_DEFAULT_MAX_TOKENS = 128


class NativeSampling(Sampling):
    """Sampling options under SGLang's names, where they differ from OpenAI's."""

    max_new_tokens: Annotated[int, bounds("max_tokens")] | None = None
    min_new_tokens: Annotated[int, bounds("min_tokens")] | None = None
    sampling_seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    no_stop_trim: bool | None = None
    json_schema: Schema | None = None
    regex: Text | None = None
    ebnf: Any = None
    structural_tag: Any = None

    @model_validator(mode="after")
    def _applies(self) -> "NativeSampling":
        if self.ebnf is not None or self.structural_tag is not None:
            raise ValueError("ebnf, structural_tag: not supported; use json_schema or regex")
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("json_schema: not with regex; leave one of them out")
        if (self.json_schema is not None or self.regex is not None) and self.structured_outputs is not None:
            raise ValueError("structured_outputs: not with json_schema or regex; leave one of them out")
        if self.speculative is not None and self.speculative.metrics is not None:
            raise ValueError("speculative.metrics: not on this route, see meta_info; leave it out")
        return self


class GenerateBody(Refusing):
    """/generate."""

    model: Name | None = None
    text: str | None = None
    input_ids: Annotated[list[int], Field(fail_fast=True, min_length=1, max_length=2**20)] | None = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_logprobs_num: Annotated[int, bounds("logprobs")] | None = None
    return_text_in_logprobs: bool | None = None
    return_routed_experts: Literal[False] | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "GenerateBody":
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("text: give exactly one of text and input_ids")
        return self

    @property
    def scores_prompt(self) -> bool:
        """Whether to score tokens of the prompt: as in SGLang from ``logprob_start_len`` on, none for -1."""
        return self.return_logprob is True and self.logprob_start_len not in (None, -1)

    def params(self, defaults: JsonMapping) -> SamplingParams:
        """The engine's parameters; ``defaults``: values for fields not given. Raises RequestError."""
        p = self.sampling_params or NativeSampling()
        structured = None
        if p.json_schema is not None or p.regex is not None:
            structured = Structured.model_validate({"json": p.json_schema, "regex": p.regex})
        renamed = {
            "min_tokens": p.min_new_tokens,
            "seed": p.sampling_seed,
            "include_stop_str_in_output": p.no_stop_trim,
            "structured_outputs": structured,
        }
        p = p.model_copy(update={name: value for name, value in renamed.items() if value is not None})
        most = p.max_new_tokens or _DEFAULT_MAX_TOKENS
        top = (self.top_logprobs_num or 0) if self.return_logprob else None
        scored = top if self.scores_prompt else None
        params = p.params(most, self.stream, top, scored, defaults=defaults)
        return replace(params, output_kind="cumulative") if self.stream else params
