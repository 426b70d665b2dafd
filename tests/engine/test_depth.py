"""Adaptive depth is near the best fixed depth in every simulated world; any choice gives the same tokens."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from statistics import mean

import pytest

from mtp_jax.decode.keys import SamplingMode, StepKey, TreeShape
from mtp_jax.engine.depth import DepthController, Yield
from mtp_jax.engine.depth_policy import DepthPolicy, DepthRow, adaptive_depths
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.step_costs import Costs
from tests.engine.answers import DRAFTS, MACHINES, MISTAKES, Engine, adaptive, anything, first_answers
from tests.engine.device import on_device
from tests.engine.plain import text, widest
from tests.engine.worlds import (
    MOST,
    SEEDS,
    WORLDS,
    Fixed,
    Key,
    keys_of,
    mean_of,
    scores,
)
from tests.models import GREEDY, accepted, finish, prompts, serve

WORST, MEAN = 0.95, 1.0
FEW = SEEDS[4:6]  # the latter misleads a controller that never probes
rest, slow = pytest.mark.rest, pytest.mark.slow
FIRST = ("batch 1, drafts pay", "batch 1, drafts do not pay")
some_and_all = pytest.mark.parametrize(
    "seeds", [FEW, pytest.param(SEEDS, marks=pytest.mark.slow)], ids=lambda seeds: f"{len(seeds)} seeds"
)


@some_and_all
@pytest.mark.parametrize("world", [w if w in FIRST else pytest.param(w, marks=rest) for w in WORLDS])
def test_near_the_best_fixed_depth(world, seeds):
    assert min(scores(adaptive, world, seeds)) >= WORST


@rest
@some_and_all
def test_as_fast_as_the_best_fixed_depths_on_average(seeds):
    """Each world's best depth is known in hindsight only; worlds that change pay for the probes."""
    assert mean_of(scores(adaptive, world, seeds) for world in WORLDS) >= MEAN


class Anyhow(Fixed):
    """A depth at random."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def choose(self, keys: Sequence[Key], depths: Sequence[int], price: float | None = None) -> Key:
        return self.random.choice(keys)


class PerSecond(DepthController):
    """Chooses by tokens per second beside prompt tokens, too."""

    def rate(self, keys, depths):
        return None


@pytest.mark.parametrize(
    ("broken", "world"),
    [
        (partial(Fixed, 0), "batch 1, drafts pay"),
        pytest.param(partial(Fixed, 1), "batch 1, drafts pay", marks=rest),
        (partial(Fixed, 3), "batch 1, drafts do not pay"),
        pytest.param(Anyhow, "batch 1, drafts pay", marks=rest),
        pytest.param(Anyhow, "batch 16, hopeless, spells", marks=rest),
        (partial(DepthController, MOST, DepthPolicy(budget=1)), "batch 1, drafts do not pay"),
        pytest.param(partial(PerSecond, MOST), "steps take prompts along, drafts never pay", marks=rest),
    ],
)
def test_the_bounds_notice_a_broken_controller(broken, world):
    assert min(scores(broken, world, FEW)) < WORST


@rest
def test_probes_find_costs_that_turn():
    idle = partial(DepthController, MOST, DepthPolicy(budget=0))
    assert min(scores(adaptive, "costs turn", FEW)) > 1.05 > max(scores(idle, "costs turn", FEW))


class OneProbe(DepthController):
    """Believes the first probe of a warm-up."""

    def warm_up(self, keys):
        return (key for key in keys for _ in range(self.policy.block))


class NoDoubt(Costs):
    """Mistakes the first steps with requests for the machine's pace: a planted bug."""

    def served(self, way):
        return self.known(way)


PROBE = "a probe 2 to 5 times as long"


