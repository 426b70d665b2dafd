"""The secret that processes share."""

import os
import stat
from pathlib import Path

from mtp_jax.errors import ConfigError

VARIABLE = "MTP_JAX_SECRET"
_SHORTEST = 16  # bytes: 128 bits, if they are random


def read_secret(file: str | Path | None, what: str) -> bytes:
    """The secret in the file, or else in the environment. what: option that needs it. Raises ConfigError."""
    how = f"give all sides the same, such as `openssl rand -hex 32`: --secret-file, or {VARIABLE}"
    if file is None:
        found = os.environ.get(VARIABLE, "").strip().encode()
        if not found:
            raise ConfigError(f"{what} needs a secret; {how}")
    else:
        path = Path(os.path.expanduser(file))  # where there is no home folder, ~ stays in the name
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            found = path.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"secret file {path} cannot be read: {error.strerror}; {how}") from error
        if mode & 0o007:
            raise ConfigError(f"secret file {path} has mode {mode:o}: others may read it; chmod 600 {path}")
    if len(found) < _SHORTEST:
        raise ConfigError(f"the secret has {len(found)} bytes; expected {_SHORTEST} or more; {how}")
    return found
