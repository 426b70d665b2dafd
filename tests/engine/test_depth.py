"""Adaptive depth: the choice is the fastest by what was measured, and any choice gives the same tokens."""

import itertools
from statistics import mode

import pytest

from mtp_jax.decode.keys import SamplingMode, StepKey
from mtp_jax.engine.depth import Acceptance, DepthController, StepCosts, adaptive_depths
from mtp_jax.engine.request import SamplingParams
from tests.models import GREEDY, Reference, accepted, make_engine, prompts, serve, tiny_params


def key(depth: int, slots: int = 1) -> StepKey:
    return StepKey(slots, depth, 4, SamplingMode())


def run(controller: DepthController, cost, held: float, steps: int, slots: int = 1) -> list[int]:
    """Depths chosen. ``cost(depth)`` in seconds; ``held``: the share of drafts that hold, evenly."""
    keys, chosen, due = [key(d, slots) for d in (0, 1, 3)], [], 0.0
    for _ in range(steps):
        best = controller.choose(keys, [3] * slots)
        chosen.append(best.depth)
        rows = []
        for _ in range(slots):
            count = 0
            while count < best.depth:
                due += held
                if due < 1:
                    break
                due -= 1
                count += 1
            rows.append(count)
        controller.learn(best, cost(best.depth), [3] * slots, [(best.depth, n, n + 1) for n in rows])
    return chosen


@pytest.mark.parametrize(
    ("most", "depths"), [(0, (0,)), (1, (0, 1)), (2, (0, 1, 2)), (3, (0, 1, 3)), (6, (0, 1, 3, 5, 6))]
)
def test_adaptive_depths(most, depths):
    assert adaptive_depths(most) == depths


@pytest.mark.parametrize(
    ("cost", "held", "best"),
    [
        (lambda d: 1.0, 0.7, 3),  # drafts are free
        (lambda d: 1.0 + d, 0.7, 0),  # a draft costs a whole step
        (lambda d: 1.0 + 0.3 * d, 0.05, 0),  # hardly any is accepted
        (lambda d: (1.0, 1.3, 2.9)[(0, 1, 3).index(d)], 0.7, 1),
    ],
)
def test_the_fastest_depth_wins(cost, held, best):
    chosen = run(DepthController(3), cost, held, 600)
    # A few steps of each at first, then looks: one step in twenty at a close rival, fewer the more they lose.
    assert chosen[-90:].count(best) >= 82
    assert sum(d != best for d in chosen) < 60
    rates = {d: (1 + sum(held**i for i in range(1, d + 1))) / cost(d) for d in (0, 1, 3)}
    lost = sum((1 - rates[d] / rates[best]) * cost(d) for d in chosen[-300:])
    assert lost < 0.015 * sum(map(cost, chosen[-300:]))


def test_a_drafter_that_recovers_is_noticed():
    controller = DepthController(3)
    costs = lambda d: 1.0 + 0.2 * d  # noqa: E731
    assert run(controller, costs, 0.0, 600)[-100:].count(0) >= 97
    assert run(controller, costs, 0.9, 600)[-100:].count(3) >= 94


def test_rows_count_with_the_depth_they_ask_for():
    controller = DepthController(3)
    for depth, seconds in ((0, 1.0), (1, 1.4), (3, 1.8)):
        for _ in range(3):
            controller.costs.ran(key(depth), seconds)
    for _ in range(50):
        controller.acceptance.add([3], [2])
    assert controller.choose([key(d) for d in (0, 1, 3)], [3]).depth == 3
    assert controller.choose([key(d) for d in (0, 1, 3)], [1]).depth == 1
    assert controller.choose([key(d) for d in (0, 1, 3)], [0]).depth == 0


def test_what_a_rehearsal_showed_to_lose_is_not_tried():
    """With many rows every draft is as dear as a token: nothing is gained even if all of them hold."""
    controller = DepthController(3)
    for depth in (0, 1, 3):
        for _ in range(2):
            controller.costs.ran(key(depth, 64), 1.0 + depth)
    assert set(run(controller, lambda d: 1.0 + d, 0.9, 30, slots=64)) == {0}


@pytest.mark.parametrize(("slots", "gain", "best"), [(1, 1.1, 3), (2, 1.4, 3), (8, 1.2, 0), (8, 1.7, 3)])
def test_many_rows_draft_only_for_a_clear_gain(slots, gain, best):
    """They then end apart. ``gain``: of tokens per second, in steps of depth 3; every draft holds."""
    chosen = run(DepthController(3), lambda d: 4 / gain if d == 3 else d + 1.0, 1.0, 300, slots)
    assert chosen[-90:].count(best) >= 80


