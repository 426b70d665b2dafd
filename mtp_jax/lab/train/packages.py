"""Training text from packages: the Python sources of wheels in a folder, at exact versions."""

import hashlib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from mtp_jax.errors import ConfigError
from mtp_jax.lab.bench.corpus import MAX_BYTES, SourceFile, as_text

COPY_SHARE = 0.5  # a file with this share of its long lines in held-out text counts as a copy
MIN_LINE = 20  # characters; shorter lines ("return None") occur everywhere
_TEST_FOLDERS = frozenset({"test", "tests", "testing", "locale", "_vendor", "vendor"})


def read_packages(pins: Sequence[str], folder: Path) -> list[SourceFile]:
    """The .py files of each pinned package ("name==version"), paths "name/inner path", each content once.

    Left out: tests, translations, vendored copies, files that are not UTF-8 or are above `MAX_BYTES`.

    Raises:
        ConfigError: a pin has no exact version, or its wheel is missing, of another version or damaged.
    """
    files: list[SourceFile] = []
    seen: set[str] = set()
    for pin in pins:
        name, wheel = _wheel(pin, folder)
        try:
            with zipfile.ZipFile(wheel) as archive:
                found = [(i.filename, archive.read(i)) for i in archive.infolist() if _wanted(i)]
        except (OSError, zipfile.BadZipFile) as err:
            raise ConfigError(f"{wheel} is damaged: {err}; download {pin} again") from err
        for inner, data in sorted(found):
            text = as_text(data)
            if text and text not in seen:
                seen.add(text)
                files.append(SourceFile(f"{name}/{inner}", text))
    return files


def without_copies(files: Iterable[SourceFile], held_out: Iterable[SourceFile]) -> list[SourceFile]:
    """`files` without copies, which share `COPY_SHARE` of their distinct long lines with held-out text."""
    known = {mark for file in held_out for mark in _marks(file.text)}
    kept: list[SourceFile] = []
    for file in files:
        marks = _marks(file.text)
        if not marks or len(marks & known) < COPY_SHARE * len(marks):
            kept.append(file)
    return kept


def _wheel(pin: str, folder: Path) -> tuple[str, Path]:
    try:
        wanted = Requirement(pin)
    except InvalidRequirement as err:
        raise ConfigError(f"the package {pin!r} cannot be read: {err}; write name==version") from err
    exact = [s.version for s in wanted.specifier if s.operator == "==" and "*" not in s.version]
    if len(exact) != 1 or len(wanted.specifier) != 1:
        raise ConfigError(f"the package {pin!r} has no exact version; write name==version")
    name, others = canonicalize_name(wanted.name), []
    for path in sorted(folder.glob("*.whl")):
        try:
            found, version, _, _ = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        if found == name and wanted.specifier.contains(version, prereleases=True):
            return name, path
        if found == name:
            others.append(str(version))
    have = f"has version {', '.join(others)}" if others else "has no wheel of it"
    raise ConfigError(
        f"the corpus needs {pin}, but {str(folder)!r} {have}; run "
        f"`pip download --no-deps --only-binary :all: -d {folder} {pin}`"
    )


def _wanted(info: zipfile.ZipInfo) -> bool:
    path = PurePosixPath(info.filename)
    tests = not _TEST_FOLDERS.isdisjoint(path.parts) or path.name.startswith("test_")
    return path.suffix == ".py" and info.file_size <= MAX_BYTES and not tests


def _marks(text: str) -> set[bytes]:
    lines = (line.strip() for line in text.split("\n"))
    return {hashlib.sha256(line.encode()).digest()[:8] for line in lines if len(line) >= MIN_LINE}
