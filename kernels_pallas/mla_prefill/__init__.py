"""Attention of a chunk of a prompt over all rows up to it, keys and values expanded (naive MLA)."""
