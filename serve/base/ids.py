"""Names of requests and answers."""

import random


def new_id() -> str:
    """32 hexadecimal digits. No system call, unlike a UUID: there the engine's thread would take over."""
    return f"{random.getrandbits(128):032x}"
