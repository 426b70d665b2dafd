"""Tables of ids that a head may have of its own: an embedding, and the ids of the tokens that it drafts."""

from mtp_jax.model.config import ModelConfig
from mtp_jax.model.config_parts import HeadConfig
from mtp_jax.model.head import DRAFT_HEAD
from mtp_jax.model.layer_specs import table
from mtp_jax.model.spec import Spec

EMBED, OUT, OFFSETS, CHOSEN = (
    f"{DRAFT_HEAD}.{name}" for name in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
)
"""Names of a head's tables: embedding, output table, offsets of its ids, and marks of the same tokens."""


def own_embedding(trunk: ModelConfig, head: HeadConfig, sizes: ModelConfig) -> Spec | None:
    """The head's embedding of the trunk's tokens; None: the trunk's serves."""
    return table(EMBED, sizes, trunk.vocab_size) if head.embeds else None


def target_offset(head: HeadConfig, sizes: ModelConfig) -> Spec | None:
    """Token i of the head is token i + offset[i] of the trunk; None: both have one vocabulary."""
    v = sizes.vocab_size
    return Spec((v,), (None,), OFFSETS, (v,), "zeros", ids=True) if head.maps else None
