"""Medusa heads: one for each draft, over the final hidden state."""
