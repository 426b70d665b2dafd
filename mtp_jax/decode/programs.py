"""Programs compiled ahead of time, one per key. Only these are ever called.

A ``Compiled`` object refuses any other shape, so a recompile while serving is impossible. ``cover`` finds the
cheapest program that can do a piece of work, so that not every bucket needs its own.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from mtp_jax.decode.arrays import Chunk, SlotRow
from mtp_jax.decode.bookkeeping import admit, flush, move, read_experts, read_pages, update, write_pages
from mtp_jax.decode.drafter.protocol import Drafter, Drafts
from mtp_jax.decode.drafter.sampler import DraftSampler
from mtp_jax.decode.keys import DraftKey, Key, PageKey, StepKey, cheapest, name_of
from mtp_jax.decode.result import StepResult
from mtp_jax.decode.state import State
from mtp_jax.decode.step import Accept, draft_phase, step, verify_phase
from mtp_jax.errors import ConfigError
from mtp_jax.machine import usable_cores
from mtp_jax.model import expert_slots
from mtp_jax.model.backend import Backend
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.device import compiler_options
from mtp_jax.model.params import Moe, Params
from mtp_jax.model.sharding import data_size


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
        cfg: ModelConfig,
        drafter: Drafter,
        params: Params,
        state: State,
        on: Backend,
        accept: Accept | None = None,
    ) -> None:
        """``params`` and ``state`` may be ``ShapeDtypeStruct`` trees: nothing runs.

        on: the backend of steps. accept: see ``step``.
        """
        self._cfg, self._params, self._state, self.drafter = cfg, params, state, drafter
        self._on, self._accept = on, accept
        self._compiled: dict[Key, Any] = {}
        self._covering: dict[StepKey, StepKey | None] = {}
        self._lock = threading.Lock()
        self._bookkeeping: dict[str, Any] = {}

    def __contains__(self, key: Key) -> bool:
        return _program(key) in self._compiled

    def __len__(self) -> int:
        return len(self._compiled)

    def accepting(self, accept: Accept) -> "Programs":
        """The same, nothing compiled yet, with other rules of acceptance: for measurements."""
        return Programs(self._cfg, self.drafter, self._params, self._state, self._on, accept)

    @property
    def keys(self) -> list[Key]:
        """Everything compiled so far."""
        return list(self._compiled)

    def program(self, key: Key) -> Any:
        """The ``jax.stages.Compiled`` behind a key, for its HLO text and its cost and memory analysis.

        The second, larger program of a structured step; for pages, the program that writes.
        """
        found = self._compiled[_program(key)]
        if isinstance(found, _Pages):
            return found.write
        return found.verify if isinstance(found, _Phases) else found

    def compile(
        self, keys: Iterable[Key], done: Callable[[int, int], None] | None = None, workers: int | None = None
    ) -> None:
        """Compile the missing programs, ``workers`` at a time; ``done(i, n)`` is called as they finish.

        It may run in a thread of its own while other threads use the compiled programs.
        """
        self._prepare_bookkeeping()
        missing = [k for k in dict.fromkeys(map(_program, keys)) if k not in self._compiled]
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
            # Nobody waits for the rest after Ctrl-C: XLA cannot be interrupted, and may take minutes.
            pool.shutdown(wait=False, cancel_futures=True)

    def build(self, key: Key) -> Any:
        """Compile a program, which nobody can use before it is published."""
        self._prepare_bookkeeping()
        return self._compile_one(key)

    def publish(self, key: Key, program: Any) -> None:
        """Let a program that was built be found and launched from now on."""
        with self._lock:
            self._compiled[key] = program
            self._covering = {}

    def _prepare_bookkeeping(self) -> None:
        if not self._bookkeeping:
            self._bookkeeping = self._compile_bookkeeping()

    def cover(self, need: StepKey) -> StepKey:
        """The cheapest compiled key for ``need``, at its depth. Raises ConfigError if there is none."""
        found = self.find(need)
        if found is None:
            raise ConfigError(f"no program covers {need}; compile it first (Engine.prepare)")
        return found

    def find(self, need: StepKey) -> StepKey | None:
        """``cover``, or None if no program covers ``need``."""
        covering = self._covering
        if need not in covering:
            with self._lock:
                covering[need] = cheapest(self._compiled, need)
        return covering[need]

    def step(
        self, key: StepKey, params: Params, state: State, chunk: Chunk | None
    ) -> tuple[State, StepResult]:
        """Run a compiled step."""
        return self._compiled[key.program](params, state, chunk, np.int32(key.depth))

    def draft_phase(self, key: StepKey, params: Params, state: State, allowed: Any) -> tuple[State, Drafts]:
        """Run the first half of a structured step. allowed: uint32 [B, W, ceil(V / 32)]."""
        return self._compiled[key.program].draft(params, state, allowed, np.int32(key.depth))

    def verify_phase(
        self, key: StepKey, params: Params, state: State, drafts: Drafts, allowed: Any, chunk: Chunk | None
    ) -> tuple[State, StepResult]:
        """Run the second half. allowed: uint32 [B, W, ceil(V / 32)]."""
        return self._compiled[key.program].verify(params, state, drafts, allowed, chunk)

    def draft(self, key: DraftKey, params: Params, state: State, slot: int) -> Any:
        """Run a compiled draft of one slot: (tokens [B, K], logits [B, K, V]), with rows for all."""
        return self._compiled[key](params, state, jnp.int32(slot))

    def read_pages(self, key: PageKey, state: State, pages: Any) -> list[jax.Array]:
        """Read pages, int32 [key.pages], counted over all shards. The state is not donated."""
        return self._compiled[key].read(state, pages)

    def write_pages(self, key: PageKey, state: State, pages: Any, data: list[Any]) -> State:
        """Write pages, int32 [key.pages], counted over all shards."""
        return self._compiled[key].write(state, pages, data)

    def admit(self, state: State, slot: int, row: SlotRow, tail: int) -> State:
        """Put a request's row into a slot; ``tail``: the page it goes on from, counted over all shards."""
        return self._bookkeeping["admit"](state, jnp.int32(slot), row, jnp.int32(tail))

    def move(self, state: State, source: int, target: int) -> State:
        """Let a request go on in another slot."""
        return self._bookkeeping["move"](state, jnp.int32(source), jnp.int32(target))

    def update(self, state: State, keep: Any, page_table: Any) -> State:
        """Switch slots off and renew the page table."""
        return self._bookkeeping["update"](state, keep, page_table)

    def flush(self, params: Params, state: State) -> tuple[State, Int[Array, ""]]:
        """Do the drafter's deferred work. The number means nothing; it is there when that is done."""
        return self._bookkeeping["flush"](params, state)

    def read_experts(self, state: State) -> tuple[State, tuple[jax.Array, jax.Array]]:
        """The counts of experts, which begin anew."""
        return self._bookkeeping["read_experts"](state)

    def move_expert(self, moe: Moe, source: int, target: int, copies: Any) -> Moe:
        """A layer with the expert of slot ``source`` in slot ``target``, too; its weights are donated."""
        weights = moe.gate_up, moe.down
        run = self._bookkeeping[_mover(weights)]
        (gate_up, down), copies = run(weights, copies, np.int32(source), np.int32(target))
        return replace(moe, gate_up=gate_up, down=down, copies=copies)

    def _compile_one(self, key: Key) -> Any:
        if isinstance(key, StepKey) and key.mode.structured:
            return self._compile_phases(key)
        if isinstance(key, PageKey):
            return self._compile_pages(key)
        return self._lower(key).compile(compiler_options(self._on.micro_batches))

    def _compile_phases(self, key: StepKey) -> _Phases:
        fixed: dict[str, Any] = self._fixed(on=self._on, pages=key.pages, mode=key.mode)
        propose = partial(draft_phase, slots=key.slots, depth=key.depth, topology=key.topology, **fixed)
        words = -(-self._cfg.vocab_size // 32)
        allowed = jax.ShapeDtypeStruct((key.slots, key.depth + 1, words), jnp.uint32)
        depth = jax.ShapeDtypeStruct((), jnp.int32)
        _, drafts = jax.eval_shape(propose, self._params, self._state, allowed, depth)
        out = self._out()
        if out:
            state, rows = self._out(result_too=False)["out_shardings"], self._state.slots.length.sharding
            drafts = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows), drafts)
            tokens = drafts.tokens  # the host reads them
            tokens = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=self._everywhere)
            drafts = drafts.replace(tokens=tokens)
            out: dict[str, Any] = {"out_shardings": (state, jax.tree.map(lambda a: a.sharding, drafts))}
        first = jax.jit(_named(propose, f"draft_{name_of(key)}"), donate_argnums=1, **out)
        verify = _named(partial(verify_phase, **self._last(key), **fixed), f"verify_{name_of(key)}")
        second = jax.jit(verify, donate_argnums=1, **self._out())
        given = self._params, self._state
        lowered = first.lower(*given, allowed, depth), second.lower(*given, drafts, allowed, self._chunk(key))
        return _Phases(*(half.compile(compiler_options(self._on.micro_batches)) for half in lowered))

    def _compile_pages(self, key: PageKey) -> _Pages:
        pages = jax.ShapeDtypeStruct((key.pages,), jnp.int32)
        data = jax.eval_shape(read_pages, self._state, pages)
        read = jax.jit(_named(read_pages, f"read_{name_of(key)}"), out_shardings=self._everywhere)
        write = jax.jit(
            _named(write_pages, f"write_{name_of(key)}"), donate_argnums=0, **self._out(result_too=False)
        )
        return _Pages(
            read.lower(self._state, pages).compile(compiler_options()),
            write.lower(self._state, pages, data).compile(compiler_options()),
        )

    def _fixed(self, **others: Any) -> dict[str, Any]:
        return {"cfg": self._cfg, "drafter": self.drafter, **others}

    def _out(self, result_too: bool = True) -> dict[str, Any]:
        """The state stays where it is; a result is whole on every device, for every process to read."""
        if self._on.mesh is None:
            return {}
        state = jax.tree.map(lambda a: a.sharding, self._state)
        return {"out_shardings": (state, self._everywhere) if result_too else state}

    @property
    def _everywhere(self) -> NamedSharding | None:
        return None if self._on.mesh is None else NamedSharding(self._on.mesh, PartitionSpec())

    def _lower(self, key: StepKey | DraftKey) -> Any:
        if isinstance(key, StepKey):
            sizes = {"slots": key.slots, "depth": key.depth, "pages": key.pages, "topology": key.topology}
            fixed = self._fixed(on=self._on, mode=key.mode, **self._last(key), **sizes)
            run = _named(partial(step, **fixed), name_of(key))
            jitted = jax.jit(run, donate_argnums=1, **self._out())
            depth = jax.ShapeDtypeStruct((), jnp.int32)
            return jitted.lower(self._params, self._state, self._chunk(key), depth)
        only = _named(partial(self._draft_only, key), name_of(key))
        slot = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.jit(only, out_shardings=self._everywhere).lower(self._params, self._state, slot)

    def _last(self, key: StepKey) -> dict[str, Any]:
        return {"accept": self._accept, "prompt_logprobs": key.prompt_logprobs}

    def _chunk(self, key: StepKey) -> Chunk | None:
        """Shapes of the key's chunk."""
        if not key.tokens:
            return None
        return abstract_chunk(key.prompts * data_size(self._on.mesh), key.tokens, self._cfg.vocab_size)

    def _draft_only(self, key: DraftKey, params: Params, state: State, slot: Int[Array, ""]) -> Any:
        active = jnp.arange(len(state.slots.active)) == slot
        slots = state.slots.replace(active=active, depth=jnp.full_like(state.slots.depth, key.depth))
        table = slots.page_table[:, : key.pages]
        sampler = DraftSampler(logits=True)
        room, wanted = key.depth, jnp.int32(key.depth)
        drafts, _ = self.drafter.propose(params, state.drafter, slots, table, room, wanted, sampler, self._on)
        return drafts.tokens, drafts.logits

    def _compile_bookkeeping(self) -> dict[str, Any]:
        """The programs that every runner needs: none of them depends on a bucket."""
        state, index = self._state, jax.ShapeDtypeStruct((), jnp.int32)
        table = jax.ShapeDtypeStruct(state.slots.page_table.shape, jnp.int32)
        keep = jax.ShapeDtypeStruct(table.shape[:1], jnp.bool_)
        one = partial(jax.tree.map, lambda a: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype))
        row = SlotRow(**{f.name: one(getattr(state.slots, f.name)) for f in fields(SlotRow)})
        admitting = _named(partial(admit, drafter=self.drafter), "admit")
        arguments = {admitting: (index, row, index), move: (index, index), update: (keep, table)}
        out = self._out(result_too=False)
        found = {
            f.__name__: jax.jit(f, donate_argnums=0, **out).lower(state, *given).compile()
            for f, given in arguments.items()
        }
        if self.drafter.deferral:
            run = _named(partial(_flush, drafter=self.drafter, on=self._on), "flush")
            lowered = jax.jit(run, donate_argnums=1, **self._out()).lower(self._params, state)
            found["flush"] = lowered.compile(compiler_options())
        if state.experts is not None:
            found["read_experts"] = (
                jax.jit(read_experts, donate_argnums=0, **self._out()).lower(state).compile()
            )
            found |= self._compile_movers()
        return found

    def _compile_movers(self) -> dict[str, Any]:
        """One program for all layers whose experts have the same shapes."""
        found: dict[str, Any] = {}
        for moe in expert_slots.moe_layers(self._params):
            weights, index = (moe.gate_up, moe.down), jax.ShapeDtypeStruct((), jnp.int32)
            if moe.copies is None or _mover(weights) in found:
                continue
            assert self._on.mesh is not None, "slots are those of a mesh"
            table = jax.ShapeDtypeStruct(moe.copies.shape, moe.copies.dtype)
            out = jax.tree.map(lambda a: a.sharding, weights), self._everywhere
            run = _named(partial(expert_slots.move, mesh=self._on.mesh), "move_expert")
            jitted = jax.jit(run, donate_argnums=0, out_shardings=out)
            found[_mover(weights)] = jitted.lower(weights, table, index, index).compile()
        return found


def _program(key: Key) -> Key:
    """The executable that a key names."""
    return key.program if isinstance(key, StepKey) else key


def _mover(weights: Any) -> str:
    """The name of the program that moves experts of these shapes."""
    return f"move_expert {[(a.shape, a.dtype.name) for a in jax.tree.leaves(weights)]}"


def _flush(params: Params, state: State, *, drafter: Drafter, on: Backend) -> tuple[State, Int[Array, ""]]:
    """The state is given on to other programs, so something else must say when this one has run."""
    return flush(params, state, drafter=drafter, on=on), jnp.zeros((), jnp.int32)


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
