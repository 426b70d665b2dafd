"""Placements of experts: balanced, reached by copies that never lose an expert."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_jax.model.placement import aligned, copies_of, first_placement, imbalance, moves, place

# Devices, redundant experts; the imbalance of 256 experts as numbered, at least, and placed, at most: means
# of twenty draws.
CASES = [(8, 0, 1.2, 1.01), (16, 32, None, 1.01), (64, 64, 3.0, 1.1), (144, 32, None, 1.4)]


@pytest.mark.parametrize(("devices", "redundant", "before", "after"), CASES)
def test_skewed_load_is_balanced(devices, redundant, before, after):
    """Log-normal load; without redundant experts on 64 devices it would stay at 3.0."""
    rng = np.random.default_rng(0)
    loads, slots = [rng.lognormal(0, 1, 256) for _ in range(20)], 256 + redundant
    placed = [place(load, slots, devices) for load in loads]
    assert np.mean([imbalance(p, x, devices) for p, x in zip(placed, loads, strict=True)]) < after
    if before:
        plain = np.mean([imbalance(np.arange(256), x, devices) for x in loads])
        assert plain > before


def test_few_copies_are_allowed_for():
    load = np.ones(8)
    load[3] = 100
    assert np.bincount(place(load, 16, 4, width=3))[3] == 3
    assert np.bincount(place(load, 16, 4))[3] == 9


def test_groups_stay_on_a_node():
    """Eight groups of four experts on two nodes of two devices."""
    load = np.random.default_rng(1).lognormal(0, 1, 32)
    placed = place(load, 40, 4, nodes=2, groups=8)
    on = [{*(part // 4).tolist()} for part in placed.reshape(2, 20)]
    assert on[0] | on[1] == {*range(8)}
    assert not on[0] & on[1]
    assert {*placed.tolist()} == {*range(32)}
    # Three nodes do not divide eight groups: any expert may lie anywhere.
    assert {*place(load, 48, 6, nodes=3, groups=8).tolist()} == {*range(32)}


def test_without_load_nothing_is_uneven():
    assert imbalance(np.arange(8), np.zeros(8), 4) == 1.0


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    devices=st.sampled_from([1, 2, 4]),
    nodes=st.sampled_from([1, 2]),
    redundant=st.sampled_from([4, 8]),
)
def test_every_expert_has_a_copy_at_any_time(seed, devices, nodes, redundant):
    rng, experts = np.random.default_rng(seed), 16
    nodes = min(nodes, devices)
    slots = experts + redundant
    now = rng.permutation(first_placement(experts, slots))
    load = rng.lognormal(0, 2, experts)
    wanted = place(load, slots, devices, nodes, groups=4)
    goal = aligned(wanted, now, devices, nodes)
    assert imbalance(goal, load, devices) == pytest.approx(imbalance(wanted, load, devices))
    placed = now.copy()
    for count, (source, target) in enumerate(moves(now, goal)):
        placed[target] = placed[source]
        assert {*placed.tolist()} == {*range(experts)}
        assert count < 3 * slots
    assert (placed == goal).all()
    table = copies_of(placed, experts, slots)
    for expert, found in enumerate(table):
        held = found[found >= 0]
        assert (placed[held] == expert).all()
        assert len(held) == (placed == expert).sum()
    assert copies_of(placed, experts, 1).shape == (experts, 1)


def test_a_cycle_is_broken_by_a_copy_that_can_be_spared():
    """Experts 0 and 1 change places; expert 2 has two copies, both where they belong."""
    now, goal = np.array([0, 1, 2, 2]), np.array([1, 0, 2, 2])
    assert [*moves(now, goal)] == [(0, 2), (1, 0), (2, 1), (3, 2)]
    with pytest.raises(ValueError, match="give redundant experts"):
        next(moves(np.array([0, 1]), np.array([1, 0])))


def test_devices_are_renumbered_so_that_nothing_moves():
    now = np.array([0, 1, 2, 3, 4, 5, 0, 1])
    assert (aligned(np.array([3, 2, 1, 0, 5, 4, 1, 0]), now, 4) == now).all()
