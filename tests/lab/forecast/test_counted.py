"""The device that counts: the work that its launches are timed by, and what it refuses."""

from typing import Any

import numpy as np
import pytest

from mtp_jax.decode.launches import ReadPages
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.lab.forecast.counted import Counted
from mtp_jax.lab.planning.launch_time import LaunchWork
from tests.models import TINY, engine_config


class Noted:
    """Times that take note of the work."""

    def __init__(self) -> None:
        self.works: list[LaunchWork] = []

    def launch(self, work: LaunchWork) -> float:
        self.works.append(work)
        return 1.0

    def flush(self, slots: int, steps: int) -> float:
        return 0.0


def on_counted(keep: float = 0.0, shards: int = 1, **config: Any) -> tuple[Engine, list[LaunchWork]]:
    sizes, times = engine_config(**{"num_speculative_tokens": 0, **config}), Noted()
    shares = np.full((8, sizes.num_speculative_tokens), keep)
    device = Counted(times, shares, slots=sizes.max_num_seqs, page_size=sizes.page_size, shards=shards)
    engine = Engine(TINY, sizes, device)
    first, rest = engine.warm_up_keys()
    device.compile([*first, *rest])
    return engine, times.works


def submit(engine: Engine, prompt: int, number: int = 0, **params: Any):
    options = SamplingParams(**{"temperature": 0, "ignore_eos": True, "max_tokens": 8, **params})
    request = engine.make_request([number] * prompt, options, seed=number)
    engine.submit(request)
    return request


def test_a_chunk_attends_to_the_tokens_before_it_and_to_half_of_itself():
    engine, works = on_counted()
    submit(engine, 40, max_tokens=1)
    while engine.busy:
        engine.step()
    # 16 tokens each, after 0, 16 and 32 tokens, in pages of 16.
    assert works == [LaunchWork(0, 0, 0, 16, seen) for seen in (16, 32, 48)]


def test_windows_read_the_whole_pages_of_the_busiest_shard():
    engine, works = on_counted(shards=2)
    long, short = submit(engine, 40, 1), submit(engine, 26, 2)
    while not (long.progress.output and short.progress.output):
        engine.step()
    engine.step()
    # About 42 rows in two slots; the other shard has about 28.
    assert works[-1] == LaunchWork(4, 0, 32)
    engine.abort(long)
    engine.step()
    assert works[-1] == LaunchWork(4, 0, 16)


def test_a_request_may_have_fewer_drafts():
    engine, _ = on_counted(1.0, num_speculative_tokens=3)
    requests = [submit(engine, 5, n, num_speculative_tokens=n) for n in (1, 3)]
    while engine.busy:
        engine.step()
    assert [set(r.progress.speculation.accepted_per_step) for r in requests] == [{1}, {3}]
    assert [len(r.progress.output) for r in requests] == [8, 8]


def test_pages_have_no_contents():
    engine, _ = on_counted()
    with pytest.raises(TypeError, match="a device that counts has no ReadPages"):
        engine.runner.do(ReadPages(0, (0,)))
