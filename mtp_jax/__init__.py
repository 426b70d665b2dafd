"""DeepSeek-V3-family inference in JAX, the model's own NextN layer drafting."""

from mtp_jax.engine.request import SamplingParams
from mtp_jax.errors import CheckpointError, ConfigError, MtpJaxError, RequestError
from mtp_jax.llm import LLM
from mtp_jax.model.sharding import make_mesh
from mtp_jax.outputs import CompletionOutput, Draft, RequestOutput

__all__ = [
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "Draft",
    "MtpJaxError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "make_mesh",
]
