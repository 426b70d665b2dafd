"""Make a folder of all programs of an engine (``built``)."""

from pathlib import Path

from mtp_jax.api.built import recorded, write_manifest
from mtp_jax.api.load import load_model
from mtp_jax.api.local import make_runner
from mtp_jax.api.options import LLMOptions
from mtp_jax.api.progress import Reporter
from mtp_jax.decode.kept import KeptPrograms
from mtp_jax.engine.engine import Engine
from mtp_jax.errors import ConfigError
from mtp_jax.text.grammar import Grammars


def build_programs(options: LLMOptions, out: Path, report: Reporter) -> KeptPrograms:
    """Compile all programs that a server of these options needs, for the devices of this process.

    out: the folder that gets them; programs that are there already, as an interrupted call left them, stay.
    Raises ConfigError, CheckpointError; OSError where it cannot be written.
    """
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    model = load_model(options, report)
    runner = make_runner(model.decoding, model.params, model.engine, allocate=False, kept=out)
    words = model.tokenizer
    grammars = words and Grammars.of(words, model.config.vocab_size, model.config.eos_token_ids)
    engine = Engine(model.decoding.model.cfg, model.engine, runner, grammars)
    first, rest = engine.warm_up_keys()
    with report.phase("compile", "executable") as update:
        runner.compile([*first, *rest], update)
        runner.programs.prepare_state()
    finish(out, options, engine, runner.programs.kept)
    return runner.programs.kept


def finish(out: Path, options: LLMOptions, engine: Engine, made: KeptPrograms) -> None:
    """Write the manifest. Raises ConfigError where a program is not in the folder, OSError."""
    if len(made.used) < made.loaded + made.compiled:
        raise ConfigError(
            f"{out}: some of the programs cannot be kept, as the log says; nothing can be loaded from there"
        )
    write_manifest(out, recorded(options, engine.config), made.facts, made.used)
