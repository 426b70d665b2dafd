"""Models by their names on a Hugging Face hub: the files that are read, in the cache that other tools share.

The extra ``hub`` has the client. A folder of a name's spelling precedes the hub.
"""

import os
import re
from pathlib import Path

from mtp_jax.errors import ConfigError, shown

# A GGUF file of a folder would be spelled as a name, too.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.gguf)")
# Configuration, tokenizer, templates. Code and pickles are never fetched.
_TEXTS = ("*.json", "*.jinja", "tiktoken.model")
_WEIGHTS = "*.safetensors"
# Some releases repeat their weights in another layout in a folder.
_REPEATED = ("*/*.json", f"*/{_WEIGHTS}")


def is_name(model: str | Path) -> bool:
    """Whether a model is named as on a hub, ``org/name``, and there is no such file or folder."""
    return _NAME.fullmatch(str(model)) is not None and not os.path.exists(model)


def fetch(name: str, revision: str | None = None, *, weights: bool = True, quiet: bool = True) -> Path:
    """The folder of a model in the hub's cache, after the download of the files that it lacks.

    Without a network, or with ``HF_HUB_OFFLINE=1``, the cache alone is read. The client resumes a file that
    is cut, and gives up after some tries.

    Args:
        name: ``org/name``.
        revision: a branch, tag or commit; None: ``main``.
        weights: False: everything but the weights.
        quiet: False: a bar on standard error shows the progress.

    Raises:
        ConfigError: the client is not installed; the hub has no such model or revision, or does not show it
            to this user; the model has no safetensors; the download failed.
    """
    try:
        from huggingface_hub import errors, snapshot_download
        from huggingface_hub.utils import (
            are_progress_bars_disabled,
            disable_progress_bars,
            enable_progress_bars,
        )
    except ImportError as error:
        raise ConfigError(
            f"there is no folder {name}, and a model of a hub needs huggingface_hub: "
            "pip install 'mtp-jax[hub]', or name a folder"
        ) from error
    patterns = [*_TEXTS, _WEIGHTS] if weights else [*_TEXTS]
    bars = not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        folder = Path(
            snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=[*_REPEATED])
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{name} is gated: accept its terms on its page of the hub, then log in with `hf auth login` or "
            "set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{name} is neither a folder nor, for this user, a model of the hub; check the name, or set "
            "HF_TOKEN if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"{name} has no revision {revision!r:.80}; name a branch, a tag or a commit of it, or leave "
            "--revision out"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        cause = error.__cause__
        silence = "HF_HUB_OFFLINE keeps it from being asked; unset that"
        if cause is not None and not isinstance(cause, errors.OfflineModeIsEnabled):
            silence = f"the hub did not answer ({shown(type(cause).__name__)}); download it with a network"
        raise ConfigError(
            f"the cache of the hub does not have all of {name}, and {silence}, or name a folder"
        ) from error
    except Exception as error:  # of the client, of its HTTP library, of the disk
        raise ConfigError(
            f"the download of {name} ended: {shown(' '.join(str(error).split()))}; whole files are kept, and "
            "the same command goes on with the others"
        ) from error
    finally:
        if quiet and bars:
            enable_progress_bars()
    if weights and not any(folder.glob(_WEIGHTS)):
        raise ConfigError(
            f"{name} has no {_WEIGHTS}, the one format of weights that is taken from a hub (never pickles); "
            "look for a conversion of it"
        )
    return folder