@pytest.mark.parametrize(
    ("machine", "drafts", "mistake"),
    [
        ("FP8, AVX2", "all", PROBE),
        ("bfloat16, AVX2", "none", PROBE),
        ("windows nearly free", "all", PROBE),
        ("demo model", "0.85, 0.75, 0.65", "first calls 2 to 5 times as long"),
        *(pytest.param(machine, "0.7", PROBE, marks=rest) for machine in MACHINES),
        *(pytest.param(*case, marks=slow) for case in itertools.product(MACHINES, DRAFTS, ("right", PROBE))),
    ],
)
def test_a_first_answer_is_near_the_best_fixed_depth(machine, drafts, mistake):
    """Over 128 tokens, although nothing is known of the drafts and warm-up may have measured wrongly."""
    assert mean(first_answers(MACHINES[machine], DRAFTS[drafts], MISTAKES[mistake])) >= WORST


@rest
@pytest.mark.parametrize("mistake", [PROBE, *(pytest.param(m, marks=slow) for m in MISTAKES if m != PROBE)])
def test_a_first_answer_on_any_machine(mistake):
    """Curves of costs and chances at random; few of them lie at the border where every choice is a guess."""
    found = sorted(mean(first_answers(*anything(i), MISTAKES[mistake], range(3))) for i in range(100))
    assert mean(found) >= 0.96
    assert found[10] >= 0.93


def test_later_answers_and_other_batches_know_the_drafts():
    """Each batch has costs of its own, and the drafts of all teach both."""
    batches = {1: MACHINES["FP8, AVX2"], 4: MACHINES["bfloat16, AVX2"]}
    found = []
    for seed in range(8):
        engine = Engine(batches, MISTAKES[PROBE], seed, adaptive)
        found.append([engine.answer(DRAFTS["all"], slots) for slots in (1, 4, 1, 4)])
    assert min(map(mean, zip(*found, strict=True))) >= WORST


def test_the_first_answers_notice_a_broken_law(monkeypatch):
    def found(machine: str, drafts: str, make=adaptive, mistake: str = PROBE) -> float:
        return mean(first_answers(MACHINES[machine], DRAFTS[drafts], MISTAKES[mistake], range(8), make))

    hopeless = partial(DepthController, MOST, DepthPolicy(horizon=0))
    assert found("FP8, AVX2", "all", hopeless) < WORST
    assert found("demo model", "all", partial(OneProbe, MOST)) < WORST
    shallow = "a depth half as long over empty slots"
    assert found("demo model", "all", mistake=shallow) >= WORST
    monkeypatch.setattr("mtp_jax.engine.depth.Costs", NoDoubt)
    assert found("demo model", "all", mistake=shallow) < WORST


def test_nine_numbers():
    assert len(fields(DepthPolicy)) == 9


def key(depth: int, slots: int = 1, pages: int = 4) -> StepKey:
    return StepKey(slots, depth, pages, SamplingMode())


KEYS = [key(depth) for depth in (0, 1, 3)]


def told(
    seconds: dict[int, float], accepted: int = 3, emitted: int = 4, steps: int = 1000, budget: float = 0
) -> DepthController:
    """A controller that saw so many steps of each depth, with one row, and that probes nothing by itself.

    accepted, emitted: by the row, at most.
    """
    controller = DepthController(3, DepthPolicy(budget=budget, horizon=0))
    for depth in seconds:
        row = (depth, min(depth, accepted), min(depth + 1, accepted + 1, emitted))
        for _ in range(steps):
            controller.learn(key(depth), seconds[depth], [3], [row])
    return controller


@pytest.mark.parametrize(
    ("most", "depths"), [(0, (0,)), (1, (0, 1)), (2, (0, 1, 2)), (3, (0, 1, 3)), (6, (0, 1, 3, 5, 6))]
)
def test_adaptive_depths(most, depths):
    assert adaptive_depths(most) == depths


@pytest.mark.parametrize(
    ("most", "depths"), [(12, (0, 1, 3, 12)), (4, (0, 1, 3, 4)), (3, (0, 1, 3)), (2, (0, 1, 2)), (0, (0,))]
)
def test_between_chains_and_a_tree_there_is_nothing(most, depths):
    assert adaptive_depths(most, 3) == depths


