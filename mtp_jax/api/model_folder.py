"""The folder of a model that is named otherwise: on a hub, or by its GGUF file.

A GGUF file is converted once, into the user's cache.
"""

import hashlib
import os
import tempfile
from pathlib import Path

from mtp_jax.api.progress import Reporter, Silent
from mtp_jax.errors import ConfigError
from mtp_jax.hub import fetch, is_name
from mtp_jax.model.hf_config import is_gguf

_CACHE = Path("~/.cache/mtp-jax/gguf")
# Raised whenever conversions write other folders than before.
_VERSION = 1


def model_folder(
    model: Path, report: Reporter | None = None, revision: str | None = None, *, weights: bool = True
) -> Path:
    """The folder of a model: its own path, that of a hub's model, or that of a GGUF file's conversion.

    A conversion lies in the cache below the digest of its file, under the file's name. It is written to
    another folder first, so that a conversion which is interrupted leaves nothing there.

    revision: branch, tag or commit of a hub's model. weights: False: its weights are not fetched.

    Raises ConfigError where a library or a home folder is missing, or the hub does not give the model,
    CheckpointError for a file that cannot be read, and OSError.
    """
    if is_name(model):
        return fetch(str(model), revision, weights=weights, quiet=_quiet(report))
    if revision is not None:
        raise ConfigError(
            f"revision = {revision!r:.80} is of a model of a hub, named as org/name, and {model} is a path; "
            "leave it out"
        )
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


def head_folder(head: Path, report: Reporter | None = None) -> Path:
    """The folder of a draft head: its own path, or that of a hub's; no head is in a GGUF file.

    Raises ConfigError where the hub does not give it.
    """
    return fetch(str(head), quiet=_quiet(report)) if is_name(head) else head


def _quiet(report: Reporter | None) -> bool:
    return report is None or isinstance(report, Silent)


def _convert(file: Path, folder: Path, report: Reporter) -> None:
    with report.phase("import jax"):
        from mtp_jax.checkpoint.gguf_llama import write_gguf
    with report.phase(f"convert {file.name}", "B") as update:
        write_gguf(file, folder, update)