def test_a_depth_that_is_hardly_better_is_not_changed_to():
    """Each change costs steps: what is best stays so within a twentieth. Here all drafts hold."""
    controller, keys = DepthController(3), [key(0), key(3)]
    for _ in range(200):
        controller.acceptance.add([3], [3])

    def mostly(seconds: float) -> int:
        """With steps of depth 3 that take so long, and of depth 0 a second."""
        for _ in range(64):
            controller.costs.rehearsed(key(0), 1.0)
            controller.costs.rehearsed(key(3), seconds)
        return mode(controller.choose(keys, [3]).depth for _ in range(15))

    assert [mostly(s) for s in (5.0, 3.9, 3.5, 4.1, 4.5)] == [0, 0, 3, 3, 0]


def test_a_rehearsal_measures_every_depth():
    engine = make_engine(adaptive_depth=True)
    request = engine.make_request(prompts(1)[0], GREEDY)
    engine.prepare([request])
    steps = [k for k in engine.runner.keys if isinstance(k, StepKey)]
    assert {k.depth for k in steps} == {0, 1, 3}
    assert all(engine.depth.costs.known(k) and engine.depth.costs.seconds(k) > 0 for k in steps)


def test_what_is_cut_off_does_not_count():
    """Two of three accepted drafts fall behind the end of their rows: depth 3 is not worth 2.5 steps."""
    costs = {0: 1.0, 3: 2.5}
    for emitted, best in ((4, 3), (2, 0)):
        controller = DepthController(3)
        for _ in range(100):
            for depth in costs:
                controller.learn(key(depth), costs[depth], [3], [(depth, depth, min(depth + 1, emitted))])
        assert controller.choose([key(0), key(3)], [3]).depth == best


def test_unlucky_drafts_do_not_count_as_cut_off():
    """They are in the acceptance already: a depth that was unlucky once is as good as its acceptance says."""
    controller = DepthController(3)
    for _ in range(4):
        controller.costs.ran(key(0), 1.0)
        controller.learn(key(3), 3.0, [3], [(3, 0, 1)])
    for _ in range(200):
        controller.acceptance.add([3], [3])
    assert controller.choose([key(0), key(3)], [3]).depth == 3


def test_what_was_measured_in_a_slow_moment_is_soon_measured_again():
    """The steps after a prefill are slower: the depth that ran then must not stay behind."""
    controller = DepthController(3)
    for depth, seconds in ((0, 1.0), (1, 1.4), (3, 2.8)):
        for _ in range(5):
            controller.costs.ran(key(depth), seconds)
    chosen = run(controller, lambda d: 1.0 + 0.2 * d, 0.9, 200)
    assert chosen[0] != 3
    first = chosen.index(3)
    assert chosen[first : first + 20].count(3) >= 16
    assert chosen[-50:].count(3) >= 46


def test_a_depth_is_not_judged_by_its_first_steps_after_another():
    """A look at depth 0 while depth 3 runs is slow, for what depth 3 does to caches; depth 0 alone is not."""
    costs = StepCosts()
    for depth, seconds in ((0, 1.0), (3, 3.0)):
        for _ in range(2):
            costs.ran(key(depth), seconds)
    for _ in range(20):
        for _ in range(30):
            costs.ran(key(3), 3.0)
        costs.ran(key(0), 1.4)
    assert costs.seconds(key(0)) == 1.0
    for _ in range(20):
        costs.ran(key(0), 1.2)
    assert costs.seconds(key(0)) == pytest.approx(1.2)


def test_how_much_slower_first_steps_are_is_seen():
    """Depth 0 takes 1.5 after deeper steps, and 1.0 alone: from then on looks at it are read so."""
    costs = StepCosts()
    for _ in range(2):
        costs.ran(key(3, 8), 3.0)
    for i in range(40):
        costs.ran(key(0, 8), max(1.5 - i / 20, 1.0))
    assert costs.seconds(key(0, 8)) == pytest.approx(1.0)
    # The machine is faster now, as the looks show.
    for _ in range(10):
        costs.ran(key(3, 8), 1.5)
        costs.ran(key(0, 8), 0.75)
    assert costs.seconds(key(0, 8)) == pytest.approx(0.75 / 1.4)


@pytest.mark.parametrize(("slots", "share"), [(1, 1.0), (8, 0.8)])
def test_depth_0_gets_the_benefit_of_the_doubt_with_several_rows(slots, share):
    """Seen behind deeper steps only; a rehearsal runs it behind its like."""
    costs, rehearsed = StepCosts(), StepCosts()
    for _ in range(2):
        for depth, seconds in ((3, 3.0), (0, 1.0)):
            costs.ran(key(depth, slots), seconds)
            rehearsed.rehearsed(key(depth, slots), seconds)
    assert [c.seconds(key(0, slots)) for c in (costs, rehearsed)] == [share, 1.0]
    assert [c.seconds(key(3, slots)) for c in (costs, rehearsed)] == [3.0, 3.0]


