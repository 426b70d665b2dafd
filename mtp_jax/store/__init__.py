"""Pages of the cache outside of the device, by digest. No jax here."""
