"""Seconds of launches: steps as the table has them, chunks of prompts beside them."""

from dataclasses import replace

import pytest

from mtp_jax.lab.planning.deployment import Deployment
from mtp_jax.lab.planning.hardware import GPUS
from mtp_jax.lab.planning.launch_time import LaunchTimes, LaunchWork
from mtp_jax.lab.planning.prefill import prompt_tokens_per_second
from mtp_jax.lab.planning.releases import DEEPSEEK_V3
from mtp_jax.lab.planning.step_time import band
from mtp_jax.lab.planning.weights import Storage

BASE = Deployment(DEEPSEEK_V3, Storage.of(DEEPSEEK_V3), GPUS["h200"], 8, exchange="gather")


@pytest.mark.parametrize(("slots", "depth", "context"), [(1, 0, 64), (64, 3, 4096)])
def test_a_step_without_a_chunk_is_that_of_the_table(slots, depth, context):
    usual, lean = band(replace(BASE, requests=slots, depth=depth, context=context)).seconds
    work = LaunchWork(slots, depth, context)
    assert LaunchTimes(BASE, "usual").launch(work) == pytest.approx(usual)
    assert LaunchTimes(BASE, "lean").launch(work) == pytest.approx(lean)
    assert LaunchTimes(BASE).launch(work) == pytest.approx((usual * lean) ** 0.5)


@pytest.mark.parametrize("mesh", [(8, 1), (1, 8)])
def test_a_large_chunk_takes_the_time_of_its_prompts_and_a_small_one_that_of_the_weights(mesh):
    base = replace(BASE, data=mesh[0], model=mesh[1])
    times = LaunchTimes(base, "lean")
    rows, seen = 16384, 8192
    rate = prompt_tokens_per_second(base, seen)[1]
    assert times.launch(LaunchWork(0, prompts=rows, seen=seen)) == pytest.approx(rows / mesh[1] / rate)
    # 16 rows in each group are a pass as of 16 slots there, whose caches are empty.
    assert times.launch(LaunchWork(0, prompts=16, seen=8)) == pytest.approx(
        times.launch(LaunchWork(16 * mesh[0], context=1))
    )


def test_windows_beside_a_chunk_read_the_weights_once():
    times = LaunchTimes(BASE)
    windows, chunk = LaunchWork(64, 3, 4096), LaunchWork(0, prompts=64, seen=32)
    both = times.launch(LaunchWork(64, 3, 4096, 64, 32))
    assert max(map(times.launch, (windows, chunk))) < both < 0.7 * sum(map(times.launch, (windows, chunk)))
    far = times.launch(LaunchWork(64, 3, 4096, 64, 200_000))  # a chunk behind 200,000 tokens attends to them
    assert far > 2 * both


def test_a_prompt_attends_to_half_of_itself_on_average():
    d = replace(BASE, context=4096)
    assert prompt_tokens_per_second(d) == prompt_tokens_per_second(d, 2048)
    assert prompt_tokens_per_second(d, 4096)[0] < prompt_tokens_per_second(d)[0]


def test_deferred_entries_take_little():
    times = LaunchTimes(BASE)
    assert 0 < times.flush(64, 16) < 0.05 * times.launch(LaunchWork(64, 0, 4096))