def test_what_else_runs_on_the_machine_does_not_count():
    """It makes steps slower, never faster, and for many in a row."""
    costs = StepCosts()
    for i in range(640):
        costs.ran(key(0), 1.4 if i // 20 % 2 else 1.0)
        assert i < 20 or costs.seconds(key(0)) == 1.0
    for _ in range(64):
        costs.ran(key(0), 1.4)
    assert costs.seconds(key(0)) == 1.4


@pytest.mark.parametrize(
    ("depth", "rehearsed", "ran", "believed"),
    [(3, 1.0, 4.0, 4.0), (3, 3.0, 2.0, 2.0), (0, 1.0, 4.0, 0.6 * 0.8 * 4.0), (0, 3.0, 2.0, 0.8 * 2.0)],
)
def test_a_rehearsal_that_was_wrong_is_corrected_even_if_nothing_settles(depth, rehearsed, ran, believed):
    """Going deeper costs nothing on top: it is believed at once; the other way as far as it must be."""
    costs = StepCosts()
    for d in (0, 3):
        for _ in range(2):
            costs.rehearsed(key(d, 8), rehearsed)
    for _ in range(10):
        for d in (0, 3):
            costs.ran(key(d, 8), ran if d == depth else rehearsed)
    assert costs.seconds(key(depth, 8)) == pytest.approx(believed)


def test_expected_tokens():
    acceptance = Acceptance(3)
    for _ in range(400):
        acceptance.add([3, 3, 1, 0], [3, 1, 0, 0])
    # Position 1: two of three; position 2: one of two that got there; position 3: the one that did.
    assert acceptance.tokens() == pytest.approx([1, 1 + 2 / 3, 2, 2 + 1 / 3], abs=0.01)


def test_a_position_that_is_never_reached_keeps_its_rate():
    acceptance = Acceptance(3)
    for _ in range(2500):  # its weight is halved each time
        for _ in range(40):
            acceptance.add([0], [0])
        acceptance.add([3], [0])
    assert acceptance.tokens() == pytest.approx([1, 1, 1, 1], abs=0.01)
    for _ in range(20):
        acceptance.add([3], [3])
    assert acceptance.tokens()[3] > 3


def test_adaptive_steps_give_the_tokens_of_depth_0(monkeypatch):
    reference = Reference(tiny_params())
    engine = make_engine(adaptive_depth=True, max_model_len=128)
    turn = itertools.count()

    def in_turn(keys, _):
        """Every depth in turn, whatever it costs here."""
        return sorted(keys, key=lambda k: k.depth)[next(turn) % len(keys)]

    monkeypatch.setattr(engine.depth, "choose", in_turn)
    jobs = [(p, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)) for p in prompts(3)]
    requests = serve(engine, jobs)
    stats = engine.stats()
    assert set(stats.depth_steps) == {0, 1, 3}
    assert [r.output for r in requests] == [reference.speculate(p, 60).ids for p, _ in jobs]
    assert sum(sum(accepted(r)) for r in requests) == stats.accepted_tokens > 0
    assert stats.draft_tokens == sum(r.speculation.drafted for r in requests)


@pytest.mark.parametrize(
    ("wanted", "depths", "drafted"),
    [
        ({"temperature": 1.0, "seed": 3}, {3}, 3),  # a seed promises the same tokens again
        ({"temperature": 0, "seed": 3}, {0, 1, 3}, 3),
        ({"temperature": 0, "num_speculative_tokens": 1}, {1, 3}, 1),
        ({"temperature": 0, "num_speculative_tokens": 0}, {0}, 0),
    ],
)
def test_a_request_may_fix_its_depth(wanted, depths, drafted):
    engine = make_engine(adaptive_depth=True)
    params = SamplingParams(max_tokens=40, ignore_eos=True, **wanted)
    (request,) = serve(engine, [(prompts(1)[0], params)])
    assert set(engine.stats().depth_steps) <= depths
    assert max(request.speculation.drafted_per_step) == drafted


@pytest.mark.parametrize("most", [2, 3])
def test_no_drafts_for_tokens_that_cannot_come(most):
    """The first token is the prefill's, and the last needs no draft, even where drafts are free."""
    engine = make_engine(adaptive_depth=True)
    engine.depth.costs.seconds = lambda key: 1.0
    (request,) = serve(engine, [(prompts(1)[0], SamplingParams(temperature=0, max_tokens=most))])
    assert len(request.output) == most
    assert max(engine.stats().depth_steps) == most - 2


def test_many_rows_are_looked_at_less_often():
    """They end apart after a look at a deeper one."""
    looks = {}
    for slots in (1, 64):
        chosen = run(DepthController(3), lambda d: 1.0 + 0.5 * d, 0.3, 1200, slots)
        assert chosen[-200:].count(0) >= 180
        looks[slots] = len(chosen[200:]) - chosen[200:].count(0)
    assert 0 < looks[64] < looks[1] / 2


def test_fixed_depth_is_the_default():
    engine = make_engine()
    serve(engine, [(p, GREEDY) for p in prompts(2)])
    assert set(engine.stats().depth_steps) == {3}
