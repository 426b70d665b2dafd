"""The folder in which compiled programs are kept across processes."""

import os
import stat
from pathlib import Path

import jax

from mtp_jax.errors import ConfigError


def use_compile_cache(directory: str | Path) -> None:
    """Keep compiled programs in ``directory`` across processes.

    JAX trusts what it finds there, so the folder must be ours alone: it is created 0700, and one that others
    can write to is refused. Raises ConfigError.
    """
    path = Path(directory).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as e:
        raise ConfigError(f"compile cache {path} cannot be made: {e}; name another folder, or none") from e
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o022:
        raise ConfigError(
            f"compile cache {path} is owned by uid {info.st_uid} with mode {stat.S_IMODE(info.st_mode):o}; "
            "it must be yours and writable by you alone (chmod 700), because its programs are executed"
        )
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
