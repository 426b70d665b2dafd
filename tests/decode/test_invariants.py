"""The invariants of the step, tested by breaking what they say is harmless: see mtp_jax/decode/state.py."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.decode.drafter.rules import DraftRules
from mtp_jax.decode.state import State
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request, Status
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.heads.build import build
from mtp_jax.model.backend import xla_cpu
from mtp_jax.model.params import Params
from tests.decode.helpers import poison
from tests.models import (
    GREEDY,
    TINY,
    Reference,
    accepted,
    chosen_logprobs,
    finish,
    make_engine,
    prepare,
    prompts,
    rigged,
    serve,
    tiny_params,
)
from tests.rounding import near, of_model

PROMPTS = prompts(6)
SAMPLED = SamplingParams(temperature=0.9, seed=11, max_tokens=24, ignore_eos=True, logprobs=0)
TWO_LAYERS = replace(TINY, num_nextn_predict_layers=2, nextn_moe=(True, False))


MODES = [pytest.param(GREEDY, id="greedy"), pytest.param(SAMPLED, id="sampled", marks=pytest.mark.rest)]


@functools.cache
def reference() -> Reference:
    return Reference(tiny_params(), longest=128)  # the program of the suffix drafter's tests


def outcome(requests: list[Request]) -> list[tuple]:
    return [
        (r.progress.output, accepted(r), r.progress.finish_reason, chosen_logprobs(r).tolist())
        for r in requests
    ]


@pytest.mark.parametrize(
    ("cfg", "params"),
    [
        pytest.param(TINY, GREEDY, id="greedy"),
        pytest.param(TINY, SAMPLED, id="sampled", marks=pytest.mark.rest),
        pytest.param(TWO_LAYERS, GREEDY, id="two", marks=pytest.mark.slow),
    ],
)
def test_committed_length(cfg, params):
    """Whatever lies past a slot's committed length is harmless: bit-equal results with NaN there."""
    jobs = [(p, replace(params, max_tokens=24 - 3 * i)) for i, p in enumerate(PROMPTS)]
    clean = serve(make_engine(cfg=cfg), jobs)
    engine = make_engine(cfg=cfg)
    requests = [engine.make_request(*job) for job in jobs]
    prepare(engine, requests)
    poison(engine)
    for r in requests:
        engine.submit(r)
    while engine.busy:
        engine.step()
        poison(engine)
    assert outcome(requests) == outcome(clean)
    assert sum(r.progress.speculation.accepted for r in requests) > 0


# Warm draft cache


@functools.partial(jax.jit, static_argnames="depth")
def next_drafts(params: Params, state: State, depth: int = 3) -> jax.Array:
    """NextN logits [B, K, V] of the drafts that the next step would make."""
    on, s = xla_cpu(experts="dense"), state.slots.replace(depth=jnp.full_like(state.slots.depth, depth))
    drafts, _ = build(TINY).propose(params, state.drafter, s, DraftRules(depth, depth, logits=True), on)
    assert drafts.logits is not None
    return drafts.logits


@pytest.mark.parametrize(
    ("depth", "compiled"),
    [
        pytest.param(0, 0, id="off"),
        pytest.param(0, 3, id="off-in-deep-step", marks=pytest.mark.rest),
        pytest.param(1, 3, id="shallow", marks=pytest.mark.rest),
        pytest.param(3, 3, id="full"),
    ],
)
def test_warm_draft_cache(depth, compiled, monkeypatch):
    """Whatever the depth so far, the next drafts are those of a cache-free NextN pass over the whole text."""
    engine = make_engine()
    runner = local_runner(engine)
    job = (PROMPTS[5], replace(GREEDY, num_speculative_tokens=depth))
    request = engine.make_request(*job)
    deepest = engine.make_request(PROMPTS[5], replace(GREEDY, num_speculative_tokens=compiled))
    prepare(engine, [deepest, request])
    if depth != compiled:  # another test has compiled the shallow step too: leave it out
        cover = runner.cover
        monkeypatch.setattr(
            runner,
            "cover",
            lambda need: cover(replace(need, depth=max(need.depth, compiled)) if need.slots else need),
        )
    text = [*PROMPTS[5], *reference().speculate(PROMPTS[5], 24).ids]
    engine.submit(request)
    checked = 0
    while not request.finished:
        engine.step()
        if not runner.state.slots.active[0]:
            continue
        known = int(runner.state.slots.length[0]) + 1
        runner.flushed()
        got = np.asarray(next_drafts(runner.params, runner.state))[0]
        near(got, reference().drafts(text[:known], 3)[1], of_model(TINY, known + 3))
        checked += 1
    assert checked >= 5


