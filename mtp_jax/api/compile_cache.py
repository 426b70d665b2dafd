"""The folder in which compiled programs are kept across processes.

JAX executes the files that it finds there, so no other user may have written them, nor put another folder in
its place. The folders are opened one below the other, and checked by their descriptors instead of names.
"""

import logging
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from mtp_jax.json_object import JsonObject
from mtp_jax.machine import program_folder

_LOG = logging.getLogger(__name__)
_FOLDER = "jax_compilation_cache_dir"
# XLA's own caches, whose place is a part of JAX's key of a program.
_MORE_CACHES = "jax_persistent_cache_enable_xla_caches"
_NO_MORE_CACHES = "none"
_DESCRIPTORS = Path("/proc/self/fd")
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_INSTEAD = "name another folder (--compile-cache), or none (--no-compile-cache)"
_before: JsonObject = {}
# Descriptors of folders of programs that are used by their number, by device and inode. They stay open, as
# threads that still compile may use them.
_kept: dict[tuple[int, int], int] = {}


def use_compile_cache(directory: str | Path | None) -> Path | None:
    """Keep programs that this process compiles from now on below ``directory``, across processes.

    Returns the folder, to which no other user can write; None without one.

    Programs of another jaxlib, processor or number of cores lie in folders of their own (``program_folder``).
    JAX has one such folder per process, so all models use the newest model's. None: the folder that JAX had
    before.

    A new folder is 0700. Below a folder that other users own or can write to, such as a volume of
    Kubernetes, programs lie in a folder of this user's own, ``mtp-jax-UID``. A folder that cannot be used
    safely is not used, and a read-only folder gets no new programs: either is a warning.
    """
    if directory is None:
        _update(dict(_before))
        _before.clear()
        return None
    try:
        folder = _open(Path(directory).expanduser())
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        reason = getattr(error, "strerror", None) or error
        _LOG.warning(
            "compile cache %s cannot be used (%s): programs are compiled anew in every process; %s",
            directory,
            reason,
            _INSTEAD,
        )
        return use_compile_cache(None)
    if not os.access(folder, os.W_OK):
        _LOG.warning("compile cache %s cannot be written: new programs are not kept; %s", directory, _INSTEAD)
    settings: JsonObject = {
        _FOLDER: str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        _MORE_CACHES: _NO_MORE_CACHES,
    }
    if not _before:
        _before.update({name: jax.config.values[name] for name in settings})
    if folder.parent != _DESCRIPTORS:  # else the key of a program would have a number in it
        settings[_MORE_CACHES] = _before[_MORE_CACHES]
    _update(settings)
    return folder


def compile_cache() -> Path | None:
    """The folder in which JAX keeps programs, None if it keeps none."""
    folder = jax.config.values[_FOLDER]
    return Path(os.path.realpath(folder)) if folder else None


def _open(path: Path) -> Path:
    """The folder of programs below a folder, by a name at which it stays. Raises OSError."""
    if not hasattr(os, "geteuid"):
        raise OSError("on this system nothing tells which users may write to it")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    where = Path(os.path.realpath(path))
    opened = [os.open(where, os.O_RDONLY | os.O_DIRECTORY)]
    try:
        if not _is_ours(opened[-1]):
            where /= f"mtp-jax-{os.geteuid()}"
            opened.append(_own(opened[-1], where.name))
            _take(opened[-1])
        where /= program_folder()
        opened.append(_own(opened[-1], where.name))
        if _take(opened[-1]):
            _LOG.warning("%s was open to others: the programs in it are deleted", where)
            _empty(opened[-1])
        if _stays(where) and os.path.samestat(os.stat(where), os.fstat(opened[-1])):
            return where
        return _by_number(opened)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _is_ours(folder: int) -> bool:
    """Whether this user or root owns an open folder, and no other user may write to it."""
    info = os.fstat(folder)
    return info.st_uid in (os.geteuid(), 0) and not info.st_mode & _OTHERS_MAY_WRITE


def _own(parent: int, name: str) -> int:
    """Open the folder ``name`` in an open folder; it is made first if it is missing.

    Raises OSError unless its owner is this user or root.
    """
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    found = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    owner = os.fstat(found).st_uid
    if owner not in (os.geteuid(), 0):
        os.close(found)
        raise OSError(f"{name} in it belongs to uid {owner}")
    return found


def _take(folder: int) -> bool:
    """Take from others the right to write to an open folder, as ``fsGroup`` gives it; whether they had it."""
    if _is_ours(folder):
        return False
    os.fchmod(folder, 0o700)
    return True


def _empty(folder: int) -> None:
    """Delete the contents of an open folder."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.name, dir_fd=folder)
        else:
            os.unlink(entry.name, dir_fd=folder)


def _stays(path: Path) -> bool:
    """Whether only this user and root can put another folder at a path without links."""
    above = [folder.stat() for folder in path.parents]
    return all(
        info.st_uid in (os.geteuid(), 0)
        and (not info.st_mode & _OTHERS_MAY_WRITE or info.st_mode & stat.S_ISVTX)
        for info in above
    )


def _by_number(opened: list[int]) -> Path:
    """The name of the last of open folders by its number, which is kept open. Raises OSError."""
    info = os.fstat(opened[-1])
    number = _kept.get((info.st_dev, info.st_ino), opened[-1])
    name = _DESCRIPTORS / str(number)
    if not _DESCRIPTORS.is_dir() or not os.path.samestat(os.stat(name), info):
        raise OSError("others could put another folder in its place")
    if number == opened[-1]:
        _kept[info.st_dev, info.st_ino] = opened.pop()
    return name


def _update(settings: JsonObject) -> None:
    """Set JAX's options. JAX reads them with its first program only, so its cache has to be reset."""
    for name, value in settings.items():
        jax.config.update(name, value)
    if settings:
        reset_cache()
