"""Where the time of prefill and of draft-and-verify steps goes: ``mtp-jax profile`` (docs/profiling.md)."""
