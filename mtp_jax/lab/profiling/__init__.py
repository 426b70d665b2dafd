"""The time of prefill and of draft-and-verify steps, by part: ``mtp-jax profile`` (docs/profiling.md)."""
