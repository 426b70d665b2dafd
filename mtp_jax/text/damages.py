"""Errors of the library ``tokenizers`` for a damaged tokenizer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mtp_jax.errors import CheckpointError

_PANIC = "PanicException"  # a fault that its Rust code meets by itself, and no ``Exception``
_LONGEST = 300  # characters of a reason


@contextmanager
def damages(message: Callable[[str], str]) -> Iterator[None]:
    """Turn all that the library raises into CheckpointError. message: makes the message of a reason."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        reason, *_ = [*str(error).strip().splitlines(), type(error).__name__]
        raise CheckpointError(message(reason[:_LONGEST])) from error
