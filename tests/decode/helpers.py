"""Compilations that a test causes, cache rows that nothing may read, and drafters that lie."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.decode.drafter.protocol import Drafts
from mtp_jax.decode.drafter.suffix import SuffixPages
from mtp_jax.decode.state import DrafterState, Slots, State
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request, Status


def leaking(kind: Any) -> Any:
    """A drafter that says of its drafts that a quarter of their law lies outside of its own vocabulary."""

    class Leaking(kind):
        def propose(self, *given: Any) -> tuple[Drafts, DrafterState]:
            drafts, own = super().propose(*given)
            return drafts.replace(probs=0.75 * drafts.probs), own

    return Leaking


def zeroed(abstract: Any) -> Any:
    """A state of zeros in host memory: nothing is compiled for the shape of an array."""
    return jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), abstract)


@pytest.fixture
def compilations():
    """The names of compilation events since the fixture began."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        del duration_secs
        if "/compile/" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def rows_in_use(engine: Engine, slots: Slots) -> np.ndarray:
    """Bool [P, S]: cache rows that hold committed tokens."""
    pages, size, _ = jax.tree.leaves(local_runner(engine).state.trunk)[0].shape
    used = np.zeros((pages, size), bool)
    for i, request in enumerate(engine.scheduler.slots):
        prefilling = request is not None and request.status is Status.PREFILL
        if prefilling or slots.active[i]:
            rows = np.arange(int(slots.length[i]))
            used[np.asarray(slots.page_table)[i, rows // size], rows % size] = True
    return used


def poison(engine: Engine) -> None:
    """NaN into every cache row that is not committed, every free page, every unused pending state.

    What a suffix drafter keeps there becomes token 2**30.
    """
    runner = local_runner(engine)
    state = runner.state
    slots: Slots = jax.tree.map(np.asarray, state.slots)

    def spoil(pages: jax.Array, used: np.ndarray) -> jax.Array:
        return jnp.asarray(np.where(used[..., None], np.asarray(pages), np.nan).astype(pages.dtype))

    def waits(request: Request | None) -> bool:
        return request is None or (request.status is Status.PREFILL and request.residence.prefilled == 0)

    idle = np.array([waits(r) for r in engine.scheduler.slots]) & ~slots.active
    used = rows_in_use(engine, slots)
    own, kept = state.drafter.slots, state.drafter.pages
    pages = kept.other if isinstance(kept, SuffixPages) else kept
    pending = jnp.where(jnp.asarray(idle)[:, None, None], jnp.nan, own.pending)
    cache = jax.tree.map(lambda p: spoil(p, used), pages.cache)
    pages = pages.replace(cache=cache, boundary=jnp.full_like(pages.boundary, jnp.nan))
    if isinstance(kept, SuffixPages):
        pages = SuffixPages(jnp.where(jnp.asarray(used)[..., None], kept.tokens, 2**30), pages)
    drafter = DrafterState(own.replace(pending=pending), pages)
    trunk = jax.tree.map(lambda p: spoil(p, used), state.trunk)
    runner.state = State(trunk, state.slots, drafter)
