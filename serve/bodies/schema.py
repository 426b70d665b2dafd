"""Bodies of completions. Types are strict, numbers finite and bounded; null means "not given"."""

from typing import Annotated, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator
from pydantic.fields import FieldInfo

from mtp_jax import JsonMapping, JsonObject, RequestError, SamplingParams, SchemaError, StructuredOutput
from serve.base.errors import ApiError
from serve.bodies.conversation import Conversation
from serve.bodies.fields import (
    MAX_N,
    MOST_SCORES,
    Biases,
    Body,
    Ids,
    Name,
    Prompts,
    ResponseFormat,
    Speculative,
    Stops,
    StreamOptions,
    Structured,
    Text,
    TokenId,
    Words,
    bounds,
)
from serve.bodies.foreign import Refusing

# Fields of OpenAI's API that name the client, or ask for services that a server of one model need not give.
_OFFICIAL = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)


def also(name: str, *others: str) -> FieldInfo:
    """The names of a field, with names of other servers; errors and /openapi.json have the first name."""
    return Field(validation_alias=AliasChoices(name, *others))


def most_tokens(name: str, *others: str) -> FieldInfo:
    """The names of the field for the most tokens of an answer, which each server names otherwise."""
    return also(name, *others, "max_new_tokens", "n_predict", "num_predict")


def _limit(value: object) -> object:
    """The limit, or None: -1 and -2 stand for none in llama.cpp and ollama."""
    return None if isinstance(value, int) and value in (-1, -2) else value


MaxTokens = Annotated[Annotated[int, bounds("max_tokens")] | None, BeforeValidator(_limit)]


