"""DeepSeek-V3-family inference in JAX, the model's own NextN layer drafting.

Names are imported when first used, so that `import mtp_jax` does not wait for jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtp_jax.api.admission import LazyPrompt
    from mtp_jax.api.async_llm import AsyncLLM
    from mtp_jax.api.demo import demo_model
    from mtp_jax.api.follow import follow
    from mtp_jax.api.llm import LLM
    from mtp_jax.api.outputs import CompletionOutput, Draft, RequestOutput, Timing
    from mtp_jax.api.progress import Reporter, Terminal
    from mtp_jax.api.stream import Stream
    from mtp_jax.engine.sampling_params import OutputKind, SamplingParams
    from mtp_jax.engine.speculation import Logprob, Speculation
    from mtp_jax.engine.stats import EngineStats
    from mtp_jax.errors import (
        CheckpointError,
        ConfigError,
        EngineStopped,
        MtpJaxError,
        Overloaded,
        PromptTooLong,
        RequestError,
        SchemaError,
    )
    from mtp_jax.hosts.group import Group, join
    from mtp_jax.hosts.options import Hosts
    from mtp_jax.json_object import JsonMapping, JsonObject
    from mtp_jax.model.sharding import make_mesh
    from mtp_jax.text.grammar import StructuredOutput
    from mtp_jax.text.thoughts import Thoughts
    from mtp_jax.text.tokenizer import StreamDecoder, Tokenizer
    from mtp_jax.text.tools.parts import CallArguments, CallBegin, CallEnd, OutputText
    from mtp_jax.text.tools.tool import Tool
    from mtp_jax.text.tools.use import ToolUse
    from mtp_jax.wire.tls import TlsFiles, is_loopback

__all__ = [
    "LLM",
    "AsyncLLM",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "Draft",
    "EngineStats",
    "EngineStopped",
    "Group",
    "Hosts",
    "JsonMapping",
    "JsonObject",
    "LazyPrompt",
    "Logprob",
    "MtpJaxError",
    "OutputKind",
    "OutputText",
    "Overloaded",
    "PromptTooLong",
    "Reporter",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchemaError",
    "Speculation",
    "Stream",
    "StreamDecoder",
    "StructuredOutput",
    "Terminal",
    "Thoughts",
    "Timing",
    "TlsFiles",
    "Tokenizer",
    "Tool",
    "ToolUse",
    "demo_model",
    "follow",
    "is_loopback",
    "join",
    "make_mesh",
]

_HOMES = {
    "LLM": "api.llm",
    "AsyncLLM": "api.async_llm",
    "CompletionOutput": "api.outputs",
    "Draft": "api.outputs",
    "EngineStats": "engine.stats",
    "Group": "hosts.group",
    "Hosts": "hosts.options",
    "JsonMapping": "json_object",
    "JsonObject": "json_object",
    "LazyPrompt": "api.admission",
    "Logprob": "engine.speculation",
    "OutputKind": "engine.sampling_params",
    "Reporter": "api.progress",
    "RequestOutput": "api.outputs",
    "SamplingParams": "engine.sampling_params",
    "Speculation": "engine.speculation",
    "Stream": "api.stream",
    "StreamDecoder": "text.tokenizer",
    "StructuredOutput": "text.grammar",
    "Terminal": "api.progress",
    "Thoughts": "text.thoughts",
    "Timing": "api.outputs",
    "TlsFiles": "wire.tls",
    "Tokenizer": "text.tokenizer",
    "ToolUse": "text.tools.use",
    "Tool": "text.tools.tool",
    "OutputText": "text.tools.parts",
    "CallEnd": "text.tools.parts",
    "CallBegin": "text.tools.parts",
    "CallArguments": "text.tools.parts",
    "demo_model": "api.demo",
    "follow": "api.follow",
    "is_loopback": "wire.tls",
    "join": "hosts.group",
    "make_mesh": "model.sharding",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
