"""Rows of its slot's cache that a token sees: compact, never a mask of every row for every token.

The kernels take it as it is; XLA asks it for the mask of the rows at hand. The choice of sparse attention is
apart (``model.indexer.Choice``).
"""

from kernels_pallas.visible import MAX_AHEAD, Window, chain

__all__ = ["MAX_AHEAD", "Visible", "Window", "chain"]

Visible = Window
