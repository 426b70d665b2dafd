"""The folder of a model that is named by its GGUF file: converted once, into the user's cache."""

import hashlib
import os
import tempfile
from pathlib import Path

from mtp_jax.api.progress import Reporter, Silent
from mtp_jax.errors import ConfigError
from mtp_jax.model.hf_config import is_gguf

_CACHE = Path("~/.cache/mtp-jax/gguf")
# Raised with every change of what a conversion writes.
_VERSION = 1


def model_folder(model: Path, report: Reporter | None = None) -> Path:
    """The folder of a model: its own path, or that of a GGUF file's conversion.

    A conversion lies in the cache below the digest of its file, under the file's name. It is written to
    another folder first, so that a conversion which is interrupted leaves nothing there.

    Raises ConfigError where the library gguf or a home folder is missing, CheckpointError for a file that
    cannot be read, and OSError.
    """
    if not is_gguf(model):
        return model
    cache = Path(os.path.expanduser(_CACHE))
    if not cache.is_absolute():  # a user without a home folder
        raise ConfigError(f"{model} is converted into {_CACHE}, but there is no home folder; set HOME")
    with model.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(bytes([_VERSION]))
    folder = cache / digest.hexdigest()[:32] / model.stem
    if not folder.is_dir():
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=cache) as part:
            _convert(model, Path(part) / "model", report or Silent())
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                os.rename(Path(part) / "model", folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise
    return folder


def _convert(file: Path, folder: Path, report: Reporter) -> None:
    with report.phase("import jax"):
        from mtp_jax.checkpoint.gguf_llama import write_gguf
    with report.phase(f"convert {file.name}", "B") as update:
        write_gguf(file, folder, update)