@pytest.mark.parametrize(("seconds", "depth"), [(1.5, 12), (2.2, 3)])
def test_a_tree_is_chosen_where_it_pays(seconds, depth):
    """It makes 3 tokens, a chain 2.3: where its rows read more experts, a step takes too long for that."""
    costs, most = {0: 1.0, 3: 1.4, 12: seconds}, 12
    controller = DepthController(most, DepthPolicy(budget=0, horizon=0), TreeShape(4, 3, most))
    keys = [key(d) for d in costs]
    for depths in costs:
        for i in range(900):
            kept = {0: 0, 3: (0, 1, 3)[i % 3], 12: (1, 2, 3)[i % 3]}[depths]
            controller.learn(key(depths), costs[depths], [most], [(depths, kept, kept + 1)])
    assert controller.choose(keys, [most]).depth == depth


def test_trees_that_have_not_run_count_as_chains():
    found = Yield(12, DepthPolicy(), 3)
    assert (
        found.tokens(key(12), {12: 1})
        == found.tokens(key(3), {12: 1})
        == pytest.approx(1 + 0.7 + 0.49 + 0.343)
    )
    for _ in range(3000):
        found.add((12, 12), [12], [(12, 2, 3)])
    assert found.tokens(key(12), {12: 1}) == pytest.approx(3, abs=0.01)
    assert found.tokens(key(3), {12: 1}) == pytest.approx(1 + 0.7 + 0.49 + 0.343, abs=0.01)


def test_rows_count_with_the_depth_they_ask_for():
    controller = told({0: 1.0, 1: 1.4, 3: 1.8})
    assert [controller.choose(KEYS, [most]).depth for most in (3, 1, 0)] == [3, 1, 0]


def test_tokens_that_are_cut_off_do_not_count():
    """Two of three accepted drafts fall behind the end of their rows: depth 3 is not worth 2.5 steps."""
    assert told({0: 1.0, 3: 2.5}).choose([key(0), key(3)], [3]).depth == 3
    assert told({0: 1.0, 3: 2.5}, emitted=2).choose([key(0), key(3)], [3]).depth == 0


def test_a_step_for_a_row_that_had_ended_counts_as_cut_off():
    found = Yield(3, DepthPolicy())
    for _ in range(1000):
        found.add((3, 3), [3, 3], [(3, 3, 4), (0, 0, 0)])
    assert found.tokens(key(3), {3: 1}) == pytest.approx(2, abs=0.1)
    assert found.tokens(key(0), {3: 1}) == 1


def test_unlucky_drafts_do_not_count_as_cut_off():
    found = Yield(3, DepthPolicy())
    for _ in range(3000):
        found.add((3, 3), [3], [(3, 0, 1)])
    for _ in range(3000):
        found.add((1, 1), [3], [(1, 1, 2)])
    # Nothing is known of later drafts any more: each is as good as the draft before it.
    assert found.tokens(key(3), {3: 1}) == pytest.approx(4, abs=0.05)


def test_acceptance_is_by_position_and_fades_to_the_prior():
    found = Yield(3, DepthPolicy())
    for _ in range(3000):
        found.add((3, 3), [3, 3, 1, 0], [(3, 3, 4), (3, 1, 2), (1, 0, 1), (0, 0, 1)])
    # Position 1: two of three. Position 2: one of the two that got there. Position 3: the one that did.
    assert [found.tokens(key(d), {3: 1}) for d in range(4)] == pytest.approx([1, 5 / 3, 2, 7 / 3], abs=0.02)
    for _ in range(3000):
        found.add((0, 0), [3], [(0, 0, 1)])
    assert found.tokens(key(3), {3: 1}) == pytest.approx(1 + 0.7 + 0.49 + 0.343, abs=0.02)


