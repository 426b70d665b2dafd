"""Programs compiled ahead of time, one per key. Only these are ever called.

A ``Compiled`` object refuses any other shape, so a recompile while serving is impossible. ``find`` has the
cheapest program that can do a piece of work, so that not every bucket needs its own.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from mtp_jax.decode.arrays import Chunk, SlotRow
from mtp_jax.decode.bookkeeping import (
    check_room,
    empty_state,
)
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.drafter.protocol import Drafts
from mtp_jax.decode.kept import KeptPrograms
from mtp_jax.decode.keys import DraftKey, Key, PageKey, ScoreKey, StepKey, cheapest, name_of
from mtp_jax.decode.lowering import Lower, Lowering, mover_of
from mtp_jax.decode.outbox import Boxed
from mtp_jax.decode.result import StepResult
from mtp_jax.decode.state import State
from mtp_jax.machine import usable_cores
from mtp_jax.model.params import Moe, Params
from mtp_jax.model.scores import Positions


@dataclass(frozen=True)
class _Phases:
    """The two programs of a structured step."""

    draft: Callable[..., tuple[State, Drafts]]
    verify: Callable[..., tuple[State, StepResult]]


@dataclass(frozen=True)
class _Pages:
    """The two programs of a ``PageKey``."""

    read: Any
    write: Any


class Programs:
    """The compiled programs of one runner, by key."""

    def __init__(
        self,
        decoding: Decoding,
        params: Params,
        state: State,
        folder: Path | None = None,
        layers: Params | None = None,
        built: Path | None = None,
    ) -> None:
        """Compiles nothing yet.

        ``params`` and ``state`` may be ``ShapeDtypeStruct`` trees: nothing runs; placed on a device that is
        not here, they are compiled for it. folder, built: folders of ``KeptPrograms``. layers: the
        parameters that scores read, layer by layer; None: ``params``. Raises ConfigError for programs in
        ``built`` that do not fit.
        """
        self.lowering = Lowering(decoding, params, state, params if layers is None else layers)
        if self.lowering.place is not None:
            params, state = jax.tree.map(_anywhere, (params, state))
        devices = self.lowering.devices
        self.kept = KeptPrograms(folder, devices, built, decoding=decoding, weights=params, cache=state)
        self._compiled: dict[Key, Any] = {}
        self._covering: dict[StepKey, StepKey | None] = {}
        self._lock = threading.Lock()
        self._bookkeeping: dict[str, Any] = {}
        self._numbers: dict[int, jax.Array] = {}

    def __contains__(self, key: Key) -> bool:
        return _program(key) in self._compiled

    def __len__(self) -> int:
        return len(self._compiled)

    @property
    def keys(self) -> list[Key]:
        """Everything compiled so far."""
        return list(self._compiled)

    def program(self, key: Key) -> Any:
        """The ``jax.stages.Compiled`` behind a key, for its HLO text and its cost and memory analysis.

        A structured step has two programs, of which this is the second and larger; pages have a reader and
        a writer, of which it is the writer.
        """
        found = self._compiled[_program(key)]
        if isinstance(found, _Pages):
            return found.write
        if isinstance(found, Boxed):
            return found.step
        return found.verify if isinstance(found, _Phases) else found

    def compile(
        self, keys: Iterable[Key], done: Callable[[int, int], None] | None = None, workers: int | None = None
    ) -> None:
        """Compile the missing programs, ``workers`` at a time; ``done(i, n)`` is called as they finish.

        It may run in a thread of its own while other threads use the compiled programs.
        """
        wanted = dict.fromkeys(map(_program, keys))
        self._prepare_bookkeeping(*wanted)
        missing = [k for k in wanted if k not in self._compiled]
        count, counting = 0, threading.Lock()

        def one(key: Key) -> None:
            nonlocal count
            self.publish(key, self.build(key))
            with counting:
                count += 1
                if done:
                    done(count, len(missing))

        pool = ThreadPoolExecutor(max_workers=workers or min(4, usable_cores()))
        try:
            for future in [pool.submit(one, k) for k in missing]:
                future.result()
        finally:
            # No thread waits for other programs after Ctrl-C: XLA cannot be interrupted and may take minutes.
            pool.shutdown(wait=False, cancel_futures=True)

    def build(self, key: Key) -> Any:
        """Compile a program, which nobody can use before it is published."""
        self._prepare_bookkeeping(key)
        return self._compile_one(key)

    def publish(self, key: Key, program: Any) -> None:
        """Let a program that was built be found and launched from now on."""
        with self._lock:
            self._compiled[key] = program
            self._covering = {}

    def prepare_state(self) -> None:
        """Compile the program that makes a state, where programs are kept."""
        if self.kept.keeps:
            self._empty()

    def _empty(self) -> Any:
        if "empty" not in self._bookkeeping:
            self._bookkeeping["empty"] = self._built("empty", None, self.lowering.empty, serves=False)
        return self._bookkeeping["empty"]

    def _prepare_bookkeeping(self, *keys: Key) -> None:
        """Compile the programs that all of these keys need but scores, which see no state."""
        if not ("admit" in self._bookkeeping or all(isinstance(key, ScoreKey) for key in keys)):
            self._bookkeeping |= self._compile_bookkeeping()

    def find(self, need: StepKey) -> StepKey | None:
        """The cheapest compiled key for ``need``, at its depth; None if no program covers it."""
        covering = self._covering
        if need not in covering:
            with self._lock:
                covering[need] = cheapest(self._compiled, need)
        return covering[need]

    def step(
        self, key: StepKey, params: Params, state: State, chunk: Chunk | None, estimate: Any = None
    ) -> tuple[State, StepResult]:
        """Run a compiled step. estimate: float32 [s, K, 2], for a key with ``kept``."""
        return self._compiled[key.program](params, state, chunk, self._number(key.depth), estimate)

    def draft_phase(self, key: StepKey, params: Params, state: State, allowed: Any) -> tuple[State, Drafts]:
        """Run the first half of a structured step. allowed: uint32 [B, W, ceil(V / 32)]."""
        return self._compiled[key.program].draft(params, state, allowed, self._number(key.depth))

    def _number(self, depth: int) -> jax.Array:
        """A depth on the devices, always in the same place: a graph is not renewed for it, nor is it sent."""
        if depth not in self._numbers:
            number, where = np.int32(depth), self.lowering.everywhere
            # Hosts of a mesh make it each for itself: placing it would have them compare it.
            whole = None if where is None else jax.make_array_from_callback((), where, lambda _: number)
            self._numbers[depth] = jax.device_put(number) if whole is None else whole
        return self._numbers[depth]

    def verify_phase(
        self, key: StepKey, params: Params, state: State, drafts: Drafts, allowed: Any, chunk: Chunk | None
    ) -> tuple[State, StepResult]:
        """Run the second half. allowed: uint32 [B, W, ceil(V / 32)]."""
        return self._compiled[key.program].verify(params, state, drafts, allowed, chunk)

    def draft(
        self, key: DraftKey, params: Params, state: State, slot: int
    ) -> tuple[Int[Array, "B K"], Float[Array, "B K V"]]:
        """Run a compiled draft of one slot; the result has rows for all."""
        return self._compiled[key](params, state, np.int32(slot))

    def score(self, key: ScoreKey, layers: Params, tokens: Int[Any, "n T"]) -> Positions:
        """Run a compiled score. layers: the parameters, layer by layer."""
        return self._compiled[key](layers, tokens)

    def read_pages(self, key: PageKey, state: State, pages: Any) -> list[jax.Array]:
        """Read pages, int32 [key.pages], counted over all shards. The state is not donated."""
        return self._compiled[key].read(state, pages)

    def write_pages(self, key: PageKey, state: State, pages: Any, data: list[Any]) -> State:
        """Write pages, int32 [key.pages], counted over all shards."""
        return self._compiled[key].write(state, pages, data)

    def empty_state(self) -> State:
        """A zeroed state, in which no slot is active. Raises ConfigError where it has no room.

        Where programs are kept, or say how it lies in memory, one of them makes it. Elsewhere each array is
        made by itself, by a small program that engines of other shapes share.
        """
        check_room(self.lowering.state)
        made = self.kept.keeps or self.lowering.ordered
        return self._empty()() if made else empty_state(self.lowering.state)

    def admit(self, state: State, slot: int, row: SlotRow, tail: int) -> State:
        """Put a request's row into a slot; ``tail``: the page it goes on from, counted over all shards."""
        return self._bookkeeping["admit"](state, np.int32(slot), row, np.int32(tail))

    def move(self, state: State, source: int, target: int) -> State:
        """Let a request go on in another slot."""
        return self._bookkeeping["move"](state, np.int32(source), np.int32(target))

    def update(self, state: State, keep: Any, page_table: Any) -> State:
        """Switch slots off and renew the page table."""
        return self._bookkeeping["update"](state, keep, page_table)

    def flush(self, params: Params, state: State) -> tuple[State, Int[Array, ""]]:
        """Write the drafter's deferred entries. The number has no meaning; it arrives when this is done."""
        return self._bookkeeping["flush"](params, state)

    def read_experts(self, state: State) -> tuple[State, tuple[jax.Array, jax.Array]]:
        """The counts of experts, which begin anew."""
        return self._bookkeeping["read_experts"](state)

    def read_routed(self, state: State, numbers: Any) -> jax.Array:
        """Experts that tokens in pages chose; numbers: int32 [routed_pages], counted over all shards."""
        return self._bookkeeping["read_routed"](state.routed, numbers)

    def move_expert(self, moe: Moe, source: int, target: int, copies: Any) -> Moe:
        """A layer with the expert of slot ``source`` in slot ``target``, too; its weights are donated."""
        weights = moe.gate_up, moe.down
        run = self._bookkeeping[mover_of(weights)]
        (gate_up, down), copies = run(weights, copies, np.int32(source), np.int32(target))
        return replace(moe, gate_up=gate_up, down=down, copies=copies)

    def _compile_one(self, key: Key) -> Any:
        found = self.lowering
        if isinstance(key, PageKey):
            return _Pages(*(self._built(name, key, lower) for name, lower in found.pages(key).items()))
        if not isinstance(key, StepKey):
            return self._built(name_of(key), key, partial(found.program, key))
        if key.mode.structured:
            return _Phases(*(self._built(name, key, lower) for name, lower in found.phases(key).items()))
        program = self._built(name_of(key), key, partial(found.program, key))
        return Boxed(program, found.box(key), found.everywhere) if found.in_box(key) else program

    def _compile_bookkeeping(self) -> dict[str, Any]:
        # Kernels of the model are in one of them.
        lower = self.lowering.bookkeeping()
        found = {name: self._built(name, None, make, name == "flush") for name, make in lower.items()}
        return found | {name: make().compile() for name, make in self.lowering.movers().items()}

    def _built(self, name: str, key: Key | None, lower: Lower, serves: bool = True) -> Any:
        """A program that was kept, or compiled from the result of ``lower``.

        name, key: name it among the programs of this runner. serves: whether it is compiled for serving.
        """
        return self.kept.get(name, key, lambda: lower().compile(self.lowering.options if serves else None))


def _program(key: Key) -> Key:
    """The executable that a key names."""
    return key.program if isinstance(key, StepKey) else key


def _anywhere(a: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype)
