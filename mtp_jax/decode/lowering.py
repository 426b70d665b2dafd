"""Programs of one runner before XLA compiles them: their arguments, results, and the memory that they reuse.

Nothing here runs on a device, and nothing is kept. ``programs`` compiles them and calls them.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from mtp_jax.decode.arrays import Chunk, SlotRow
from mtp_jax.decode.bookkeeping import (
    admit,
    empty_state,
    flush,
    move,
    read_experts,
    read_pages,
    update,
    write_pages,
)
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.keys import DraftKey, Origin, PageKey, ScoreKey, StepKey, name_of
from mtp_jax.decode.outbox import box_of, into_box
from mtp_jax.decode.routed import READ, read_routed
from mtp_jax.decode.state import State
from mtp_jax.decode.step import DraftAlone, Step
from mtp_jax.json_object import JsonObject
from mtp_jax.model import expert_slots
from mtp_jax.model.device import compiler_options, platform
from mtp_jax.model.params import Params
from mtp_jax.model.scores import positions
from mtp_jax.model.sharding import data_size

_NUMBER = jax.ShapeDtypeStruct((), jnp.int32)

Lower = Callable[[], jax.stages.Lowered]


class Lowering:
    """The programs of one runner, as XLA is given them.

    Attributes:
        params, state: shapes of the parameters and of the state, or the arrays themselves. Shapes of a state
            for a TPU say how each array lies in memory (``_in_order``).
        layers: the parameters that scores read, layer by layer.
        place: the device, where it is not here; None: it is here, or there are several.
        boxed: whether steps write their results into a box (``outbox``).
        ordered: whether the state's arrays must lie in memory as ``empty`` makes them.
    """

    def __init__(self, decoding: Decoding, params: Params, state: State, layers: Params) -> None:
        self.decoding, self.params, self.state, self.layers = decoding, params, state, layers
        self._on = decoding.model.on
        self.place = _absent(params)
        self.boxed = platform() == "gpu"
        self.ordered = platform() == "tpu"
        if self.ordered:
            self.state = jax.tree.map(_in_order, state)

    @property
    def devices(self) -> list[Any]:
        """The devices that programs run on; empty: the process's own first device."""
        if self.place is not None:
            return [*self.place.device_set]
        return [] if self._on.mesh is None else [*self._on.mesh.devices.flat]

    def program(self, key: StepKey | DraftKey | ScoreKey, platform: str | None = None) -> jax.stages.Lowered:
        """A program before XLA compiles it; of a step that is not structured.

        platform: "cpu" or "cuda", which need not be here, for its text alone; None: this process's own.
        """
        return self._traced(key).lower(lowering_platforms=None if platform is None else (platform,))

    def _traced(self, key: StepKey | DraftKey | ScoreKey) -> jax.stages.Traced:
        if isinstance(key, ScoreKey):
            given = {"model": self.decoding.model, "taps": key.taps, "with_logits": key.logits}
            run = _named(partial(positions, **given), name_of(key))
            tokens = jax.ShapeDtypeStruct((key.sequences, key.tokens), jnp.int32)
            return jax.jit(run, out_shardings=self.everywhere).trace(self.layers, tokens)
        if isinstance(key, DraftKey):
            run = _named(DraftAlone(self.decoding, key), name_of(key))
            return jax.jit(run, out_shardings=self.everywhere).trace(self.params, self.state, _NUMBER)
        step, boxed = Step(self.decoding, key), self.in_box(key)
        run = _named(into_box(step) if boxed else step, name_of(key))
        jitted = jax.jit(run, donate_argnums=(1, 2) if boxed else 1, out_shardings=self._out())
        estimate = jax.ShapeDtypeStruct((len(Origin), key.depth, 2), jnp.float32)
        given = self._chunk(key), _NUMBER, None if key.kept is None else estimate
        box = (self.box(key),) if boxed else ()
        return jitted.trace(self.params, self.state, *box, *given)

    def in_box(self, key: StepKey) -> bool:
        """Whether a step's result is written into a box."""
        return self.boxed and not key.mode.structured

    def box(self, key: StepKey) -> jax.ShapeDtypeStruct:
        """The shape of a step's box."""
        found = box_of(key, data_size(self._on.mesh))
        return jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=self.everywhere)

    def empty(self) -> jax.stages.Lowered:
        """The program that makes a state."""
        made = _named(partial(empty_state, self.state), "empty")
        return jax.jit(made, out_shardings=self._in_place or self.place).lower()

    def phases(self, key: StepKey) -> dict[str, Lower]:
        """The two programs of a structured step, in order, by name."""
        step, params, state = Step(self.decoding, key), self.params, self.state
        shape = key.slots, key.room + 1, -(-self.decoding.model.cfg.vocab_size // 32)
        allowed = jax.ShapeDtypeStruct(shape, jnp.uint32)
        names = [f"{phase}_{name_of(key)}" for phase in ("draft", "verify")]

        def drafts() -> tuple[Any, Any]:
            """Shapes of the drafts, and shardings of the first phase's results."""
            _, found = jax.eval_shape(step.draft, params, state, allowed, _NUMBER)
            if self._on.mesh is None:
                return found, self._out()
            rows = state.slots.length.sharding
            where = jax.tree.map(lambda _: rows, found)
            tree = found.parents is not None
            # The host reads them.
            where = where.replace(tokens=self.everywhere, parents=self.everywhere if tree else None)
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

        return dict(zip(names, (first, second), strict=True))

    def pages(self, key: PageKey) -> dict[str, Lower]:
        """The reader and the writer of pages, in order, by name."""
        pages, names = (
            jax.ShapeDtypeStruct((key.pages,), jnp.int32),
            [f"{do}_{name_of(key)}" for do in ("read", "write")],
        )

        def read() -> jax.stages.Lowered:
            run = jax.jit(_named(read_pages, names[0]), out_shardings=self.everywhere)
            return run.lower(self.state, pages)

        def write() -> jax.stages.Lowered:
            data = jax.eval_shape(read_pages, self.state, pages)
            run = jax.jit(_named(write_pages, names[1]), donate_argnums=0, out_shardings=self._in_place)
            return run.lower(self.state, pages, data)

        return dict(zip(names, (read, write), strict=True))

    def bookkeeping(self) -> dict[str, Lower]:
        """The programs that every runner needs, which no bucket changes, by name."""
        state, on, drafter = self.state, self._on, self.decoding.drafter
        table = jax.ShapeDtypeStruct(state.slots.page_table.shape, jnp.int32)
        keep = jax.ShapeDtypeStruct(table.shape[:1], jnp.bool_)
        one = partial(jax.tree.map, lambda a: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype))
        row = SlotRow(**{f.name: one(getattr(state.slots, f.name)) for f in fields(SlotRow)})
        place = partial(jax.jit, donate_argnums=0, out_shardings=self._in_place)
        admitting = place(admit, static_argnames="drafter")
        lower: dict[str, Lower] = {
            "admit": lambda: admitting.lower(state, _NUMBER, row, _NUMBER, drafter=drafter),
            "move": lambda: place(move).lower(state, _NUMBER, _NUMBER),
            "update": lambda: place(update).lower(state, keep, table),
        }
        if drafter.deferral:
            static = "drafter", "on"
            flushing = jax.jit(flush, donate_argnums=1, static_argnames=static, out_shardings=self._out())
            lower["flush"] = lambda: flushing.lower(self.params, state, drafter=drafter, on=on)
        if state.experts is not None:
            reading = jax.jit(read_experts, donate_argnums=0, out_shardings=self._out())
            lower["read_experts"] = lambda: reading.lower(state)
        if state.routed is not None:
            numbers = jax.ShapeDtypeStruct((self.routed_pages,), jnp.int32)
            choosing = jax.jit(read_routed, out_shardings=self.everywhere)
            lower["read_routed"] = lambda: choosing.lower(state.routed, numbers)
        return lower

    def movers(self) -> dict[str, Lower]:
        """One program for all layers whose experts have the same shapes, where experts are moved."""
        if self.state.experts is None:
            return {}
        found: dict[str, Lower] = {}
        for moe in expert_slots.moe_layers(self.params):
            weights, mesh = (moe.gate_up, moe.down), self._on.mesh
            if moe.copies is None or mover_of(weights) in found:
                continue
            assert mesh is not None, "only experts on a mesh have slots"
            table = jax.ShapeDtypeStruct(moe.copies.shape, moe.copies.dtype)
            out = jax.tree.map(lambda a: a.sharding, weights), self.everywhere
            run = _named(partial(expert_slots.move, mesh=mesh), "move_expert")
            jitted = jax.jit(run, donate_argnums=0, out_shardings=out)
            found[mover_of(weights)] = partial(jitted.lower, weights, table, _NUMBER, _NUMBER)
        return found

    @property
    def routed_pages(self) -> int:
        """Pages that one call of ``read_routed`` reads."""
        return min(READ, self.state.slots.page_table.shape[1])

    @property
    def options(self) -> JsonObject:
        """Options of XLA."""
        on = self._on
        return compiler_options(on.micro_batches, 1 if on.mesh is None else on.mesh.size)

    @property
    def _in_place(self) -> Any:
        """Shardings of a state that stays where it is, and as it is."""
        if self.ordered:
            return jax.tree.map(lambda a: a.format, self.state)
        return None if self._on.mesh is None else jax.tree.map(lambda a: a.sharding, self.state)

    @property
    def everywhere(self) -> NamedSharding | None:
        """The sharding of a result that is whole on every device, for every process to read."""
        return None if self._on.mesh is None else NamedSharding(self._on.mesh, PartitionSpec())

    def _out(self) -> Any:
        """Shardings of a state and of a result."""
        return None if self._in_place is None else (self._in_place, self.everywhere)

    def _chunk(self, key: StepKey) -> Chunk | None:
        """Shapes of the key's chunk."""
        if not key.tokens:
            return None
        prompts, vocab = key.prompts * data_size(self._on.mesh), self.decoding.model.cfg.vocab_size
        return abstract_chunk(prompts, key.tokens, vocab)


def _absent(params: Params) -> SingleDeviceSharding | None:
    """The place of parameters on a device that is not here; None: they are here, or on a mesh."""
    found = jax.tree.leaves(params)[0].sharding
    there = isinstance(found, SingleDeviceSharding) and not found.device_set <= {*jax.devices()}
    return found if there else None


def _in_order(a: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array whose first axis is outermost in memory: a page lies in one piece.

    XLA's own choice for a large cache on a TPU is the pages' axis as the innermost, since it pads less; then
    each step copies the cache to read it.
    """
    order = Format(Layout(tuple(range(len(a.shape)))), a.sharding or SingleDeviceSharding(jax.devices()[0]))
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=order)


def mover_of(weights: Any) -> str:
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