def test_a_slow_spell_of_the_machine_changes_no_cost():
    """The incumbent takes the machine's pace down; a probe within the spell is read against it."""
    controller = told({0: 1.0, 3: 1.5})
    assert controller.choose([key(0), key(3)], [3]).depth == 3
    book = controller.costs(key(0))
    for depth, steps in ((3, 60), (0, 20)):
        for _ in range(steps):
            controller.learn(key(depth), 2 * (1.0, 0, 0, 1.5)[depth], [3], [(depth, depth, depth + 1)])
    assert (book.seconds((0, 0)), book.seconds((3, 3))) == pytest.approx((2.0, 3.0))


def test_a_depth_that_is_hardly_better_does_not_replace_the_incumbent():
    """Here all drafts are accepted: depth 3 emits four tokens."""
    controller, chosen = told({0: 1.0, 3: 4.4}), []
    for depth, seconds in ((0, 1.0), (3, 3.97), (3, 3.5), (0, 0.87), (0, 0.8)):
        for _ in range(20):
            controller.learn(key(depth), seconds, [3], [(depth, depth, depth + 1)])
        chosen.append(controller.choose([key(0), key(3)], [3]).depth)
    assert chosen == [0, 0, 3, 3, 0]


def test_unknown_programs_are_measured_first_the_deepest_one_before_the_others():
    controller, chosen = DepthController(3), []
    for _ in range(12):
        chosen.append(controller.choose(KEYS, [3]).depth)
        controller.learn(key(chosen[-1]), 1.0, [3], [(chosen[-1], 0, 1)])
    assert chosen == [3] * 4 + [1] * 4 + [0] * 4
    only = controller.choose([key(3, slots=2)], [3])  # nothing is known of it, and there is no choice
    assert only == key(3, slots=2)


def test_a_probe_is_a_block_and_is_paid_from_the_budget():
    policy, seconds = DepthPolicy(), {0: 1.0, 3: 6.0}
    controller, chosen = told(seconds, budget=policy.budget), []
    for _ in range(4000):
        depth = controller.choose([key(0), key(3)], [3]).depth
        controller.learn(key(depth), seconds[depth], [3], [(depth, depth, depth + 1)])
        chosen.append(depth)
    assert {len(list(block)) for depth, block in itertools.groupby(chosen) if depth} == {policy.block}
    # Six seconds for what takes four. The controller expects to lose more, the more its acceptance fades.
    lost, spent = chosen.count(3) * (6 - 4), sum(seconds[depth] for depth in chosen)
    assert policy.budget / 3 < lost / spent <= policy.budget


def test_the_first_steps_after_another_depth_are_not_measured():
    """They may be slow for what the other depth did to caches."""
    controller = told({0: 1.0, 3: 1.5})
    assert controller.choose([key(0), key(3)], [3]).depth == 3
    for _ in range(30):
        for depth, seconds in ((3, 1.5),) * 4 + ((0, 1.9), (0, 1.7), (0, 1.0), (0, 1.0)):
            controller.learn(key(depth), seconds, [3], [(depth, depth, depth + 1)])
    assert controller.costs(key(0)).seconds((0, 0)) == pytest.approx(1.0)


def test_a_deeper_step_may_need_a_program_with_more_pages():
    controller = told({0: 1.0, 3: 9.0})
    wide = key(3, pages=16)
    for _ in range(3):
        controller.learn(wide, 1.5, [3], [(3, 3, 4)])
    assert controller.choose([key(0), key(3)], [3]) == key(0)
    assert controller.choose([key(0), wide], [3]) == wide
    assert controller.choose([key(0), wide], [3]) == wide


