"""Requests end at any moment, and slots and pages are free again: nothing leaks, nobody else notices."""

from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.api.propose import propose
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request, Status
from mtp_jax.errors import ConfigError, RequestError
from tests.engine.plain import near_logits, reference, text, widest
from tests.models import (
    GREEDY,
    TINY,
    Reference,
    finish,
    make_engine,
    prompts,
    rigged,
    serve,
    tiny_params,
    watch,
)

PROMPTS = prompts(8)
LONG = PROMPTS[7]
rest = pytest.mark.rest


def is_free(engine: Engine) -> bool:
    return not engine.stats().pages_used and not any(engine.scheduler.slots) and not engine.busy


MOMENTS: dict[str, Callable[[Request], bool]] = {
    "waiting": lambda r: r.status is Status.WAITING,
    "prefilling": lambda r: r.status is Status.PREFILL and 0 < r.residence.prefilled < len(r.prompt),
    "first token on its way": lambda r: r.status is Status.RUNNING and not r.progress.output,
    "running": lambda r: len(r.progress.output) > 5,
    "nearly done": lambda r: len(r.progress.output) >= 9,
    "finished": lambda r: r.finished,
}


@pytest.mark.parametrize(
    "moment", [m if m in ("prefilling", "running") else pytest.param(m, marks=rest) for m in MOMENTS]
)
def test_abort_at_every_moment(moment):
    engine = widest()
    others = [engine.make_request(p, GREEDY) for p in PROMPTS[:3]]
    target = engine.make_request(LONG, replace(GREEDY, max_tokens=16))
    for r in (*others, target):
        engine.submit(r)
    while not MOMENTS[moment](target):
        engine.step()
    engine.abort(target)
    engine.abort(target)  # twice is no mistake
    held = len(target.progress.output)
    assert target.progress.finish_reason == ("length" if moment == "finished" else "abort")
    assert target.residence.pages == []
    late = engine.make_request(LONG, GREEDY)  # takes the free slot, and pages with somebody else's rows
    engine.submit(late)
    finish(engine)
    assert len(target.progress.output) == held
    assert target.progress.output == text(target.prompt)[:held]
    for r in (*others, late):
        assert r.progress.output == text(r.prompt)
        assert r.progress.speculation.accepted > 0
    assert is_free(engine)
    assert not np.asarray(local_runner(engine).state.slots.active).any()


def test_abort_all_then_serve():
    engine = widest()
    requests = [engine.make_request(p, GREEDY) for p in PROMPTS]
    for r in requests:
        engine.submit(r)
    for _ in range(4):
        engine.step()
    for r in requests:
        engine.abort(r)
    finish(engine)
    assert is_free(engine)
    assert [r.progress.output for r in serve(engine, [(p, GREEDY) for p in PROMPTS], compiled=True)] == [
        text(p) for p in PROMPTS
    ]


def test_free_pages_return_after_every_end():
    engine = widest()
    whole = text(LONG)
    jobs = [
        (LONG, GREEDY),
        (LONG, replace(GREEDY, max_tokens=1)),
        (LONG, replace(GREEDY, stop_token_ids=[whole[4]])),
        ([3], replace(GREEDY, max_tokens=63)),
    ]
    for _ in range(3):
        requests = serve(engine, jobs, compiled=True)
        assert [r.progress.finish_reason for r in requests] == ["length", "length", "stop", "length"]
        assert is_free(engine)


def test_too_few_pages_for_all_at_once():
    """Requests wait for pages, in order, and everybody is served."""
    engine = widest(num_pages=7)  # room for two requests at a time, or three while they are short
    requests = serve(engine, [(p, GREEDY) for p in PROMPTS], compiled=True)
    assert [r.progress.output for r in requests] == [text(r.prompt) for r in requests]
    assert 3 not in {r.residence.slot for r in requests}
    assert is_free(engine)


def test_an_error_ends_only_its_request_and_frees_its_pages():
    """A weight that is NaN for one token: whoever has it in the prompt fails, the others do not."""
    params = tiny_params()
    victim = next(t for t in range(TINY.vocab_size) if not any(t in [*p, *text(p)] for p in PROMPTS[:3]))
    broken = replace(params, embed=params.embed.at[victim].set(np.nan))
    engine = widest(broken, drafting="sampled")
    jobs = [*[(p, GREEDY) for p in PROMPTS[:3]], ([5, victim, 6], GREEDY)]
    requests = serve(engine, jobs, compiled=True)
    assert [r.progress.finish_reason for r in requests] == ["length", "length", "length", "error"]
    assert [r.progress.output for r in requests[:3]] == [text(r.prompt) for r in requests[:3]]
    assert requests[3].progress.output == []
    assert is_free(engine)


