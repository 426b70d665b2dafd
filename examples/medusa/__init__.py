"""Medusa heads, a kind of draft head of one's own: one head for each draft, over the final hidden state.

On the command line, with the folder above in PYTHONPATH: `mtp-jax generate --model MODEL --draft-model HEADS
--drafter medusa:MedusaConfig`. ``declared`` answers questions about the heads without jax: which folders are
theirs, their parameters, their cost; ``drafts`` has their drafter. See ``DraftHead`` in ``model/head.py``.
"""

from .declared import MedusaConfig

__all__ = ["MedusaConfig"]
