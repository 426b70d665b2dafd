"""The rows of its slot's cache that a token sees, in compact form, not as a mask of every row.

Kernels take this form as it is; for XLA it gives the mask of some rows. The choice of sparse attention is a
type of its own (``model.indexer.Choice``).
"""

from kernels_pallas.visible import MAX_AHEAD, Window, chain

__all__ = ["MAX_AHEAD", "Visible", "Window", "chain"]

Visible = Window
