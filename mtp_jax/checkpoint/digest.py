"""A digest of a checkpoint folder, which identifies it without reading all of it."""

import hashlib
from pathlib import Path

# A file's beginning holds the whole header of most weights; samples are spread over the whole file.
_BEGINNING = 2**16
_SAMPLES, _SAMPLE_BYTES = 64, 64


def folder_digest(folder: Path, weights: bool = False) -> str:
    """Digest names and sizes of all but hidden files, and parts of their bytes: 64 hexadecimal digits.

    weights: only safetensors files, where there are any.
    """
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    seen = sorted(name for name in found if not any(part.startswith(".") for part in name.parts))
    own = [name for name in seen if weights and name.match("*.safetensors")]
    total = hashlib.sha256()
    for name in own or seen:
        size = (folder / name).stat().st_size
        total.update(f"{name}\0{size}\0".encode())
        with (folder / name).open("rb") as file:
            total.update(file.read(_BEGINNING))
            for i in range(_SAMPLES):
                file.seek(max(size - _SAMPLE_BYTES, 0) * i // (_SAMPLES - 1))
                total.update(file.read(_SAMPLE_BYTES))
    return total.hexdigest()
