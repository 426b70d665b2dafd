"""Facts of a model and its engine that do not change while they serve."""

from dataclasses import dataclass
from pathlib import Path

from mtp_jax.api.introduction import Introduction
from mtp_jax.api.simulated import MARK as SIMULATED
from mtp_jax.decode.law import MARK as SYNTHETIC
from mtp_jax.engine.config import EngineConfig
from mtp_jax.json_object import JsonMapping
from mtp_jax.model.config import ModelConfig
from mtp_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class About:
    """Facts of an ``AsyncLLM``.

    Attributes:
        tokenizer: the tokenizer; None where the model's folder has none.
        sampling_defaults: the model's own sampling options, of its generation_config.json.
        introduction: the model's words about itself; None where its folder has none.
        simulated: whether a simulated device answers in the model's place.
        random_weights: whether the model's weights are random numbers.
        structured: whether the engine can constrain an output to a grammar.
    """

    model: ModelConfig
    engine: EngineConfig
    tokenizer: Tokenizer | None
    sampling_defaults: JsonMapping
    introduction: Introduction | None
    simulated: bool
    random_weights: bool
    structured: bool

    @property
    def mark(self) -> str | None:
        """The mark of every answer that is not the model's own; None: answers are."""
        if self.simulated:
            return SIMULATED
        return SYNTHETIC if self.engine.law or self.random_weights else None


def shown(folder: Path, model: ModelConfig, engine: EngineConfig) -> str:
    """The facts that tell one engine from another, for a person: folder, dtype, drafter, depth, slots."""
    layers = model.num_nextn_predict_layers
    own = model.drafter.name if model.drafter else f"{layers} NextN" if layers else None
    kinds = [own, "suffix" if engine.suffix_drafts else None] if engine.num_speculative_tokens else []
    depth = f"{'0 to ' if engine.adaptive_depth else ''}{engine.num_speculative_tokens}"
    return (
        f"{str(folder)!r}, dtype={engine.dtype}, drafter={' and '.join(filter(None, kinds)) or None}, "
        f"depth={depth if engine.num_speculative_tokens else 0}, slots={engine.max_num_seqs}"
    )
