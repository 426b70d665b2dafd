"""Params to logits: pure functions over parameter pytrees.

Axis letters: B slots, W window, T tokens, D hidden size, N heads, C latent rank, R rope dims, E experts,
V vocabulary, P pages, S page size, L cached rows of one slot.
"""
