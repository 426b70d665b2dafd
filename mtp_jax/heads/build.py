"""Which drafter a model has."""

from mtp_jax.decode.drafter.nothing import Nothing
from mtp_jax.decode.drafter.protocol import Drafter
from mtp_jax.decode.drafter.recursive import Recursive
from mtp_jax.decode.drafter.suffix import Suffix
from mtp_jax.decode.keys import TreeShape
from mtp_jax.errors import ConfigError
from mtp_jax.heads.outside import imported
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import family_of
from mtp_jax.model.head import DraftHead, head_of


def build(cfg: ModelConfig, suffix: bool = False, tree: TreeShape | None = None) -> Drafter:
    """The model's drafter: its head's, its NextN layers, or none.

    suffix: put ``Suffix`` in front of it. tree: the trees that it makes; None: chains. Raises ConfigError.
    """
    own: Drafter = Nothing(cfg.vocab_size)
    if head := head_of(cfg):
        own = _of_head(head, cfg, tree)
    elif cfg.num_nextn_predict_layers:
        own = Recursive(imported(family_of(cfg).nextn_module)(cfg), tree)
    return Suffix(own) if suffix else own


def _of_head(head: DraftHead, cfg: ModelConfig, tree: TreeShape | None) -> Drafter:
    make = imported(head.drafts) if isinstance(head.drafts, str) else head.drafts
    made = make(cfg) if tree is None else make(cfg, tree)
    if not isinstance(made, Drafter):
        raise ConfigError(
            f"drafter = {head.drafts!r:.200} makes a {type(made).__name__}, which is no drafter; expected "
            "the methods of mtp_jax.decode.drafter.protocol.Drafter"
        )
    return made
