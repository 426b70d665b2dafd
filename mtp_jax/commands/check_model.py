"""Faults of a model, and of the options for it, that show before jax is imported."""

from pathlib import Path

from mtp_jax.api.options import LLMOptions
from mtp_jax.engine.defaults import Target
from mtp_jax.engine.validate import check_sizes
from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.machine import cpu_devices
from mtp_jax.model.divide import check_divides
from mtp_jax.model.family import config_of_file
from mtp_jax.model.hf_config import missing_folder


def check_model(directory: Path, options: JsonObject, hosts: int = 1) -> None:
    """Raise ConfigError for a model, a draft model, or options for them, that cannot be run.

    options: arguments of ``LLM``, with the mesh by its shape.
    """
    model = config_of_file(directory / "config.json")
    if (head := options.get("draft_model")) is not None and not head.is_dir():
        raise ConfigError(missing_folder(head))
    data, parts = options.get("mesh", (1, 1))
    given = LLMOptions(**{**options, "mesh": None})
    check_sizes(model, given.engine(model, Target(unit=data * given.micro_batches)), data)
    if "mesh" in options:
        check_divides(model, {"data": data, "model": parts})
    devices = cpu_devices()
    if devices is None or hosts > 1:
        return
    if data * parts > devices:
        raise ConfigError(
            f"a {data}x{parts} mesh needs {data * parts} devices; this computer has no others than its "
            f"processor, which counts as {devices}; leave it out, or set JAX_NUM_CPU_DEVICES={data * parts}"
        )
    if given.kernels == "mosaic_gpu":
        raise ConfigError(
            "kernels = 'mosaic_gpu' needs an NVIDIA GPU of the Hopper generation (H100, H200); JAX has the "
            "processor alone here; take kernels=auto or kernels=xla"
        )
