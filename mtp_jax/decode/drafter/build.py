"""Which drafter a model has."""

from mtp_jax.decode.drafter.nextn import NextN
from mtp_jax.decode.drafter.nothing import Nothing
from mtp_jax.decode.drafter.protocol import Drafter
from mtp_jax.decode.drafter.suffix import Suffix
from mtp_jax.model.config import ModelConfig


def build(cfg: ModelConfig, suffix: bool = False) -> Drafter:
    """The drafter for the layers that the model was loaded with. suffix: behind suffix matches."""
    own = NextN(cfg) if cfg.num_nextn_predict_layers else Nothing(cfg.vocab_size)
    return Suffix(own) if suffix else own