def test_a_prompt_that_fails_in_its_first_chunk_does_not_run_after_a_sound_one(monkeypatch):
    """The chunk behind it is on its way when the first is read."""
    engine = widest(prefix_cache=False)
    assert 16 < len(LONG) <= 32
    victims = [engine.make_request(LONG, GREEDY) for _ in range(3)]
    runner = local_runner(engine)
    params, launched = runner.params, []

    def break_first(step):
        norm = np.nan * params.norm if not launched else params.norm  # the cached rows are sound
        runner.params = replace(params, norm=norm)
        launched.append(step)

    watch(monkeypatch, runner, break_first)
    for r in victims:
        engine.submit(r)
    while not victims[0].finished:
        engine.step()
    assert (victims[0].progress.finish_reason, victims[0].progress.output, len(launched)) == ("error", [], 2)
    before = engine.launches
    while engine.launches == before:
        engine.step()
    active = np.flatnonzero(np.asarray(local_runner(engine).state.slots.active))
    assert {*active} <= {i for i, r in enumerate(engine.scheduler.slots) if r in victims[1:]}
    finish(engine)
    assert [r.progress.output for r in victims[1:]] == [text(r.prompt) for r in victims[1:]]
    assert is_free(engine)


def test_engines_do_not_share_state():
    first, second = widest(), widest(rigged(seed=7))
    both = [e.make_request(LONG, GREEDY) for e in (first, second)]
    for e, r in zip((first, second), both, strict=True):
        e.submit(r)
    while first.busy or second.busy:
        first.step()
        second.step()
    assert both[0].progress.output == text(LONG)
    assert both[1].progress.output == Reference(rigged(seed=7)).speculate(LONG, 24).ids


def test_draft_needs_an_idle_engine():
    engine = widest()
    request = engine.make_request(LONG, GREEDY)
    engine.submit(request)
    with pytest.raises(RequestError, match="needs it idle"):
        propose(engine, LONG, 2)
    engine.abort(request)


@rest
def test_draft_leaves_nothing_behind():
    engine = widest()
    first, ids, logits = propose(engine, LONG, 2)
    want, rows = reference().drafts([*LONG, text(LONG)[0]], 2)
    assert (first, ids.tolist()) == (text(LONG)[0], want)
    near_logits(logits, rows, len(LONG) + 3)
    assert is_free(engine)
    assert serve(engine, [(LONG, GREEDY)], compiled=True)[0].progress.output == text(LONG)


def test_preparing_nothing_compiles_nothing_for_nobody():
    engine = make_engine(num_pages=21)
    engine.prepare([])
    assert len(engine.runner.keys) == 0


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([48], {}, r"the prompt names token 48; expected ids from 0 to 47"),
        ([-1], {}, r"the prompt names token -1; expected ids from 0 to 47"),
        ([3] * 64, {}, r"64 tokens > 63 maximum\. .* is 64 tokens.*raise max_model_len = 64"),
        ([3] * 63, {}, r"63 tokens > 60 maximum.* raise num_pages = 4"),
        ([3], {"logit_bias": {50: 1.0}}, r"logit_bias names token 50; expected ids from 0 to 47"),
        ([3], {"stop_token_ids": [48]}, r"stop_token_ids names token 48; expected ids from 0 to 47"),
        ([3], {"num_speculative_tokens": 4}, r"num_speculative_tokens = 4.*3"),
        ([3] * 40, {}, r"needs 5 cache pages, the engine has 4; lower max_tokens or raise num_pages"),
    ],
)
def test_requests_that_cannot_be_served(prompt, options, message):
    engine = make_engine(num_pages=4)
    with pytest.raises(RequestError, match=message):
        engine.make_request(prompt, replace(GREEDY, **options))
    assert is_free(engine)


def test_speculation_needs_a_nextn_layer():
    cfg = TINY.with_nextn(())
    with pytest.raises(ConfigError, match="no NextN layer"):
        make_engine(replace(tiny_params(), nextn=()), cfg)


@rest
def test_without_nextn_layers_the_engine_decodes_plainly():
    cfg = TINY.with_nextn(())
    engine = make_engine(replace(tiny_params(), nextn=()), cfg, num_speculative_tokens=0)
    for r in serve(engine, [(p, GREEDY) for p in PROMPTS[:3]]):
        assert r.progress.output == text(r.prompt)
    assert not any(a.nbytes for a in jax.tree.leaves(local_runner(engine).state.drafter)), "nothing is kept"


@rest
def test_kernels_that_cannot_run_here_are_an_error_when_insisted_on(monkeypatch):
    with pytest.raises(
        ConfigError, match=r"needs an NVIDIA GPU of the Hopper generation .* found cpu; take kernels=auto or"
    ):
        make_engine(kernels="mosaic_gpu")
    monkeypatch.setattr("mtp_jax.model.backend.is_hopper", lambda: True)
    engine = make_engine(kernels="mosaic_gpu")
    with pytest.raises(ConfigError, match=r"mla_.*float32.*; take kernels=auto or kernels=xla"):
        engine.prepare([engine.make_request(LONG, GREEDY)])
    assert serve(widest(kernels="xla"), [(LONG, GREEDY)], compiled=True)[0].progress.output == text(LONG)
