"""The training recipe: one frozen dataclass read from a TOML file."""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtp_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Stage:
    """Optimiser steps of one shape: `micro_batches` times `batch` sequences of `seq_len` predicted tokens.

    Gradients are summed over the micro-batches, so that one micro-batch's activations fit in a CPU's cache.
    ``mtp_targets``: what the drafts learn, the text ("data") or the trunk's own predictions ("trunk").
    """

    steps: int
    seq_len: int
    batch: int
    micro_batches: int = 1
    mtp_depth: int = 1
    mtp_targets: str = "data"

    @property
    def step_tokens(self) -> int:
        """Predicted tokens per optimiser step."""
        return self.seq_len * self.batch * self.micro_batches


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run, besides the text of the corpus itself.

    Two runs of the same recipe on the same corpus and machine give the same parameters. Paths are absolute
    after `Recipe.from_file`; in the file they are relative to it.
    """

    model_config: Path
    tokenizer: Path
    stages: tuple[Stage, ...]
    seed: int = 0
    # optimiser
    optimizer: str = "muon"
    learning_rate: float = 5e-3
    adam_learning_rate: float = 3e-3
    final_lr_fraction: float = 0.02
    warmup_steps: int = 60
    decay_fraction: float = 0.5
    weight_decay: float = 0.05
    beta2: float = 0.98
    grad_clip: float = 1.0
    muon_ns_steps: int = 5
    # objective (DeepSeek-V3 report, sections 2.1.2 and 2.2)
    mtp_weight: float = 0.3
    balance_rate: float = 1e-3
    # bookkeeping
    checkpoint_minutes: float = 8.0
    report_seconds: float = 30.0
    eval_sequences: int = 32
    eval_seq_len: int = 256
    eval_depth: int = 3

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
    def from_dict(cls, data: Mapping[str, Any], base: Path) -> "Recipe":
        """Build from parsed TOML: tables are flattened, `[[stage]]` are the stages, paths start at `base`."""
        flat: dict[str, Any] = {}
        for key, value in data.items():
            if isinstance(value, Mapping):
                flat.update(value)
            elif key != "stage":
                flat[key] = value
        known = {field.name: field.type for field in dataclasses.fields(cls)}
        unknown = sorted(set(flat) - set(known))
        if unknown:
            raise ConfigError(
                f"unknown recipe keys {unknown}; allowed: {sorted(known)}; remove or rename them"
            )
        try:
            flat["stages"] = tuple(Stage(**stage) for stage in data["stage"])
            for key in ("model_config", "tokenizer"):
                flat[key] = (base / flat[key]).resolve()
        except (KeyError, TypeError) as err:
            raise ConfigError(
                f"recipe is incomplete or malformed: {err}; it needs model_config, tokenizer and at least "
                "one [[stage]] with steps, seq_len and batch"
            ) from err
        recipe = cls(**flat)
        recipe._check()
        return recipe

    @classmethod
    def from_file(cls, path: str | Path) -> "Recipe":
        """Read a TOML recipe; ConfigError names the file when it cannot be used."""
        path = Path(path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as err:
            raise ConfigError(f"cannot read the recipe {path}: {err}; give the path of a TOML file") from err
        return cls.from_dict(data, path.parent)

    def _check(self) -> None:
        if self.optimizer not in ("muon", "adamw"):
            raise ConfigError(f"optimizer is {self.optimizer!r}; allowed: 'muon' or 'adamw'; change it")
        for stage in self.stages:
            if stage.mtp_targets not in ("data", "trunk"):
                raise ConfigError(f'mtp_targets = {stage.mtp_targets!r}; expected "data" or "trunk"')
            if min(stage.steps, stage.seq_len, stage.batch, stage.micro_batches) < 1 or stage.mtp_depth < 0:
                raise ConfigError(
                    f"{stage} is empty; steps, seq_len, batch and micro_batches must be at least 1, "
                    "mtp_depth at least 0; change it"
                )
