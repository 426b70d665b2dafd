"""Attention of a window of 1 to 8 tokens per slot over a paged latent cache (absorbed MLA)."""
