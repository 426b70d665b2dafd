"""The training text of the demo model: the source of the standard library of the running Python.

Every Python installation has it, so the recipe needs no download. It differs between Python versions,
therefore a training run records `fingerprint`. The split is a pure function of a file's path: a path held out
of training under one Python version is held out under every other one too.
"""

import hashlib
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from tokenizers import Tokenizer

from mtp_jax.errors import ConfigError

# Special tokens of the demo's tokenizer. The bar is U+FF5C and the low line U+2581, as in DeepSeek's.
BOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER = "<\uff5cUser\uff5c>"
ASSISTANT = "<\uff5cAssistant\uff5c>"
MAX_BYTES = 400_000
HELD_OUT_FRACTION = 0.08  # of Python 3.11: about 120 files, 80 of them long enough for a prompt
ENCODE_BATCH = 256

# A file in a folder of such a name, at any depth, is skipped: installed packages, files broken on purpose.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encoded_modules", "tokenizedata"}
)
# Fixtures; build settings; and the codecs, which are one template and its generated tables 120 times over: a
# codec held out of training would have its near copies in training.
_SKIPPED_PREFIXES = ("lib2to3/tests/data/", "test/test_lib2to3/data/", "config-", "encodings/")
# Broken fixtures ("bad_coding.py", "badsyntax_3131.py") and build settings that name this computer's folders.
_SKIPPED_NAMES = ("bad", "_sysconfigdata")


@dataclass(frozen=True)
class SourceFile:
    """One document: `path` is relative to the library's root, with forward slashes."""

    path: str
    text: str


@dataclass(frozen=True)
class FileSplit:
    """Disjoint lists of files, both in path order."""

    train: list[SourceFile]
    held_out: list[SourceFile]


def read_files(root: str | Path | None = None) -> list[SourceFile]:
    """Read the Python files below `root` (default: the standard library), in path order, each content once.

    Skipped: installed packages, fixtures with bad syntax or encoding, the codecs, files that are not UTF-8
    and files above `MAX_BYTES`. Line ends become "\\n", so that the text is the same on every system.

    Raises:
        ConfigError: `root` holds no usable file.
    """
    root = Path(sysconfig.get_path("stdlib") if root is None else root)
    found = sorted((path.relative_to(root).as_posix(), path) for path in root.rglob("*.py"))
    files: list[SourceFile] = []
    seen: set[str] = set()
    for name, path in found:
        text = None if _skipped(name) else _read(path)
        if text is None or text in seen:
            continue
        seen.add(text)
        files.append(SourceFile(name, text))
    if not files:
        raise ConfigError(
            f"no training text: no usable .py file below {str(root)!r}; "
            "pass the folder of a Python standard library"
        )
    return files


def split(files: Sequence[SourceFile]) -> FileSplit:
    """Divide by file: a hash of the path decides, so the result does not depend on other files."""
    held = [_fraction(file.path) < HELD_OUT_FRACTION for file in files]
    return FileSplit(
        train=[file for file, out in zip(files, held, strict=True) if not out],
        held_out=[file for file, out in zip(files, held, strict=True) if out],
    )


def fingerprint(files: Sequence[SourceFile]) -> str:
    """sha256 (hex) over paths and texts: equal exactly when two runs saw the same corpus."""
    digest = hashlib.sha256()
    for file in files:
        for part in (file.path, file.text):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.hexdigest()


def read_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer.json without its truncation and padding: texts are taken whole.

    Raises:
        ConfigError: there is no such file, or it is damaged.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; a tokenizer is a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path} is damaged: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokens(tokenizer: Tokenizer, files: Sequence[SourceFile], seed: int) -> np.ndarray:
    """One stream of ids [T]: bos + text + eos of every file, files shuffled by `seed`.

    uint16 where the vocabulary allows, else uint32.
    """
    order = list(files)
    random.Random(seed).shuffle(order)
    bos, eos = _special(tokenizer, BOS), _special(tokenizer, EOS)
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    parts = [np.zeros(0, dtype)]
    for start in range(0, len(order), ENCODE_BATCH):
        texts = [file.text for file in order[start : start + ENCODE_BATCH]]
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            parts.append(np.array([bos, *encoding.ids, eos], dtype))
    return np.concatenate(parts)


def held_out_prompts(
    tokenizer: Tokenizer,
    files: Sequence[SourceFile],
    n: int,
    length: int,
    start: Sequence[int] | None = None,
) -> list[list[int]]:
    """`n` prompts of exactly `length` ids (bos included), each beginning at the start of a line.

    `start`: ids that every prompt begins with; by default ``BOS``.

    Each round takes one prompt per file, at a line that a hash of path and round picks. At least `length`
    more ids follow each prompt in its file, so a continuation can be compared with it. Each prompt is
    returned once, even if its text occurs again.

    Raises:
        ConfigError: the files are too few or too short for `n` different prompts.
    """
    if length < 2:
        raise ConfigError(f"prompt length {length} is too small: at least 2 (bos and one token)")
    start = [_special(tokenizer, BOS)] if start is None else start
    prompts: list[list[int]] = []
    taken: set[tuple[int, ...]] = set()
    rounds = 0
    while len(prompts) < n and rounds < 64:
        starts = [text for file in files if (text := _from_line(file, rounds, 24 * length))]
        for encoding in tokenizer.encode_batch(starts, add_special_tokens=False):
            prompt = [*start, *encoding.ids[: length - len(start)]]
            if len(encoding.ids) < 2 * length or tuple(prompt) in taken or len(prompts) == n:
                continue
            taken.add(tuple(prompt))
            prompts.append(prompt)
        rounds += 1
    if len(prompts) < n:
        raise ConfigError(
            f"only {len(prompts)} of {n} prompts of {length} tokens fit in {len(files)} held-out files; "
            "ask for fewer or shorter prompts"
        )
    return prompts


def _from_line(file: SourceFile, round_: int, chars: int) -> str:
    """`chars` characters from a line without indentation in the first 90 % of the file ("" if it has none).

    Training never sees indentation right after bos, hence a prompt does not begin with it.
    """
    offsets = [0]
    for line in file.text.split("\n"):
        offsets.append(offsets[-1] + len(line) + 1)
    starts = [at for at in offsets if at < 0.9 * len(file.text) and not file.text[at].isspace()]
    if not starts:
        return ""
    start = starts[int(_fraction(f"{file.path}#{round_}") * len(starts))]
    return file.text[start : start + chars]


def _fraction(name: str) -> float:
    """A uniform number in [0, 1) that depends on `name` only."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def _skipped(name: str) -> bool:
    path = PurePosixPath(name)
    return (
        not _SKIPPED_FOLDERS.isdisjoint(path.parts)
        or name.startswith(_SKIPPED_PREFIXES)
        or path.name.startswith(_SKIPPED_NAMES)
    )


def _read(path: Path) -> str | None:
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        return None
    return as_text(path.read_bytes())


def as_text(data: bytes) -> str | None:
    """The text of a file, with line ends "\\n"; None unless it is UTF-8 and not blank."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text if text.strip() else None


def _special(tokenizer: Tokenizer, content: str) -> int:
    found = tokenizer.token_to_id(content)
    if found is None:
        raise ConfigError(f"the tokenizer lacks the special token {content!r}; use configs/demo's")
    return found
