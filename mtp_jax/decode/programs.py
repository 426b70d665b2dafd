"""Programs compiled ahead of time, one per key. Only these are ever called.

A ``Compiled`` object refuses any other shape, so a recompile while serving is impossible. ``find`` has the
cheapest program that can do a piece of work, so that not every bucket needs its own.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Float, Int

from mtp_jax.decode.arrays import Chunk, SlotRow
from mtp_jax.decode.bookkeeping import (
    admit,
    check_room,
    empty_state,
    flush,
    move,
    read_experts,
    read_pages,
    update,
    write_pages,
)
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.drafter.protocol import Drafts
from mtp_jax.decode.kept import KeptPrograms
from mtp_jax.decode.keys import DraftKey, Key, Origin, PageKey, ScoreKey, StepKey, cheapest, name_of
from mtp_jax.decode.outbox import Boxed, box_of, into_box
from mtp_jax.decode.result import StepResult
from mtp_jax.decode.routed import READ, read_routed
from mtp_jax.decode.state import State
from mtp_jax.decode.step import DraftAlone, Step
from mtp_jax.json_object import JsonObject
from mtp_jax.machine import usable_cores
from mtp_jax.model import expert_slots
from mtp_jax.model.device import compiler_options, platform
from mtp_jax.model.params import Moe, Params
from mtp_jax.model.scores import Positions, positions
from mtp_jax.model.sharding import data_size

_NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


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
        self.decoding, self._on = decoding, decoding.model.on
        self._params, self._state = params, state
        self._layers = params if layers is None else layers
        self._place = _absent(params)
        if self._place is not None:
            params, state = jax.tree.map(_anywhere, (params, state))
        devices = self._on.mesh.devices.flat if self._on.mesh is not None else ()
        devices = devices if self._place is None else self._place.device_set
        self.kept = KeptPrograms(folder, [*devices], built, decoding=decoding, weights=params, cache=state)
        self._compiled: dict[Key, Any] = {}
        self._covering: dict[StepKey, StepKey | None] = {}
        self._lock = threading.Lock()
        self._bookkeeping: dict[str, Any] = {}
        self._numbers: dict[int, jax.Array] = {}
        self.boxed = platform() == "gpu"  # see ``outbox``

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
        def lower() -> jax.stages.Lowered:
            made = _named(partial(empty_state, self._state), "empty")
            return jax.jit(made, out_shardings=self._in_place or self._place).lower()

        if "empty" not in self._bookkeeping:
            self._bookkeeping["empty"] = self._built("empty", None, lower, serves=False)
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
            number, where = np.int32(depth), self._everywhere
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

        Where programs are kept, one of them makes it. Elsewhere each array is made by itself, by a small
        program that engines of other shapes share.
        """
        check_room(self._state)
        return self._empty()() if self.kept.keeps else empty_state(self._state)

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

    @property
    def routed_pages(self) -> int:
        """Pages that one call of ``read_routed`` reads."""
        return min(READ, self._state.slots.page_table.shape[1])

    def read_routed(self, state: State, numbers: Any) -> jax.Array:
        """Experts that tokens in pages chose; numbers: int32 [routed_pages], counted over all shards."""
        return self._bookkeeping["read_routed"](state.routed, numbers)

    def move_expert(self, moe: Moe, source: int, target: int, copies: Any) -> Moe:
        """A layer with the expert of slot ``source`` in slot ``target``, too; its weights are donated."""
        weights = moe.gate_up, moe.down
        run = self._bookkeeping[_mover(weights)]
        (gate_up, down), copies = run(weights, copies, np.int32(source), np.int32(target))
        return replace(moe, gate_up=gate_up, down=down, copies=copies)

    def _compile_one(self, key: Key) -> Any:
        if isinstance(key, PageKey):
            return self._compile_pages(key)
        if isinstance(key, StepKey) and key.mode.structured:
            return self._compile_phases(key)
        program = self._built(name_of(key), key, lambda: self.lowered(key))
        if isinstance(key, StepKey) and self._in_box(key):
            return Boxed(program, self._box(key), self._everywhere)
        return program

    def _built(
        self, name: str, key: Key | None, lower: Callable[[], jax.stages.Lowered], serves: bool = True
    ) -> Any:
        """A program that was kept, or compiled from the result of ``lower``.

        name, key: name it among the programs of this runner. serves: whether it is compiled for serving.
        """
        return self.kept.get(name, key, lambda: lower().compile(self._options if serves else None))

    def lowered(self, key: StepKey | DraftKey | ScoreKey, platform: str | None = None) -> jax.stages.Lowered:
        """A program before XLA compiles it; of a step that is not structured.

        platform: "cpu" or "cuda", which need not be here, for its text alone; None: this process's own.
        """
        return self._traced(key).lower(lowering_platforms=None if platform is None else (platform,))

    def _traced(self, key: StepKey | DraftKey | ScoreKey) -> jax.stages.Traced:
        if isinstance(key, ScoreKey):
            given = {"model": self.decoding.model, "taps": key.taps, "with_logits": key.logits}
            run = _named(partial(positions, **given), name_of(key))
            tokens = jax.ShapeDtypeStruct((key.sequences, key.tokens), jnp.int32)
            return jax.jit(run, out_shardings=self._everywhere).trace(self._layers, tokens)
        if isinstance(key, DraftKey):
            run = _named(DraftAlone(self.decoding, key), name_of(key))
            return jax.jit(run, out_shardings=self._everywhere).trace(self._params, self._state, _NUMBER)
        step, boxed = Step(self.decoding, key), self._in_box(key)
        run = _named(into_box(step) if boxed else step, name_of(key))
        jitted = jax.jit(run, donate_argnums=(1, 2) if boxed else 1, out_shardings=self._out())
        estimate = jax.ShapeDtypeStruct((len(Origin), key.depth, 2), jnp.float32)
        given = self._chunk(key), _NUMBER, None if key.kept is None else estimate
        box = (self._box(key),) if boxed else ()
        return jitted.trace(self._params, self._state, *box, *given)

    def _in_box(self, key: StepKey) -> bool:
        """Whether a step's result is written into a box."""
        return self.boxed and not key.mode.structured

    def _box(self, key: StepKey) -> jax.ShapeDtypeStruct:
        found = box_of(key, data_size(self._on.mesh))
        return jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=self._everywhere)

    def _compile_phases(self, key: StepKey) -> _Phases:
        step, params, state = Step(self.decoding, key), self._params, self._state
        shape = key.slots, key.room + 1, -(-self.decoding.model.cfg.vocab_size // 32)
        allowed = jax.ShapeDtypeStruct(shape, jnp.uint32)
        names = [f"{phase}_{name_of(key)}" for phase in ("draft", "verify")]

        def drafts() -> tuple[Any, Any]:
            """Shapes of the drafts, and shardings of the first phase's results."""
            _, found = jax.eval_shape(step.draft, params, state, allowed, _NUMBER)
            if self._on.mesh is None:
                return found, None
            rows = state.slots.length.sharding
            where = jax.tree.map(lambda _: rows, found)
            tree = found.parents is not None
            # The host reads them.
            where = where.replace(tokens=self._everywhere, parents=self._everywhere if tree else None)
            found = jax.tree.map(
                lambda a, by: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=by), found, where
            )
            return found, (self._in_place, where)

        def first() -> jax.stages.Lowered:
            run = jax.jit(_named(step.draft, names[0]), donate_argnums=1, out_shardings=drafts()[1])
            return run.lower(params, state, allowed, _NUMBER)

        def second() -> jax.stages.Lowered:
            run = jax.jit(_named(step.verify, names[1]), donate_argnums=1, out_shardings=self._out())
            return run.lower(params, state, drafts()[0], allowed, self._chunk(key))

        return _Phases(self._built(names[0], key, first), self._built(names[1], key, second))

    def _compile_pages(self, key: PageKey) -> _Pages:
        pages, names = (
            jax.ShapeDtypeStruct((key.pages,), jnp.int32),
            [f"{do}_{name_of(key)}" for do in ("read", "write")],
        )

        def read() -> jax.stages.Lowered:
            run = jax.jit(_named(read_pages, names[0]), out_shardings=self._everywhere)
            return run.lower(self._state, pages)

        def write() -> jax.stages.Lowered:
            data = jax.eval_shape(read_pages, self._state, pages)
            run = jax.jit(_named(write_pages, names[1]), donate_argnums=0, out_shardings=self._in_place)
            return run.lower(self._state, pages, data)

        return _Pages(self._built(names[0], key, read), self._built(names[1], key, write))

    @property
    def _options(self) -> JsonObject:
        """Options of XLA."""
        on = self._on
        return compiler_options(on.micro_batches, 1 if on.mesh is None else on.mesh.size)

    @property
    def _in_place(self) -> Any:
        """Shardings of a state that stays where it is."""
        return None if self._on.mesh is None else jax.tree.map(lambda a: a.sharding, self._state)

    @property
    def _everywhere(self) -> NamedSharding | None:
        """The sharding of a result that is whole on every device, for every process to read."""
        return None if self._on.mesh is None else NamedSharding(self._on.mesh, PartitionSpec())

    def _out(self) -> Any:
        """Shardings of a state and of a result."""
        return None if self._on.mesh is None else (self._in_place, self._everywhere)

    def _chunk(self, key: StepKey) -> Chunk | None:
        """Shapes of the key's chunk."""
        if not key.tokens:
            return None
        prompts, vocab = key.prompts * data_size(self._on.mesh), self.decoding.model.cfg.vocab_size
        return abstract_chunk(prompts, key.tokens, vocab)

    def _compile_bookkeeping(self) -> dict[str, Any]:
        """The programs that every runner needs: none of them depends on a bucket."""
        state, on, drafter = self._state, self._on, self.decoding.drafter
        table = jax.ShapeDtypeStruct(state.slots.page_table.shape, jnp.int32)
        keep = jax.ShapeDtypeStruct(table.shape[:1], jnp.bool_)
        one = partial(jax.tree.map, lambda a: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype))
        row = SlotRow(**{f.name: one(getattr(state.slots, f.name)) for f in fields(SlotRow)})
        place = partial(jax.jit, donate_argnums=0, out_shardings=self._in_place)
        admitting = place(admit, static_argnames="drafter")
        lower: dict[str, Callable[[], jax.stages.Lowered]] = {
            "admit": lambda: admitting.lower(state, _NUMBER, row, _NUMBER, drafter=drafter),
            "move": lambda: place(move).lower(state, _NUMBER, _NUMBER),
            "update": lambda: place(update).lower(state, keep, table),
        }
        if drafter.deferral:
            static = "drafter", "on"
            flushing = jax.jit(flush, donate_argnums=1, static_argnames=static, out_shardings=self._out())
            lower["flush"] = lambda: flushing.lower(self._params, state, drafter=drafter, on=on)
        if state.experts is not None:
            reading = jax.jit(read_experts, donate_argnums=0, out_shardings=self._out())
            lower["read_experts"] = lambda: reading.lower(state)
        if state.routed is not None:
            numbers = jax.ShapeDtypeStruct((self.routed_pages,), jnp.int32)
            choosing = jax.jit(read_routed, out_shardings=self._everywhere)
            lower["read_routed"] = lambda: choosing.lower(state.routed, numbers)
        # Kernels of the model are in one of them.
        found = {name: self._built(name, None, make, name == "flush") for name, make in lower.items()}
        return found if state.experts is None else found | self._compile_movers()

    def _compile_movers(self) -> dict[str, Any]:
        """One program for all layers whose experts have the same shapes."""
        found: dict[str, Any] = {}
        for moe in expert_slots.moe_layers(self._params):
            weights, mesh = (moe.gate_up, moe.down), self._on.mesh
            if moe.copies is None or _mover(weights) in found:
                continue
            assert mesh is not None, "only experts on a mesh have slots"
            table = jax.ShapeDtypeStruct(moe.copies.shape, moe.copies.dtype)
            out = jax.tree.map(lambda a: a.sharding, weights), self._everywhere
            run = _named(partial(expert_slots.move, mesh=mesh), "move_expert")
            jitted = jax.jit(run, donate_argnums=0, out_shardings=out)
            found[_mover(weights)] = jitted.lower(weights, table, _NUMBER, _NUMBER).compile()
        return found


def _program(key: Key) -> Key:
    """The executable that a key names."""
    return key.program if isinstance(key, StepKey) else key


def _absent(params: Params) -> SingleDeviceSharding | None:
    """The place of parameters on a device that is not here; None: they are here, or on a mesh."""
    found = jax.tree.leaves(params)[0].sharding
    there = isinstance(found, SingleDeviceSharding) and not found.device_set <= {*jax.devices()}
    return found if there else None


def _anywhere(a: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def _mover(weights: Any) -> str:
    """The name of the program that moves experts of these shapes."""
    return f"move_expert {[(a.shape, a.dtype.name) for a in jax.tree.leaves(weights)]}"


def _named(f: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return f(*args)

    run.__name__ = run.__qualname__ = name
    return run


def abstract_chunk(prompts: int, tokens: int, vocab: int) -> Chunk:
    """Shapes of chunks."""

    def zeros() -> Chunk:
        number, ids = jnp.zeros(prompts, jnp.int32), jnp.zeros((prompts, tokens), jnp.int32)
        allowed = jnp.zeros((prompts, -(-vocab // 32)), jnp.uint32)
        return Chunk(number, number, number, jnp.zeros(prompts, bool), ids, ids, number, allowed)

    return jax.eval_shape(zeros)
