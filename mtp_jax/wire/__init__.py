"""Connections between processes of one secret: proofs, signed messages. No jax here."""