@pytest.mark.parametrize(
    "steps", [pytest.param(1, marks=pytest.mark.rest), 7, pytest.param(18, marks=pytest.mark.rest)]
)
def test_speculation_switched_on_later(steps):
    """After steps at depth 0, depth 3 accepts what it would have accepted with depth 3 from the start."""
    engine = make_engine()
    plain, deep = replace(GREEDY, num_speculative_tokens=0), GREEDY
    requests = [engine.make_request(PROMPTS[5], p) for p in (plain, deep)]
    for r in requests:
        prepare(engine, [r])
    request = requests[0]
    engine.submit(request)
    runner = local_runner(engine)
    while int(runner.state.slots.generated[0]) < 1 + steps:
        engine.step()
    object.__setattr__(request, "depth", 3)  # nobody may: no request goes deeper in its midst
    slots = runner.state.slots
    launched = int(slots.generated[0]) - 1
    runner.state = replace(runner.state, slots=replace(slots, depth=jnp.full_like(slots.depth, 3)))
    finish(engine)
    ids = reference().speculate(PROMPTS[5], 24).ids
    later = reference().speculate([*PROMPTS[5], *ids[:launched]], 24 - launched, 3)
    assert request.progress.output == ids
    assert accepted(request) == [0] * launched + later.accepted
    assert sum(later.accepted) > 0


# Broken rows


