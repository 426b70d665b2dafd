"""Digests of weights that are kept, so that files which have not changed are not read again to name them.

A digest is kept under the names, sizes, times, devices and inodes of the files. Times of change (ctime) are
the system's own: no program sets them, so a copy that keeps the time of writing hides no change.
"""

import hashlib
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path

from mtp_jax.checkpoint.digest import files_of, folder_digest

_DIGEST = re.compile("[0-9a-f]{64}")

# A file that is written twice within a tick of its file system may have the same times after both: FAT's
# ticks of two seconds are the longest. Digests of files that were changed so lately are not kept.
_TICK_SECONDS = 2.0


def weights_digest(folder: Path, kept: Path | None) -> str:
    """``folder_digest`` of a folder's tensors, which are read unless the digest is known.

    kept: the folder of digests, to which no other user may write; None: none are kept. Raises
    CheckpointError.
    """
    if kept is None:
        return folder_digest(folder, weights=True)
    before = _stamp(folder)
    note = kept / f"weights-{hashlib.sha256(repr(before).encode()).hexdigest()}"
    with suppress(OSError, ValueError):
        if _DIGEST.fullmatch(found := note.read_text(encoding="ascii")):
            return found
    begun, digest = time.time(), folder_digest(folder, weights=True)
    changed = [file[3] / 1e9 for file in before]
    settled = changed and min(changed) > 0 and max(changed) < begun - _TICK_SECONDS
    if settled and _stamp(folder) == before:
        part = note.with_name(f"{note.name}.{secrets.token_hex(8)}")
        with suppress(OSError):  # a folder that may only be read, or is full
            part.write_text(digest, encoding="ascii")
            part.replace(note)
    return digest


def _stamp(folder: Path) -> list[tuple[str, int, int, int, int, int]]:
    """Facts about the files of a folder that change when their bytes do."""
    found = []
    for name in sorted(files_of(folder)):
        info = (folder / name).stat()
        times = info.st_mtime_ns, info.st_ctime_ns
        found.append((str(folder.resolve() / name), info.st_size, *times, info.st_dev, info.st_ino))
    return found
