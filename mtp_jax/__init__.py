"""DeepSeek-V3-family inference in JAX, the model's own NextN layer drafting.

Names are imported when first used, so that `import mtp_jax` does not wait for jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtp_jax.async_llm import AsyncLLM, Stream
    from mtp_jax.engine.request import Logprob, SamplingParams, Speculation
    from mtp_jax.errors import (
        CheckpointError,
        ConfigError,
        EngineStopped,
        MtpJaxError,
        Overloaded,
        RequestError,
    )
    from mtp_jax.grammar import StructuredOutput
    from mtp_jax.llm import LLM
    from mtp_jax.model.sharding import make_mesh
    from mtp_jax.outputs import CompletionOutput, Draft, RequestOutput
    from mtp_jax.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "Draft",
    "EngineStopped",
    "Logprob",
    "MtpJaxError",
    "Overloaded",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Speculation",
    "Stream",
    "StructuredOutput",
    "Tokenizer",
    "make_mesh",
]

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "Draft": "outputs",
    "Logprob": "engine.request",
    "RequestOutput": "outputs",
    "SamplingParams": "engine.request",
    "Speculation": "engine.request",
    "Stream": "async_llm",
    "StructuredOutput": "grammar",
    "Tokenizer": "tokenizer",
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
