"""Names of requests and answers."""

import random


def new_id() -> str:
    """32 hexadecimal digits. No system call, unlike a UUID: the engine's thread would take its turn there."""
    return f"{random.getrandbits(128):032x}"