def test_steps_that_take_prompts_along_have_books_of_their_own():
    """And time is worth what steps without prompt tokens make of it: these take theirs at any depth."""
    controller, books = told({}), {0: {0: 1.0, 1: 2.2, 3: 4.5}, 256: {0: 6.0, 1: 7.2, 3: 9.5}}
    for chunk, seconds in books.items():
        for key in keys_of(16, chunk):
            for _ in range(100):
                controller.learn(key, seconds[key.depth], [3], [(key.depth, key.depth, key.depth + 1)])
    plain, mixed = keys_of(16, 0), keys_of(16, 256)
    price = controller.rate(plain, [3])
    assert price == pytest.approx(1.0, abs=0.05)
    assert controller.choose(plain, [3]).depth == 0
    assert controller.choose(mixed, [3], price).depth == 0
    assert controller.costs(mixed[0]).seconds((0, 0)) == pytest.approx(6.0)
    # Tokens per second would have it otherwise: four in 9.5 seconds rather than one in 6.
    controller.costs(mixed[0]).incumbent = None
    assert controller.choose(mixed, [3]).depth == 3


def test_the_speedup_is_what_recent_tokens_would_have_taken_at_depth_0():
    assert DepthController(3).speedup is None
    assert told({3: 2.0}).speedup is None
    controller = told({0: 1.0, 3: 2.0}, steps=20)
    for _ in range(1700):
        controller.learn(key(3), 2.0, [3], [(3, 2, 3)])
    assert controller.speedup == pytest.approx(1.5, abs=0.01)
    controller.learn(key(3), 90.0, [3], [(3, 2, 3)])  # a hiccup
    assert controller.speedup == pytest.approx(1.5, abs=0.01)
    for _ in range(400):  # another bucket, where depth 0 has never run, nor been warmed up
        controller.learn(key(3, slots=8), 2.0, [3], [(3, 2, 3)])
    assert controller.speedup is None
    for _ in range(2000):  # nothing is gained at depth 0
        controller.learn(key(0), 1.0, [3], [(0, 0, 1)])
    assert controller.speedup == pytest.approx(1.0, abs=0.01)


def test_what_depth_0_took_long_ago_says_nothing_of_the_speedup():
    """A probe would have come earlier; without one the number is not known, rather than stale."""
    policy = DepthPolicy()
    controller = told({0: 1.0, 3: 2.0}, steps=20)
    for _ in range(int(policy.kept * policy.memory) + int(3 * policy.memory)):
        controller.learn(key(3), 2.0, [3], [(3, 2, 3)])
    assert controller.speedup is None
    for _ in range(4):
        controller.learn(key(0), 1.0, [0], [(0, 0, 1)])
    for _ in range(int(3 * policy.memory)):
        controller.learn(key(3), 2.0, [3], [(3, 2, 3)])
    assert controller.speedup == pytest.approx(1.5, abs=0.01)


def test_the_speedup_is_at_most_the_acceptance_length():
    """A step at depth 0 that took longer than a deeper one was measured on another machine, so to say."""
    controller = told({0: 9.0, 3: 2.0}, steps=20)
    for _ in range(1000):
        controller.learn(key(3), 2.0, [3], [(3, 2, 3)])
    assert controller.speedup == pytest.approx(3.0, abs=0.01)


def test_costs_that_were_forgotten_are_measured_anew_by_the_next_steps():
    controller, chosen = told({0: 9.0, 1: 5.0, 3: 2.0}), []
    controller.forget()
    assert controller.speedup is None
    for _ in range(14):
        depth = controller.choose(KEYS, [3]).depth
        controller.learn(key(depth), 1.0 + depth / 3, [3], [(depth, depth, depth + 1)])
        chosen.append(depth)
    assert chosen == [3] * 4 + [1] * 4 + [0] * 4 + [3] * 2
    assert controller.costs(key(0)).seconds((0, 0)) == pytest.approx(1.0)


