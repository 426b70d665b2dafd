"""Which drafter a model has."""

from mtp_jax.decode.drafter.nothing import Nothing
from mtp_jax.decode.drafter.protocol import Drafter
from mtp_jax.decode.drafter.recursive import Recursive
from mtp_jax.decode.drafter.suffix import Suffix
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.nextn import NextNLayers


def build(cfg: ModelConfig, suffix: bool = False) -> Drafter:
    """The drafter for the layers that the model was loaded with. suffix: behind suffix matches."""
    own = Recursive(NextNLayers(cfg)) if cfg.num_nextn_predict_layers else Nothing(cfg.vocab_size)
    return Suffix(own) if suffix else own