class Sampling(Refusing):
    """Fields of sampling, on every route. Names, ranges and defaults are OpenAI's; further fields are vLLM's.

    Bounds are those of ``SamplingParams``, except where OpenAI's are narrower.
    """

    without_effect: ClassVar = _OFFICIAL | Refusing.without_effect

    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, bounds("top_p")] | None = None
    top_k: Annotated[int, bounds("top_k")] | None = None
    min_p: Annotated[float, bounds("min_p")] | None = None
    min_tokens: Annotated[
        Annotated[int, bounds("min_tokens")] | None, also("min_tokens", "min_new_tokens")
    ] = None
    stop: Stops | None = None
    stop_token_ids: Ids | None = None
    stop_in_thoughts: bool | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Words | None = None
    max_thinking_tokens: Annotated[
        Annotated[int, bounds("max_thinking_tokens")] | None,
        also("max_thinking_tokens", "thinking_token_budget", "thinking_budget"),
    ] = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, bounds("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounds("frequency_penalty")] | None = None
    repetition_penalty: Annotated[
        Annotated[float, bounds("repetition_penalty")] | None, also("repetition_penalty", "repeat_penalty")
    ] = None
    logit_bias: Biases | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: Annotated[bool | None, also("include_stop_str_in_output", "no_stop_trim")] = (
        None
    )
    speculative: Speculative | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    timeout: Annotated[float, Field(gt=0, le=1e6)] | None = None
    cache_salt: Name | None = None

    def params(
        self,
        max_tokens: int | None,
        stream: bool | None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        *,
        defaults: JsonMapping,
    ) -> SamplingParams:
        """The engine's parameters; ``defaults``: values for fields not given. Raises RequestError."""
        same = (
            "n", "temperature", "top_p", "top_k", "min_p", "min_tokens", "stop", "stop_token_ids",
            "stop_in_thoughts", "allowed_token_ids", "bad_words", "max_thinking_tokens",
            "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty",
            "skip_special_tokens", "include_stop_str_in_output",
        )  # fmt: skip
        given: JsonObject = {name: v for name in same if (v := getattr(self, name)) is not None}
        return SamplingParams(
            **{**defaults, **given, "max_tokens": max_tokens},
            seed=None if self.seed is None else self.seed % 2**32,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_speculative_tokens=self._depth(),
            suffix_drafts=self.speculative and self.speculative.suffix,
            structured=self._form(),
            output_kind="delta" if stream else "final_only",
        )

    def _depth(self) -> int | None:
        s = self.speculative
        if s is None:
            return None
        return 0 if s.enabled is False else s.max_tokens

    def schema_path(self, tool: str | None) -> str:
        """The path of the output's schema in the request, or of that of a tool's parameters."""
        del tool
        kind = self.response_format
        if kind is None:
            return "structured_outputs.json"
        return "response_format.json_schema.schema" if kind.json_schema else "response_format.schema"

    def unenforced(self, error: SchemaError) -> ApiError:
        """The error of a schema that cannot be enforced, with the place in the request."""
        root = self.schema_path(error.tool)
        return ApiError(400, error.at(root), error.path(root))

    def _form(self) -> StructuredOutput | None:
        try:
            return self._structured()
        except SchemaError as error:
            raise self.unenforced(error) from None

    def _structured(self) -> StructuredOutput | None:
        kind, own = self.response_format, self.structured_outputs
        if kind is not None and kind.type == "text":
            kind = None
        if kind is not None and own is not None:
            raise RequestError("give either response_format or structured_outputs, not both")
        if kind is not None:
            if kind.tags:
                return StructuredOutput(structural_tag=kind.tags)
            if kind.wanted is not None:
                return StructuredOutput(json_schema=kind.wanted, strict=kind.strict)
            return StructuredOutput(json_object=True)
        if own is None:
            return None
        if own.grammar is not None:
            return StructuredOutput.of_grammar(own.grammar)
        tags = own.structural_tag
        return StructuredOutput(
            own.json_, own.json_object or False, own.regex, own.choice, structural_tag=tags
        )


class CallBody(Sampling):
    """Fields of both completion routes."""

    model: Name | None = None
    rid: Annotated[Name, Field(min_length=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_token_origins: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    prompt_logprobs: Annotated[int, bounds("prompt_logprobs")] | None = None
    include_metrics: bool | None = None

    def tells_times(self, unasked: bool) -> bool:
        """Whether the answer has the request's times. unasked: where the client does not say."""
        return unasked if self.include_metrics is None else self.include_metrics

    @property
    def names_ids(self) -> bool:
        """Whether scores name tokens by their ids."""
        return self.return_tokens_as_token_ids is True

    def cut(self, prompt: list[int]) -> list[int]:
        """The last ``truncate_prompt_tokens`` tokens of a prompt."""
        return prompt[-(self.truncate_prompt_tokens or len(prompt)) :]

    @model_validator(mode="after")
    def _options_apply(self) -> "CallBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed with stream = true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: not in a stream; leave one of them out")
        return self


class CompletionBody(CallBody):
    """/v1/completions."""

    obeyed: ClassVar = frozenset({"include_reasoning", "separate_reasoning", "reasoning_format"})

    prompt: Prompts
    add_special_tokens: Annotated[bool | None, also("add_special_tokens", "add_bos_token")] = None
    max_tokens: Annotated[
        Annotated[int, Field(ge=0, lt=2**31)] | None,
        most_tokens("max_tokens", "max_completion_tokens", "max_output_tokens"),
    ] = None
    logprobs: Annotated[int, bounds("logprobs")] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _combines(self) -> "CompletionBody":
        if self.suffix:
            raise ValueError("suffix: not supported; leave it out")
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of: only allowed with the value of n; all completions are returned")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 is only allowed with echo = true; give 1 or more")
        if self.prompt_logprobs is not None and (self.echo or self.max_tokens == 0):
            raise ValueError(
                "prompt_logprobs: not with echo, which has logprobs of its own; leave one of them out"
            )
        if self.echo and self.return_token_origins:
            raise ValueError("return_token_origins: not allowed with echo; leave one of them out")
        most = self.logprobs if self.echo else self.prompt_logprobs
        if most is not None:
            # The number of characters stands for the number of tokens, which is hardly ever larger.
            scores = sum(map(len, self.prompts)) * (self.n or 1) * (most + 1)
            if scores > MOST_SCORES:
                field = "logprobs: with echo" if self.echo else "prompt_logprobs:"
                raise ValueError(
                    f"{field} the characters or ids of all prompts times n times {most} + 1 are {scores}; "
                    f"at most {MOST_SCORES} are allowed: send fewer prompts at once"
                )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts of the request, one or more."""
        p = self.prompt
        if isinstance(p, str):
            return [p]
        one = [token for token in p if isinstance(token, int)]
        return [one] if one else [prompt for prompt in p if not isinstance(prompt, int)]


class ChatBody(CallBody, Conversation):
    """/v1/chat/completions."""

    max_tokens: Annotated[MaxTokens, most_tokens("max_tokens", "max_output_tokens")] = None
    max_completion_tokens: MaxTokens = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_format: Literal["none", "raw", "auto", "deepseek", "parsed", "hidden"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, bounds("logprobs")] | None = None

    def schema_path(self, tool: str | None) -> str:
        """The same, as the client sent it."""
        path = super().schema_path(tool)
        if tool is not None:
            path = next((f"tools.{i}.function.parameters" for i, t in self._numbered if t == tool), "tools")
        return self._sent.get(path, path)

    @model_validator(mode="after")
    def _combines(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only allowed with logprobs = true")
        return self

    def most_tokens(self, usual: int | None) -> int | None:
        """The limit of the answer's tokens; usual: the model's own, where the request has none."""
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return given or (usual and max(usual, self.min_tokens or 0))

    @property
    def thoughts(self) -> Literal["apart", "inside", "hidden"]:
        """The place of thoughts: a field of their own, the text with their tags, or none."""
        if self.include_reasoning is False or self.reasoning_format == "hidden":
            return "hidden"
        inside = self.separate_reasoning is False or self.reasoning_format in ("none", "raw")
        return "inside" if inside else "apart"

    @property
    def thinking_budget(self) -> int | None:
        """Most tokens of a thought, under any of its names."""
        given = (
            self.max_thinking_tokens,
            self.thinking and self.thinking.budget_tokens,
            self.reasoning and self.reasoning.max_tokens,
        )
        return next((most for most in given if most is not None), None)


class TokenizeBody(Body):
    """/tokenize of a text."""

    model: Name | None = None
    prompt: Text
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(Conversation):
    """/tokenize of a conversation."""

    model: Name | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """/detokenize."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=2**20)]
