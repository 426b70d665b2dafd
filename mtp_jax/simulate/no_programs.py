"""Runners of simulated devices: nothing is compiled. No jax here."""

from abc import ABC
from collections.abc import Callable, Iterable

from mtp_jax.decode.keys import Key, StepKey, cheapest
from mtp_jax.decode.launches import ON_CPU, DeviceRunner, Traits


class NoPrograms(DeviceRunner, ABC):
    """A runner that takes note of keys, and finds them again."""

    def __init__(self, shards: int, traits: Traits = ON_CPU) -> None:
        super().__init__(shards, traits=traits)
        self._compiled: dict[Key, None] = {}
        self._covering: dict[StepKey, StepKey | None] = {}

    @property
    def keys(self) -> list[Key]:
        """Everything compiled so far."""
        return list(self._compiled)

    def compile(self, keys: Iterable[Key], done: Callable[[int, int], None] | None = None) -> None:
        """Take note of keys: there is nothing to compile."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._compiled]
        for i, key in enumerate(missing, start=1):
            self._compiled = {**self._compiled, key: None}
            self._covering = {}
            if done:
                done(i, len(missing))

    def find(self, need: StepKey) -> StepKey | None:
        """The cheapest compiled key for ``need``, at its depth, or None if there is none."""
        covering = self._covering
        if need not in covering:
            covering[need] = cheapest(self._compiled, need)
        return covering[need]
