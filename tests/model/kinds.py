"""The classes of attention of a backend, by the names of their equations."""

from mtp_jax.model.attention.gqa import Gqa
from mtp_jax.model.attention.latent import Latent
from mtp_jax.model.backend import Backend
from mtp_jax.model.gqa_config import GqaConfig
from mtp_jax.model.mla_config import MlaConfig


def latent(on: Backend) -> Latent:
    """Multi-head latent attention."""
    kind = on.kinds[MlaConfig]
    assert isinstance(kind, Latent)
    return kind


def gqa(on: Backend) -> Gqa:
    """Grouped-query attention."""
    kind = on.kinds[GqaConfig]
    assert isinstance(kind, Gqa)
    return kind
