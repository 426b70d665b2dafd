"""Requests go on one by one, with a look at the sockets before each."""

import asyncio


class Turns:
    """What a request costs until it is queued, nobody else should wait for, least of all who is refused.

    Attributes:
        waiting: how many wait for their turn.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self._lock = asyncio.Lock()

    async def next(self) -> None:
        """Wait until all who came before have gone on, and sockets have been read since the last did."""
        self.waiting += 1
        try:
            async with self._lock:
                await asyncio.sleep(0)
        finally:
            self.waiting -= 1
