"""The folder in which compiled programs are kept across processes."""

import logging
import os
import stat
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.machine import program_folder

_LOG = logging.getLogger(__name__)
_before: JsonObject = {}


def use_compile_cache(directory: str | Path | None) -> None:
    """Keep programs that this process compiles from now on below ``directory``, across processes.

    Programs of another jaxlib, processor or number of cores lie in folders of their own (``program_folder``).
    JAX has one such folder per process, so all models use the newest model's. None: the folder that JAX had
    before.

    JAX trusts what it finds there, so the folder must be ours or root's: it is created 0700, and one that
    others can write to is refused. A folder that cannot be made is not used, and a read-only folder gets
    no new programs: either is a warning. Raises ConfigError.
    """
    if directory is None:
        _update(dict(_before))
        _before.clear()
        return
    path = Path(directory).expanduser()
    programs = path / program_folder()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _must_be_ours(path)
        programs.mkdir(mode=0o700, exist_ok=True)
    except OSError as e:
        _LOG.warning(
            "compile cache %s cannot be made (%s): programs are compiled anew in every process; name another "
            "folder (--compile-cache), or none (--no-compile-cache)",
            path,
            e.strerror,
        )
        use_compile_cache(None)
        return
    if not os.access(programs, os.W_OK):
        _LOG.warning(
            "compile cache %s cannot be written: new programs are not kept; name another folder "
            "(--compile-cache), or none (--no-compile-cache)",
            path,
        )
    settings: JsonObject = {
        "jax_compilation_cache_dir": str(programs),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    if not _before:
        _before.update({name: jax.config.values[name] for name in settings})
    _update(settings)


def _must_be_ours(path: Path) -> None:
    info = path.stat()
    if info.st_uid not in (os.getuid(), 0) or stat.S_IMODE(info.st_mode) & 0o022:
        raise ConfigError(
            f"compile cache {path} is owned by uid {info.st_uid} with mode {stat.S_IMODE(info.st_mode):o}; "
            "it must be yours and writable by you alone (chmod 700), because its programs are executed"
        )


def _update(settings: JsonObject) -> None:
    """Set JAX's options. JAX reads them with its first program only, so its cache has to be reset."""
    for name, value in settings.items():
        jax.config.update(name, value)
    if settings:
        reset_cache()
