"""Logits to tokens, on device: cache, sampling, verification and the compiled step."""
