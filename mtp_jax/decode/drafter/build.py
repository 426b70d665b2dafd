"""Which drafter a model has."""

from mtp_jax.decode.drafter.nothing import Nothing
from mtp_jax.decode.drafter.protocol import Drafter
from mtp_jax.decode.drafter.recursive import Recursive
from mtp_jax.decode.drafter.suffix import Suffix
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.eagle3 import Eagle3Head
from mtp_jax.model.nextn import NextNLayers


def build(cfg: ModelConfig, suffix: bool = False) -> Drafter:
    """The drafter that the model was loaded with: a draft head, or its layers. suffix: behind matches."""
    own: Drafter = Nothing(cfg.vocab_size)
    if cfg.drafter is not None:
        own = Recursive(Eagle3Head(cfg.drafter, cfg.vocab_size))
    elif cfg.num_nextn_predict_layers:
        own = Recursive(NextNLayers(cfg))
    return Suffix(own) if suffix else own
