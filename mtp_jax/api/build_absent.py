"""Make a folder of programs for devices that are not here (``build``), from shapes alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from mtp_jax.api.progress import Reporter, Silent
from mtp_jax.decode.kept import KeptPrograms
from mtp_jax.decode.keys import Key
from mtp_jax.decode.programs import Programs
from mtp_jax.engine.engine import Engine
from mtp_jax.errors import ConfigError
from mtp_jax.text.grammar import Grammars


def devices(name: str, data: int, model: int) -> Mesh:
    """A ``data`` x ``model`` mesh of devices to compile for. Raises ConfigError without a compiler for it."""
    absent.prepare()
    extra = "tpu" if name in absent.TPUS else "gpu-compile"
    try:
        return absent.mesh_of(name, (data, model), ("data", "model"))
    except ValueError as error:
        raise ConfigError(f"mesh = {data}x{model} is {error}") from error
    except RuntimeError as error:
        raise ConfigError(
            f"device = {name!r} needs jax's compiler for it ({str(error).splitlines()[0]:.80}); install the "
            f"extra {extra}: pip install 'mtp-jax[{extra}]', with Python 3.12 or newer"
        ) from error


def build_absent(options: LLMOptions, mesh: Mesh, out: Path, report: Reporter) -> KeptPrograms:
    """Compile all programs that a server of these options needs on the devices of a mesh.

    mesh: the result of ``devices``; one device runs programs without a mesh. out: the folder that
    gets them. Raises ConfigError, CheckpointError; OSError where it cannot be written.
    """
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    with absent_server(options, mesh, out, report) as found:
        with report.phase("compile", "executable") as update:
            found.programs.prepare_state()
            # In this thread, which alone has the context.
            for count, key in enumerate(found.keys, start=1):
                found.programs.build(key)
                update(count, len(found.keys))
        finish(out, options, found.engine, found.programs.kept)
    return found.programs.kept


@dataclass(frozen=True)
class AbsentServer:
    """A server of shapes alone, whose programs are not compiled yet."""

    engine: Engine
    programs: Programs
    keys: Sequence[Key]


@contextmanager
def absent_server(
    options: LLMOptions, mesh: Mesh, out: Path | None = None, report: Reporter | None = None
) -> Iterator[AbsentServer]:
    """A server of these options on a mesh of absent devices; programs are to be lowered within this context.

    out: the folder for programs; None: they are not kept. Raises ConfigError, CheckpointError.
    """
    wrong = [n for n in ("draft_model", "drafter") if getattr(options, n) is not None]
    if wrong:
        raise ConfigError(
            f"{wrong[0]} needs files that only the device's computer has; leave it out, or compile there"
        )
    alone = mesh.devices.flat[0] if mesh.size == 1 else None
    options = replace(options, mesh=None if alone is not None else mesh)
    # The backend and its kernels ask this context for the device that they are made for.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        model = load_model(options, report or Silent(), abstract=True, card=absent.memory_of(mesh))
        runner = make_runner(model.decoding, model.params, model.engine, allocate=False)
        words = model.tokenizer
        grammars = words and Grammars.of(words, model.config.vocab_size, model.config.eos_token_ids)
        engine = Engine(model.decoding.model.cfg, model.engine, runner, grammars)
        weights, state, layers = runner.params, runner.state, model.params
        if alone is not None:
            weights, state, layers = jax.tree.map(partial(_on, alone), (weights, state, layers))
        first, rest = engine.warm_up_keys()
        programs = Programs(model.decoding, weights, state, out, layers)
        yield AbsentServer(engine, programs, [*first, *rest])


def _on(device: Any, a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=SingleDeviceSharding(device))