def spoil_slot(engine: Engine, slot: int, cache: str) -> None:
    """NaN into the committed rows of one slot, in the ``trunk`` or the ``nextn`` cache."""
    runner = local_runner(engine)
    state = runner.state
    table, own = np.asarray(state.slots.page_table[slot]), state.drafter
    rows, size = np.arange(int(state.slots.length[slot])), state.drafter.pages.cache[0].page_size
    at = (table[rows // size], rows % size)
    pages = state.trunk if cache == "trunk" else own.pages.cache
    spoiled = jax.tree.map(lambda p: p.at[at].set(jnp.nan), pages)
    if cache == "trunk":
        runner.state = state.replace(trunk=spoiled)
    else:
        runner.state = state.replace(drafter=own.replace(pages=own.pages.replace(cache=spoiled)))


@pytest.mark.parametrize("params", MODES)
def test_nan_in_one_row_ends_that_request_only(params):
    jobs = [(p, params) for p in PROMPTS[:4]]
    clean = serve(make_engine(), jobs)
    engine = make_engine()
    requests = [engine.make_request(*job) for job in jobs]
    for r in requests:
        engine.submit(r)
    while len(requests[3].progress.output) < 4:
        engine.step()
    spoil_slot(engine, 1, "trunk")
    finish(engine)
    assert requests[1].progress.finish_reason == "error"
    cut = len(requests[1].progress.output)
    assert 0 < cut < 24
    assert requests[1].progress.output == clean[1].progress.output[:cut]
    others = [0, 2, 3]
    assert outcome([requests[i] for i in others]) == outcome([clean[i] for i in others])
    assert engine.stats().pages_used == 0
    # The pages with NaN are free now; whoever gets them is not harmed.
    assert outcome(serve(engine, jobs)) == outcome(clean)


def test_nan_while_prefilling_ends_the_request_without_tokens():
    engine = make_engine()
    requests = [engine.make_request(p, GREEDY) for p in (PROMPTS[5], PROMPTS[0])]
    assert len(PROMPTS[5]) > engine.config.prefill_chunk
    prepare(engine, requests)
    for r in reversed(requests):  # while the first runs, the long prompt takes a chunk per step
        engine.submit(r)
        while r.status is Status.WAITING:
            engine.step()
    assert requests[0].status is Status.PREFILL
    spoil_slot(engine, requests[0].residence.slot, "trunk")
    finish(engine)
    assert (requests[0].progress.finish_reason, requests[0].progress.output) == ("error", [])
    assert requests[1].progress.output == reference().speculate(PROMPTS[0], 24).ids
    assert engine.stats().pages_used == 0
    # Nobody finds its pages in the prefix cache.
    (again,) = serve(engine, [(PROMPTS[5], GREEDY)])
    told = reference().speculate(PROMPTS[5], 24, 3)
    assert (again.progress.cached_tokens, again.progress.output, accepted(again)) == (
        0,
        told.ids,
        told.accepted,
    )
    assert sum(told.accepted) > 0


def by_chance(request: Request) -> int:
    """How often argmax over NaN, which is the last id, may be right."""
    return request.progress.output.count(TINY.vocab_size - 1)


@pytest.mark.parametrize("params", MODES)
def test_a_broken_drafter_costs_speed_never_the_request(params):
    """NaN in a slot's NextN cache: hardly anything is accepted there any more, and the text goes on."""
    jobs = [(p, params) for p in PROMPTS[:4]]
    engine = make_engine()
    requests = [engine.make_request(*job) for job in jobs]
    prepare(engine, requests)
    for r in requests:
        engine.submit(r)
    while len(requests[3].progress.output) < 4:
        engine.step()
    spoil_slot(engine, 1, "nextn")
    before = requests[1].progress.speculation.steps + 1
    finish(engine)
    assert [r.progress.finish_reason for r in requests] == ["length"] * 4
    assert sum(accepted(requests[1])[before + 1 :]) <= by_chance(requests[1])
    assert sum(accepted(requests[0])[before + 1 :]) > 0
    if params is GREEDY:
        told = [reference().speculate(p, 24).ids for p in PROMPTS[:4]]
        assert [r.progress.output for r in requests] == told


def test_broken_nextn_weights_cost_speed_only():
    params = tiny_params()
    broken = replace(params, nextn=tuple(replace(n, merge=n.merge * jnp.nan) for n in params.nextn))
    for r in serve(make_engine(broken), [(p, GREEDY) for p in PROMPTS[:4]]):
        assert r.progress.output == reference().speculate(r.prompt, 24).ids
        assert r.progress.speculation.accepted <= by_chance(r)
        assert r.progress.speculation.drafted > 0


# Broken tokens


def with_broken_token(params: Params, token: int, value: float) -> Params:
    """Parameters whose embedding of one token is not finite."""
    return replace(params, embed=params.embed.at[token].set(value))


@pytest.mark.parametrize("value", [np.nan, pytest.param(np.inf, marks=pytest.mark.rest)])
def test_a_draft_that_is_not_finite_harms_nobody_who_does_not_keep_it(value):
    """Tokens before it in its window are masked from its row, and 0 x NaN is NaN."""
    broken, drafted = with_broken_token(rigged(noise=2.0), 7, value), []
    rng = np.random.default_rng(3)
    given = [[int(t) for t in rng.integers(8, TINY.vocab_size, 6)] for _ in range(16)]
    for depth in (0, 3):
        params = replace(GREEDY, num_speculative_tokens=depth)
        drafted.append(
            [
                (r.progress.finish_reason, r.progress.output)
                for r in serve(make_engine(broken), [(p, params) for p in given])
            ]
        )
    assert drafted[0] == drafted[1]
    assert sum(reason == "length" for reason, _ in drafted[0]) >= 12


@pytest.mark.rest
def test_a_token_that_is_not_finite_harms_no_row_beside_it():
    """Windows deeper than their rows ask for, at the end of a page: past it all slots share one page."""
    victim = 7
    engine = make_engine(with_broken_token(rigged(noise=2.0), victim, np.nan))
    rng, size = np.random.default_rng(5), engine.config.page_size
    healthy, other, late = (rng.integers(8, TINY.vocab_size, size - 3).tolist() for _ in range(3))
    # The broken one is read in full before it breaks, so that it is in a window with the others.
    plain = replace(GREEDY, num_speculative_tokens=0)
    alone = [r.progress.output for r in serve(engine, [(healthy, plain), (other, plain)])]
    requests = [engine.make_request(p, plain) for p in (healthy, other)]
    requests.append(engine.make_request(late, replace(plain, logit_bias={victim: 100.0})))
    requests.append(engine.make_request(rng.integers(8, TINY.vocab_size, 6).tolist(), GREEDY))
    prepare(engine, requests)
    for r in requests:
        engine.submit(r)
    finish(engine)
    assert requests[2].progress.finish_reason == "error"
    assert [r.progress.output for r in requests[:2]] == alone
