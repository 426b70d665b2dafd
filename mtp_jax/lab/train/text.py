"""Texts of a recipe's stages: the standard library, packages, and dialogues made of both."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtp_jax.errors import ConfigError
from mtp_jax.lab.bench import corpus
from mtp_jax.lab.bench.corpus import SourceFile
from mtp_jax.lab.bench.dialogues import dialogues
from mtp_jax.lab.train.packages import read_packages, without_copies
from mtp_jax.lab.train.recipe import Recipe, TextSource


@dataclass(frozen=True)
class TrainingText:
    """The documents of every source, and held-out files of the standard library, which no source contains."""

    sources: dict[TextSource, list[SourceFile]]
    held_out: list[SourceFile]

    def of(self, names: Sequence[TextSource]) -> list[SourceFile]:
        """The documents of these sources, in the order of the names."""
        return [file for name in names for file in self.sources[name]]

    def fingerprint(self) -> str:
        """sha256 (hex) of everything: equal exactly when two runs have the same text to read."""
        return corpus.fingerprint([*self.of(tuple(self.sources)), *self.held_out])


def read_text(
    recipe: Recipe, packages_dir: str | Path | None = None, library: Sequence[SourceFile] | None = None
) -> TrainingText:
    """Read the texts that the recipe's stages name.

    Args:
        recipe: names the sources by stage, and the packages by version.
        packages_dir: the folder with the packages' wheels.
        library: files in place of the running Python's standard library.

    Raises:
        ConfigError: the recipe names packages and there is no folder, or the reverse; a package is missing.
    """
    wanted = {name for stage in recipe.stages for name in stage.text}
    pins = [package.pin for package in recipe.packages]
    if pins and packages_dir is None:
        raise ConfigError(
            f"the recipe needs the packages {' '.join(pins)}; download the wheels and pass --packages FOLDER"
        )
    if packages_dir is not None and not pins:
        raise ConfigError("the recipe names no packages; leave out --packages")
    parts = corpus.split(corpus.read_files() if library is None else library)
    sources: dict[TextSource, list[SourceFile]] = {"library": parts.train}
    if pins and packages_dir is not None:
        sources["packages"] = without_copies(read_packages(pins, Path(packages_dir)), parts.held_out)
    if "dialogues" in wanted:
        sources["dialogues"] = dialogues([file for files in tuple(sources.values()) for file in files])
    return TrainingText(sources, parts.held_out)
