"""A folder of all programs of an engine: `mtp-jax compile` makes it, and the option ``programs`` names it.

The programs are of one size and of one set of options, which the folder records. An engine that loads them
takes these options, and refuses another value of one by its name.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from mtp_jax.api.options import LLMOptions
from mtp_jax.decode.manifest import Manifest, digest_of_file
from mtp_jax.engine.config import EngineConfig, EngineOptions
from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.options import declared

# Options that change no program, of the engine's.
_FREE = frozenset({
    "seed", "prefix_cache", "expert_rebalance", "file_cache", "file_cache_gib", "file_cache_seconds",
})  # fmt: skip
# Recorded as they were given: the model's files say the rest.
_AS_GIVEN = ("draft_vocab", "num_nextn_layers", "draft_captures")


def recorded(options: LLMOptions, engine: EngineConfig) -> JsonObject:
    """The options for which programs are compiled, in JSON's types. engine: the same, of the model."""
    found = {name: getattr(engine, name) for name in declared(EngineOptions) if name not in _FREE}
    return _plain(found | {name: getattr(options, name) for name in _AS_GIVEN})


def adopted(given: JsonObject) -> JsonObject:
    """Options of ``LLM`` with these of the folder ``given["programs"]``, if there is one.

    given: the options that a user gave. Raises ConfigError for one of another value than the folder's.
    """
    if (folder := given.get("programs")) is None:
        return given
    own = Manifest.read(Path(folder)).options
    for name, value in _plain({name: value for name, value in given.items() if name in own}).items():
        if value != own[name]:
            raise ConfigError(
                f"{name} = {value!r:.80}, but the programs in {folder} were compiled with {own[name]!r:.80}; "
                f"leave {name} out, or run mtp-jax compile with it"
            )
    known = declared(LLMOptions)
    if wrong := next((name for name in own if name not in known), None):
        raise ConfigError(
            f"the programs in {folder} were compiled with the option {wrong!r:.80}, which this version of "
            "mtp-jax does not have; run mtp-jax compile again"
        )
    return {name: tuple(v) if isinstance(v, list) else v for name, v in own.items()} | given


def with_adopted(options: LLMOptions) -> LLMOptions:
    """The same options with these of their folder of programs; a default is no option that was given."""
    if options.programs is None:
        return options
    values = {name: getattr(options, name) for name in declared(LLMOptions)}
    given = {n: v for n, v in values.items() if n == "programs" or v != declared(LLMOptions)[n].default}
    return replace(options, **adopted(given))


def write_manifest(folder: Path, options: JsonObject, facts: Mapping[str, str], files: Iterable[str]) -> None:
    """Write the manifest of a folder of programs, and delete other programs in it.

    Raises OSError where the folder cannot be written.
    """
    digests = {name: digest_of_file((folder / name).read_bytes()) for name in sorted(files)}
    Manifest(facts, options, digests).write(folder)
    for path in folder.glob("*-program"):
        if path.name not in digests:  # of other options, as an earlier call left it
            path.unlink(missing_ok=True)


def _plain(options: JsonObject) -> JsonObject:
    """Options as a JSON file gives them back; paths become texts."""
    return json.loads(json.dumps(options, default=str))