def by_turns(seed: int, *, beside: float = 1.0, forget: bool = False, requests: int = 12) -> float:
    """The speed-up of requests of 64 tokens with drafts, by turns with others without, over the true one.

    The machine is slower for a spell now and then. beside: how much longer depth 0 took in warm-up,
    beside the compiler. forget: whether costs are forgotten once that has ended.
    """
    rng, controller = random.Random(seed), DepthController(3)
    seconds, pace, spell, tokens, took = {0: 1.0, 1: 1.34, 3: 1.84}, 1.0, 0, 0, 0.0

    def run(depth: int, depths: list[int], row: list[DepthRow], slow: float = 1.0) -> None:
        noise = math.exp(rng.gauss(0, 0.08)) * (3 if rng.random() < 0.02 else 1)
        controller.learn(key(depth), seconds[depth] * pace * slow * noise, depths, row)

    for depth in (0, 1, 3):
        for _ in range(4):
            run(depth, [], [], beside if depth == 0 else 1.0)
    if forget:
        controller.forget()
    for turn in range(requests):
        left = 64
        while left > 0:
            if not spell:
                pace, spell = rng.choice((1.0, 1.0, 1.6)), rng.randint(30, 150)
            spell -= 1
            most = 3 * (turn % 2)
            depth = controller.choose([k for k in KEYS if k.depth <= most], [most]).depth
            # Of the drafts of a step at depth 3 1.75 are accepted.
            kept = next((i for i in range(depth) if rng.random() > (0.8, 0.735, 0.615)[i]), depth)
            emitted = min(kept + 1, left)
            left -= emitted
            run(depth, [most], [(depth, kept, emitted)])
            if most:
                tokens, took = tokens + emitted, took + seconds[depth]
    assert controller.speedup
    return controller.speedup / (tokens * seconds[0] / took)


@pytest.mark.parametrize(("beside", "forget"), [(1.0, False), (1.5, True), (0.7, True)])
def test_the_speedup_is_that_of_requests_by_turns(beside, forget):
    found = [by_turns(seed, beside=beside, forget=forget) for seed in range(6)]
    assert found == pytest.approx([1.0] * 6, rel=0.15)


def test_costs_are_renewed_where_two_depths_take_turns_as_the_incumbent():
    """Neither is probed then. What warm-up has measured wrongly is right after a few requests of each."""
    found = [by_turns(seed, beside=1.5, requests=24) for seed in range(6)]
    assert found == pytest.approx([1.0] * 6, rel=0.15)


def test_warm_up_is_enough_to_know_the_speedup():
    controller = DepthController(3)
    for depth in (0, 1, 3):
        for _ in range(4):
            controller.learn(key(depth), 1.0 + depth / 3, [], [])
    assert controller.speedup is None
    for _ in range(20):
        controller.learn(key(3), 2.0, [3], [(3, 3, 4)])
    assert controller.speedup == pytest.approx(2.0)


def test_a_step_that_followed_another_depth_says_nothing_of_the_speedup():
    controller = told({3: 2.0})
    for _ in range(2):
        controller.learn(key(0), 9.0, [3], [(0, 0, 1)])
    controller.learn(key(3), 2.0, [3], [(3, 2, 3)])
    assert controller.speedup is None


def test_an_engine_of_fixed_depth_knows_the_speedup_once_a_request_had_no_drafts(monkeypatch):
    # A device that has every program: with others' programs some steps would be of other sizes, whose times
    # are kept in books of their own.
    engine, _ = on_device(max_num_seqs=1)
    learn = engine.depth.learn
    monkeypatch.setattr(engine.depth, "learn", lambda key, _, *rest: learn(key, 1.0 + key.depth / 3, *rest))
    drafting = replace(GREEDY, max_tokens=30, logprobs=None)
    plain = replace(drafting, num_speculative_tokens=0)
    serve(engine, [(prompts(1)[0], drafting)])
    assert engine.stats().realised_speedup is None
    serve(engine, [(prompts(1)[0], plain)])
    serve(engine, [(prompts(1)[0], drafting)])
    found = engine.stats().realised_speedup
    assert found is not None
    assert found > 0


