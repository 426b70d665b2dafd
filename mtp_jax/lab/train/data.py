"""Batches from one long token stream: a pure function of (seed, stage, step), so that resuming is exact."""

import numpy as np

from mtp_jax.errors import ConfigError


def batch_at(
    stream: np.ndarray, seq_len: int, extra: int, batch: int, seed: tuple[int, ...], step: int
) -> np.ndarray:
    """Batch number `step` of windows of seq_len + extra tokens, int32 [batch, seq_len + extra].

    Each epoch cuts the stream at a fresh random offset into windows that start seq_len apart and visits them
    in random order. Windows share their extra tokens with the next: a token is predicted once per epoch.
    ConfigError when the stream is too short for one batch.
    """
    windows = (len(stream) - extra) // seq_len - 1
    per_epoch = windows // batch
    if per_epoch < 1:
        raise ConfigError(
            f"the corpus has {len(stream)} tokens; a batch of {batch} windows of {seq_len} needs at least "
            f"{(batch + 1) * seq_len + extra}; use more text or smaller batches"
        )
    epoch, index = divmod(step, per_epoch)
    rng = np.random.default_rng((*seed, epoch))
    offset = int(rng.integers(seq_len))
    order = rng.permutation(windows)[index * batch : (index + 1) * batch]
    starts = offset + order * seq_len
    return stream[starts[:, None] + np.arange(seq_len + extra)].astype(np.int32)


def even_windows(stream: np.ndarray, length: int, count: int) -> np.ndarray:
    """`count` windows of `length` tokens spread evenly over the stream, int32 [count, length]."""
    if len(stream) < length:
        raise ConfigError(f"the held-out text has {len(stream)} tokens; at least {length} are needed")
    starts = np.linspace(0, len(stream) - length, count).astype(np.int64)
    return stream[starts[:, None] + np.arange(length)].astype(np.int32)
