"""Pack the weights of assembled checkpoints: ``python -m tests.golden.pack FOLDER``, a folder of variants.

Writes weights.tar.xz and SHA256SUMS beside this file; the same folder gives the same bytes. A dictionary
larger than all weights together finds every tensor that two variants share; ``lp`` and ``pb`` suit floats of
four bytes.
"""

import hashlib
import lzma
import sys
import tarfile
from pathlib import Path

from tests.golden import GOLDEN, WEIGHTS

_FILTER = {
    "id": lzma.FILTER_LZMA2,
    "preset": 9 | lzma.PRESET_EXTREME,
    "dict_size": 1 << 26,
    "lc": 2,
    "lp": 2,
    "pb": 2,
}


def pack(folder: Path) -> None:
    """Write the archive and the checksums of every safetensors file below ``folder``."""
    files = sorted(folder.glob("*/*/*.safetensors"))
    sums = []
    with lzma.open(WEIGHTS, "wb", filters=[_FILTER]) as out, tarfile.open(fileobj=out, mode="w") as archive:
        for path in files:
            name = path.relative_to(folder).as_posix()
            member = tarfile.TarInfo(name)
            member.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(member, file)
            sums.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n")
    (GOLDEN / "SHA256SUMS").write_text("".join(sums))


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