def test_warm_up_measures_every_depth():
    engine, _ = on_device(adaptive_depth=True)
    request = engine.make_request(prompts(1)[0], GREEDY)
    engine.prepare([request])
    steps = [k for k in engine.runner.keys if isinstance(k, StepKey) and k.slots]
    assert {k.depth for k in steps} == {0, 3}
    assert all(engine.depth.costs(k).seconds((depth, depth)) > 0 for k in steps for depth in (0, 1, 3))
    # So the speed-up is known from the first request.
    assert engine.stats().realised_speedup is None
    engine.submit(request)
    finish(engine)
    assert engine.stats().realised_speedup is not None


@pytest.mark.parametrize("most", [0, 3])
def test_warm_up_repeats_a_step_only_where_there_are_depths_to_choose_from(most, monkeypatch):
    engine, _ = on_device(adaptive_depth=True, num_speculative_tokens=most)
    ran, run = Counter(), engine._run
    monkeypatch.setattr(engine, "_run", lambda key, *given: ran.update([key]) or run(key, *given))
    engine.prepare([engine.make_request(prompts(1)[0], GREEDY)])
    assert ran
    assert (max(ran.values()) == 1) == (most == 0)


def choose_in_turn(engine, monkeypatch):
    """Every depth in turn, whatever it costs here."""
    turn = itertools.count()

    def in_turn(keys, *_):
        return sorted(keys, key=lambda k: k.depth)[next(turn) % len(keys)]

    monkeypatch.setattr(engine.depth, "choose", in_turn)


def test_adaptive_steps_give_the_tokens_of_depth_0(monkeypatch):
    engine = widest(adaptive_depth=True)
    choose_in_turn(engine, monkeypatch)
    jobs = [(p, replace(GREEDY, max_tokens=40)) for p in prompts(3)]
    requests = serve(engine, jobs, compiled=True)
    stats = engine.stats()
    assert set(stats.depth_steps) == {0, 1, 3}
    assert [r.progress.output for r in requests] == [text(p, 40) for p, _ in jobs]
    assert sum(sum(accepted(r)) for r in requests) == stats.accepted_tokens > 0
    assert stats.draft_tokens == sum(r.progress.speculation.drafted for r in requests)


@pytest.mark.parametrize(
    ("wanted", "depths", "drafted"),
    [
        ({"temperature": 1.0, "seed": 3}, {3}, 3),  # a seed promises the same tokens again
        ({"temperature": 0, "seed": 3}, {0, 1, 3}, 3),
        ({"temperature": 0, "num_speculative_tokens": 1}, {0, 1}, 1),
        ({"temperature": 0, "num_speculative_tokens": 0}, {0}, 0),
    ],
)
def test_a_request_may_fix_its_depth(wanted, depths, drafted, monkeypatch):
    engine, _ = on_device(adaptive_depth=True)
    choose_in_turn(engine, monkeypatch)
    params = SamplingParams(max_tokens=40, ignore_eos=True, **wanted)
    (request,) = serve(engine, [(prompts(1)[0], params)])
    assert set(engine.stats().depth_steps) <= depths
    assert max(request.progress.speculation.drafted_per_step) == drafted


@pytest.mark.parametrize("most", [2, 3])
def test_no_drafts_for_tokens_that_cannot_come(most, monkeypatch):
    """The first token is the prefill's, and the last needs no draft, even where drafts are free."""
    engine, _ = on_device(adaptive_depth=True)
    monkeypatch.setattr(engine.depth, "choose", lambda keys, *_: max(keys, key=lambda k: k.depth))
    (request,) = serve(engine, [(prompts(1)[0], SamplingParams(temperature=0, max_tokens=most))])
    assert len(request.progress.output) == most
    assert max(engine.stats().depth_steps) == most - 2


def test_fixed_depth_is_the_default():
    engine, _ = on_device()
    serve(engine, [(p, replace(GREEDY, logprobs=None)) for p in prompts(2)])
    assert set(engine.stats().depth_steps) == {3}
