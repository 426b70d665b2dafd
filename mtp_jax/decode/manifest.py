"""The manifest of a folder of programs that `mtp-jax compile` made: a JSON file beside them.

It says for which facts and options the programs were compiled, so that a process in which one is another
hears its name, and has a digest of each file.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject

FILE = "programs.json"
_FORMAT = 1
_NAMED = 4  # facts in a message: one cause often changes several
_LONGEST = 60  # characters of a value in a message


@dataclass(frozen=True)
class Manifest:
    """The contents of the file.

    Attributes:
        facts: all that determines the programs, by name (``facts.named``).
        options: options of the engine by name, as ``api/built.py`` records them.
        programs: SHA-256 of each program's file, in hexadecimal, by the file's name.
    """

    facts: Mapping[str, str]
    options: JsonObject
    programs: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest of a folder. Raises ConfigError where there is none, or it is damaged."""
        path = folder / FILE
        try:
            found = json.loads(path.read_bytes())
            if found["format"] != _FORMAT:
                raise ConfigError(
                    f"{path} has format {found['format']!r:.20}, this version of mtp-jax reads {_FORMAT}; "
                    "run mtp-jax compile again"
                )
            own = cls(found["facts"], found["options"], found["programs"])
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror}); name a folder that mtp-jax compile --out made"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path} is damaged; run mtp-jax compile again") from error
        if not all(isinstance(part, dict) for part in asdict(own).values()):
            raise ConfigError(f"{path} is damaged; run mtp-jax compile again")
        return own

    def write(self, folder: Path) -> None:
        """Write the file as a whole. Raises OSError where the folder cannot be written."""
        part = folder / f"{FILE}.{os.getpid()}"
        part.write_text(json.dumps({"format": _FORMAT} | asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(part, folder / FILE)

    def check_files(self, folder: Path) -> None:
        """Raise ConfigError where a program's file is not as it was written, or other users may change it."""
        try:
            info = folder.stat()
            if info.st_uid not in (0, os.getuid()) or info.st_mode & stat.S_IWOTH:
                raise ConfigError(
                    f"programs = {str(folder)!r:.200} belongs to user {info.st_uid} with mode "
                    f"{stat.S_IMODE(info.st_mode):o}, and its files are executed: it must be this user's or "
                    "root's, and not everybody's to write to; copy it to such a folder"
                )
            for name, digest in self.programs.items():
                if digest_of_file((folder / name).read_bytes()) != digest:
                    raise ConfigError(
                        f"{folder / name} cannot be used: it is damaged, or was replaced; run mtp-jax "
                        "compile again, or leave programs out"
                    )
        except OSError as error:
            raise ConfigError(
                f"{error.filename} cannot be used: {error.strerror}; run mtp-jax compile again, or leave "
                "programs out"
            ) from error

    def check_facts(self, folder: Path, here: Mapping[str, str]) -> None:
        """Raise ConfigError, with the names, where a fact of this process is another.

        folder: where the programs are, for the message. here: the facts of this process.
        """
        other = [name for name in {**self.facts, **here} if self.facts.get(name) != here.get(name)]
        if other:
            named = "; ".join(
                _difference(name, self.facts.get(name), here.get(name)) for name in other[:_NAMED]
            )
            more = f"; and {len(other) - _NAMED} more" if len(other) > _NAMED else ""
            raise ConfigError(
                f"the programs in {folder} do not fit this process: {named}{more}; run mtp-jax compile here, "
                "with this model and these options, or leave programs out"
            )


def digest_of_file(data: bytes) -> str:
    """SHA-256 of a file's contents, as the manifest has it."""
    return hashlib.sha256(data).hexdigest()


def _difference(name: str, there: str | None, here: str | None) -> str:
    if max(len(there or ""), len(here or "")) > _LONGEST:
        return f"{name} is another"
    was, now = ("not set" if value is None else value for value in (there, here))
    return f"{name} was {was}, here it is {now}"
