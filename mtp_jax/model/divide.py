"""Whether a model divides over a mesh, without jax."""

from collections.abc import Mapping

from mtp_jax.errors import ConfigError
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.spec import leaves, ways
from mtp_jax.model.specs import param_specs


def check_divides(cfg: ModelConfig, mesh: Mapping[str, int]) -> None:
    """Raise ConfigError if a sharded dimension of the model does not divide over a mesh of these axes."""
    for spec in leaves(param_specs(cfg)):
        for size, axis in zip(spec.shape, spec.axes, strict=True):
            devices = ways(axis, mesh)
            if size % devices:
                raise ConfigError(
                    f"{axis} = {size} does not divide over {devices} devices of mesh {dict(mesh)}; "
                    "choose a mesh whose axes divide it"
                )
    heads, each = cfg.num_attention_heads, cfg.num_attention_heads // ways("heads", mesh)
    if fault := cfg.attention.split_fault(heads, each):
        raise ConfigError(
            f"mesh {dict(mesh)} gives each device {each} query heads, and {fault}; choose another model axis"
        )
