"""Pack weights and numbers of assembled variants: ``python -m tests.golden.pack FOLDER``, a folder of them.

Writes the archives and SHA256SUMS beside this file; the same folder gives the same bytes. A dictionary
larger than all weights together finds every tensor that two variants share; ``lp`` and ``pb`` suit floats of
four bytes.
"""

import hashlib
import lzma
import sys
import tarfile
from pathlib import Path

from tests.golden import ARCHIVES, GOLDEN, HEADS

_FILTER = {
    "id": lzma.FILTER_LZMA2,
    "preset": 9 | lzma.PRESET_EXTREME,
    "dict_size": 1 << 26,
    "lc": 2,
    "lp": 2,
    "pb": 2,
}


def pack(folder: Path) -> None:
    """Write the archives and the checksums of every safetensors file below ``folder``."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.safetensors"))}
    for packed in ARCHIVES:
        _pack(packed, {name: path for name, path in files.items() if _archive(name) == packed.name})
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n" for name, path in files.items())
    (GOLDEN / "SHA256SUMS").write_text("".join(sums))


def _archive(name: str) -> str:
    """The archive of a file: the numbers lie in the folder of their variant, weights in folders below it."""
    variant, *inner = name.split("/")
    kind = "expected" if len(inner) == 1 else "heads" if variant in HEADS else "weights"
    return f"{kind}.tar.xz"


def _pack(packed: Path, files: dict[str, Path]) -> None:
    with lzma.open(packed, "wb", filters=[_FILTER]) as out, tarfile.open(fileobj=out, mode="w") as archive:
        for name, path in files.items():
            member = tarfile.TarInfo(name)
            member.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(member, file)


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
