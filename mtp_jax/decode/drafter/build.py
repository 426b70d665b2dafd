"""Which drafter a model has."""

from mtp_jax.decode.drafter.block import Block
from mtp_jax.decode.drafter.medusa import Medusa
from mtp_jax.decode.drafter.nothing import Nothing
from mtp_jax.decode.drafter.protocol import Drafter
from mtp_jax.decode.drafter.recursive import Recursive
from mtp_jax.decode.drafter.suffix import Suffix
from mtp_jax.decode.keys import TreeShape
from mtp_jax.model.block import Blocks
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.eagle3 import Eagle3Head
from mtp_jax.model.head_config import BlockConfig, Eagle3Config, MedusaConfig, StagesConfig
from mtp_jax.model.medusa import MedusaHeads
from mtp_jax.model.nextn import NextNLayers
from mtp_jax.model.nextn_streams import StreamNextN
from mtp_jax.model.stages import Stages


def build(cfg: ModelConfig, suffix: bool = False, tree: TreeShape | None = None) -> Drafter:
    """The model's drafter: its head, its NextN layers, or none.

    suffix: put ``Suffix`` in front of it. tree: the trees that it makes; None: chains.
    """
    own: Drafter = Nothing(cfg.vocab_size)
    if isinstance(cfg.drafter, Eagle3Config):
        own = Recursive(Eagle3Head(cfg), tree)
    elif isinstance(cfg.drafter, BlockConfig):
        own = Block((Stages if isinstance(cfg.drafter, StagesConfig) else Blocks)(cfg))
    elif isinstance(cfg.drafter, MedusaConfig):
        own = Medusa(MedusaHeads(cfg), tree)
    elif cfg.num_nextn_predict_layers:
        own = Recursive((StreamNextN if cfg.hyper else NextNLayers)(cfg), tree)
    return Suffix(own) if suffix else own
