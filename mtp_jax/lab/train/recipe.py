"""The training recipe: one frozen dataclass read from a TOML file."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonMapping, JsonObject
from mtp_jax.lab.train.mixed import Factors

Count = Annotated[int, Field(strict=True, ge=1)]
Natural = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


TextSource = Literal["library", "packages", "dialogues"]
_PATHS = ("model_config", "tokenizer")
_MUON_ONLY = {"adam_learning_rate", "muon_ns_steps"}


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Stage:
    """Optimiser steps of one shape: `micro_batches` times `batch` sequences of `seq_len` predicted tokens.

    Gradients are summed over the micro-batches, so that one micro-batch's activations fit in a CPU's cache.
    ``mtp_targets``: the drafts learn the text ("data") or the trunk's own predictions ("trunk").
    ``text``: the documents that the stage reads (`mtp_jax.lab.train.text`).
    """

    steps: Count
    seq_len: Count
    batch: Count
    micro_batches: Count = 1
    mtp_depth: Natural = 1
    mtp_targets: Literal["data", "trunk"] = "data"
    text: Annotated[tuple[TextSource, ...], Field(min_length=1)] = ("library",)

    @model_validator(mode="after")
    def _leaves_targets(self) -> "Stage":
        if self.mtp_targets == "trunk" and self.seq_len <= self.mtp_depth:
            raise ValueError(
                f"seq_len = {self.seq_len} leaves draft {self.mtp_depth} no prediction of the trunk to learn "
                'from; mtp_targets = "trunk" needs seq_len above mtp_depth'
            )
        return self

    @property
    def step_tokens(self) -> int:
        """Predicted tokens per optimiser step."""
        return self.seq_len * self.batch * self.micro_batches


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Package:
    """One package of the corpus: `pin` is "name==version"; `licence` is for the reader."""

    pin: Annotated[str, Field(min_length=1)]
    licence: Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"), kw_only=True)
class Descent:
    """The optimiser's options, and the rates of its steps."""

    optimizer: Literal["muon", "adamw"] = "muon"
    learning_rate: Positive = 5e-3
    adam_learning_rate: Positive = 3e-3
    final_lr_fraction: Share = 0.02
    warmup_steps: Natural = 60  # at most a quarter of all steps
    decay_fraction: Share = 0.5
    weight_decay: NotNegative = 0.05
    beta2: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.98
    grad_clip: Positive = 1.0
    muon_ns_steps: Count = 5


@dataclass(frozen=True, config=ConfigDict(extra="forbid"), kw_only=True)
class Recipe(Descent):
    """Everything that decides a training run, besides the text of the corpus itself.

    Two runs of the same recipe on the same corpus and machine give the same parameters. Paths are absolute
    after `Recipe.from_file`; in the file they are relative to it.
    """

    model_config: Path
    tokenizer: Path
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    seed: Natural = 0
    packages: tuple[Package, ...] = ()  # text besides the standard library
    # objective (DeepSeek-V3 report, sections 2.1.2 and 2.2)
    mtp_weight: NotNegative = 0.3
    balance_rate: NotNegative = 1e-3
    products: Factors = "float32"
    # bookkeeping
    checkpoint_minutes: NotNegative = 8.0
    report_seconds: NotNegative = 30.0
    eval_sequences: Annotated[int, Field(strict=True, ge=4)] = 32
    eval_seq_len: Count = 256
    eval_depth: Count = 3

    @model_validator(mode="after")
    def _names_its_packages(self) -> "Recipe":
        reads = any("packages" in stage.text for stage in self.stages)
        if reads != bool(self.packages):
            raise ValueError(
                'a stage reads "packages" and the recipe lists none'
                if reads
                else 'the recipe lists packages and no stage reads "packages"'
            )
        return self

    @property
    def total_steps(self) -> int:
        """Optimiser steps over all stages."""
        return sum(stage.steps for stage in self.stages)

    def stage_at(self, step: int) -> tuple[int, int]:
        """(stage index, step within that stage) of global `step`, 0-based."""
        for index, stage in enumerate(self.stages):
            if step < stage.steps:
                return index, step
            step -= stage.steps
        raise ConfigError(f"step {step} lies past the last stage; the recipe has {self.total_steps} steps")

    @classmethod
    def from_dict(cls, data: JsonMapping, base: Path) -> "Recipe":
        """Build from parsed TOML: tables are flattened, `[[stage]]` are the stages, paths start at `base`.

        Raises ConfigError naming every value that is missing, unknown or wrong.
        """
        flat = _flat(data)
        if flat.get("optimizer") == "adamw" and (idle := sorted(_MUON_ONLY & flat.keys())):
            raise ConfigError(
                f"the recipe cannot be used: {', '.join(idle)}: of the optimizer muon alone; leave it out"
            )
        try:
            recipe = cls(**flat)
        except ValidationError as err:
            wrong = "; ".join(
                f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r:.100}" for e in err.errors()
            )
            raise ConfigError(f"the recipe cannot be used: {wrong}") from err
        return dataclasses.replace(recipe, **{key: (base / getattr(recipe, key)).resolve() for key in _PATHS})

    @classmethod
    def from_file(cls, path: str | Path) -> "Recipe":
        """Read a TOML recipe; ConfigError names the file when it cannot be used, and files that it lacks."""
        path = Path(path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as err:  # not UTF-8, or not TOML
            raise ConfigError(f"cannot read the recipe {path}: {err}; give the path of a TOML file") from err
        recipe = cls.from_dict(data, path.parent)
        _check_files(path.resolve(), recipe, _flat(data))
        return recipe


def _flat(data: JsonMapping) -> JsonObject:
    """The fields of a recipe, gathered from all its tables."""
    flat: JsonObject = {}
    for key, value in data.items():
        flat |= value if isinstance(value, Mapping) else {"stages" if key == "stage" else key: value}
    return flat


def _check_files(path: Path, recipe: Recipe, named: JsonMapping) -> None:
    """Raise ConfigError for a file that a recipe names and that is not there, as beside a copied recipe."""
    missing = [key for key in _PATHS if not getattr(recipe, key).is_file()]
    if missing:
        files = "; ".join(f'{key} = "{named[key]}" is {getattr(recipe, key)}' for key in missing)
        raise ConfigError(
            f"the recipe {path} names files that do not exist: {files}. Its paths are relative to its "
            f"folder, {path.parent}: copy the files there, too, or write absolute paths"
        )
