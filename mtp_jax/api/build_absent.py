"""Make a folder of programs for cards that are not here (``build``), from shapes alone."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from kernels_pallas import absent
from mtp_jax.api.build import finish
from mtp_jax.api.load import load_model
from mtp_jax.api.local import make_runner
from mtp_jax.api.options import LLMOptions
from mtp_jax.api.progress import Reporter
from mtp_jax.decode.kept import KeptPrograms
from mtp_jax.decode.programs import Programs
from mtp_jax.engine.engine import Engine
from mtp_jax.errors import ConfigError
from mtp_jax.text.grammar import Grammars


def cards(name: str, data: int, model: int) -> Mesh:
    """A ``data`` x ``model`` mesh of cards to compile for. Raises ConfigError without jax's CUDA compiler."""
    absent.prepare()
    try:
        return absent.mesh_of(name, (data, model), ("data", "model"))
    except RuntimeError as error:
        raise ConfigError(
            f"gpu = {name!r} needs jax's CUDA compiler ({str(error).splitlines()[0]:.80}); install the extra "
            "gpu-compile: pip install 'mtp-jax[gpu-compile]', with Python 3.12 or newer"
        ) from error


def build_absent(options: LLMOptions, mesh: Mesh, out: Path, report: Reporter) -> KeptPrograms:
    """Compile all programs that a server of these options needs on the cards of a mesh.

    mesh: the result of ``cards``; one card runs programs without a mesh. out: the folder that
    gets them. Raises ConfigError, CheckpointError; OSError where it cannot be written.
    """
    wrong = [n for n in ("draft_model", "drafter") if getattr(options, n) is not None]
    if wrong:
        raise ConfigError(
            f"{wrong[0]} needs files or memory that only the card's computer has; leave it out, or compile "
            "there"
        )
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    alone = mesh.devices.flat[0] if mesh.size == 1 else None
    options = replace(options, mesh=None if alone is not None else mesh)
    # The backend and its kernels ask this context for the device that they are made for.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        model = load_model(options, report, abstract=True)
        runner = make_runner(model.decoding, model.params, model.engine, allocate=False)
        words = model.tokenizer
        grammars = words and Grammars.of(words, model.config.vocab_size, model.config.eos_token_ids)
        engine = Engine(model.decoding.model.cfg, model.engine, runner, grammars)
        weights, state, layers = runner.params, runner.state, model.params
        if alone is not None:
            weights, state, layers = jax.tree.map(partial(_on, alone), (weights, state, layers))
        programs = Programs(model.decoding, weights, state, out, layers)
        first, rest = engine.warm_up_keys()
        keys = [*first, *rest]
        with report.phase("compile", "executables") as update:
            programs.prepare_state()
            # In this thread, which alone has the context.
            for count, key in enumerate(keys, start=1):
                programs.build(key)
                update(count, len(keys))
        finish(out, options, engine, programs.kept)
    return programs.kept


def _on(device: Any, a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=SingleDeviceSharding(device))
