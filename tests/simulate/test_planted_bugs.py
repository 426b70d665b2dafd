"""The histories find a bug wherever it is planted: else they would prove nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mtp_jax.decode.launches import Admit, DeviceRunner, Move, Runner, StepLaunch, Update, WritePages
from mtp_jax.engine import scheduler as scheduling
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.pages import PagePool
from mtp_jax.engine.request import Residence
from mtp_jax.engine.results import Launched
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.simulate.device import Simulated
from mtp_jax.simulate.memory import SlotMemory
from mtp_jax.store.tier import HostTier
from mtp_jax.text.grammar import Grammars, Matcher
from tests.simulate.histories import HISTORIES, LAUNCHES, History

Plant = Callable[[pytest.MonkeyPatch], object]
BUGS: dict[str, Plant] = {}
# Histories with all that the bugs concern come first, so that nearly all of the others need not run.
SEEDS = [*dict.fromkeys([1, 4, 6, 7, *range(HISTORIES)])]


def bug(plant: Plant) -> Plant:
    """Register a planted bug, named after its function."""
    BUGS[plant.__name__] = plant
    return plant


def changed(patch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Have runners do ``change(launch)`` for each launch; None: nothing."""
    do = Runner.do

    def wrong(self: Runner, launch: Any, masks: Any = None) -> Any:
        made = change(launch)
        return do(self, made, masks) if made is not None else None

    patch.setattr(Runner, "do", wrong)


@bug
def pages_that_somebody_shares_are_freed(patch):
    def share(self: PagePool, pages: Any) -> None:
        for page in pages:
            self._users[page] = max(self._users[page], 1)
            self._idle.pop(page, None)

    patch.setattr(PagePool, "share", share)


@bug
def a_page_is_freed_twice(patch):
    allocate = PagePool.allocate

    def twice(self: PagePool, count: int) -> Any:
        found = allocate(self, count)
        if found:
            self._free.append(found[-1])
        return found

    patch.setattr(PagePool, "allocate", twice)


@bug
def the_page_table_is_not_renewed(patch):
    changed(patch, lambda launch: None if isinstance(launch, Update) else launch)


@bug
def a_page_is_registered_a_row_too_early(patch):
    rows = Launched.complete_rows
    patch.setattr(Launched, "complete_rows", lambda self, row, request: rows(self, row, request) + 1)


@bug
def a_digest_leaves_out_the_pages_before(patch):
    extend = scheduling.extend_digests

    def alone(digests: list[bytes], salt: str, tokens: Any, size: int) -> None:
        for i in range(len(digests), len(tokens) // size):
            found: list[bytes] = []
            extend(found, salt, tokens[i * size : (i + 1) * size], size)
            digests += found

    patch.setattr(scheduling, "extend_digests", alone)


@bug
def the_boundary_state_is_not_restored(patch):
    changed(patch, lambda x: replace(x, page=None) if isinstance(x, Admit) else x)


@bug
def a_page_of_the_host_comes_back_without_its_boundary_state(patch):
    def without(launch: Any) -> Any:
        if not isinstance(launch, WritePages):
            return launch
        return replace(launch, data=(*launch.data[:-1], 0 * launch.data[-1]))

    changed(patch, without)


@bug
def a_flush_is_forgotten_before_what_is_no_step(patch):
    flushed, do = DeviceRunner.flushed, DeviceRunner._do

    def only_steps(self: DeviceRunner, launch: Any, masks: Any) -> Any:
        patch.setattr(
            DeviceRunner, "flushed", flushed if isinstance(launch, StepLaunch) else lambda self: None
        )
        return do(self, launch, masks)

    patch.setattr(DeviceRunner, "_do", only_steps)


@bug
def evicted_pages_are_read_after_the_write(patch):
    def late(self: Runner, launch: Any, masks: Any = None) -> Any:
        pending = self._do(launch, masks)
        for read in self.before_writing if launch.writes else ():
            read()
        return pending

    patch.setattr(Runner, "do", late)


@bug
def pages_of_the_host_are_written_in_another_order(patch):
    changed(patch, lambda x: replace(x, pages=x.pages[::-1]) if isinstance(x, WritePages) else x)


@bug
def a_resumed_request_may_emit_max_tokens_anew(patch):
    def anew(launch: Any) -> Any:
        if not isinstance(launch, Admit):
            return launch
        return replace(launch, row=replace(launch.row, remaining=launch.row.remaining + launch.row.generated))

    changed(patch, anew)


@bug
def tokens_after_the_end_reach_the_output(patch):
    def stops_late(self: Simulated, number: int, row: Any, page: Any) -> None:
        admit(self, number, row, page)
        self._slots[number].sampling = replace(row.sampling, stop_mask=row.sampling.stop_mask & False)

    admit = Simulated._admit
    patch.setattr(Simulated, "_admit", stops_late)


@bug
def a_resumed_request_has_its_newest_token_twice(patch):
    def twice(self: Residence, prompt: Any, output: Any) -> None:
        self.tokens, self.follows = (*prompt, *output), output[-1] if output else -1

    patch.setattr(Residence, "take_up", twice)


@bug
def cached_pages_outlive_their_weights(patch):
    patch.setattr(PagePool, "forget", lambda self, pages=None: None)


@bug
def pages_of_the_host_outlive_their_weights(patch):
    patch.setattr(HostTier, "forget", lambda self, digests=None: None)


@bug
def a_request_moves_on_the_host_alone(patch):
    changed(patch, lambda launch: None if isinstance(launch, Move) else launch)


@bug
def a_grammar_is_not_told_what_was_emitted(patch):
    patch.setattr(Matcher, "advance", lambda self, tokens: None)


@bug
def a_step_gets_a_page_too_few(patch):
    needed = EngineConfig.pages_for_step
    patch.setattr(EngineConfig, "pages_for_step", lambda self, rows, *rest: needed(self, rows - 1, *rest))


@bug
def an_aborted_request_goes_on(patch):
    release = Scheduler.release
    patch.setattr(Scheduler, "release", lambda self, request, known=True: release(self, request))


@bug
def the_length_is_off_by_one_after_a_prompt(patch):
    begin = Simulated._begin

    def shorter(self: Simulated, slot: Any, token: int, row: Any) -> None:
        begin(self, slot, token, row)
        slot.length -= 1

    patch.setattr(Simulated, "_begin", shorter)


@bug
def a_drafter_misses_the_tokens_of_prompts(patch):
    commit = SlotMemory.commit

    def some(self: SlotMemory, number: int, rows: Any, hidden: Any, defer: bool) -> None:
        commit(
            self,
            number,
            rows[-1:] if len(rows) > 8 else rows,
            hidden[-1:] if len(rows) > 8 else hidden,
            defer,
        )

    patch.setattr(SlotMemory, "commit", some)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, grammars: Grammars, monkeypatch: pytest.MonkeyPatch):
    """Within the histories that the suite runs. Without the bug they find nothing (``test_histories.py``)."""
    BUGS[name](monkeypatch)
    for seed in SEEDS:
        try:
            History(seed, grammars).run(LAUNCHES)
        except Exception as error:
            print(f"seed {seed}: {error!r:.300}")
            return
    raise AssertionError(f"{HISTORIES} histories did not find it")
