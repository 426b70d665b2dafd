"""Structured output with speculation on: the same tokens as without, whatever shares the batch."""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.decode.keys import Origin, StepKey
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import RequestError
from mtp_jax.model.sharding import make_mesh
from mtp_jax.text.grammar import Grammars, StructuredOutput
from mtp_jax.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.decode.helpers import compilations as compilations
from tests.engine.plain import compile_steps, same_scores
from tests.engine.structured import CFG, EOS, engine_with, lean, params, ready
from tests.models import accepted, finish, make_engine, on_mesh, prompts, serve, watch

PROMPTS = prompts(8, vocab=104)
rest = pytest.mark.rest
GREEDY = SamplingParams(temperature=0, max_tokens=200, logprobs=0)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": None, "whitespace_flexible": False},
}
WANTED = {
    "schema": StructuredOutput(json_schema=SCHEMA),
    "regex": StructuredOutput(regex="[a-m ]{6,16}[x-z]"),
    "choice": StructuredOutput(choice=["a rather long choice!", "a rather lame one.", "other"]),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    found = Tokenizer.from_dir(tiny_tokenizer.write(tmp_path_factory.mktemp("tokenizer"), 104))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, CFG.vocab_size, CFG.eos_token_ids)


def text(tokenizer: Tokenizer, request: Request) -> str:
    return tokenizer.decode(request.progress.output)


def check(wanted: StructuredOutput, written: str) -> None:
    """The output is what was asked for."""
    if wanted.json_schema is not None:
        jsonschema.validate(json.loads(written), SCHEMA)
    elif wanted.regex is not None:
        assert re.fullmatch(wanted.regex, written)
    else:
        assert written in (wanted.choice or ())


def jobs(options: SamplingParams = GREEDY) -> list[tuple[Sequence[int], SamplingParams]]:
    """Each grammar twice, and requests without one."""
    wanted = [*WANTED.values(), None, *WANTED.values(), None]
    return [(p, replace(options, structured=w)) for p, w in zip(PROMPTS, wanted, strict=True)]


@pytest.fixture(scope="module")
def plain(grammars) -> list[Request]:
    """Depth 0, one request at a time."""
    engine = lean(grammars)
    undrafted = jobs(replace(GREEDY, num_speculative_tokens=0))
    return [serve(engine, [job], compiled=True)[0] for job in undrafted]


@pytest.fixture(scope="module")
def mixed(grammars) -> list[Request]:
    """Depth 3, all together."""
    return serve(lean(grammars), jobs(), compiled=True)


def test_greedy_tokens_are_those_of_depth_0(plain, mixed, tokenizer):
    for (_, p), want, got in zip(jobs(), plain, mixed, strict=True):
        assert got.progress.output == want.progress.output
        assert not any(accepted(want))
        same_scores(got, want, CFG, params())
        if p.structured:
            assert got.progress.finish_reason == want.progress.finish_reason == "stop"
            assert got.progress.output[-1] == EOS
            check(p.structured, text(tokenizer, got))


def test_drafts_are_accepted(mixed):
    structured = [r for r in mixed if r.constraints]
    assert sum(map(sum, map(accepted, structured))) > 0.5 * sum(len(r.progress.output) for r in structured)


def test_what_a_grammar_forces_is_drafted(grammars):
    """Text without a choice costs no step of its own, however little the model thinks of it."""
    wanted = StructuredOutput(choice=["zq9!zq9!zq9!zq9!zq9!"])
    (request,) = serve(lean(grammars), [(PROMPTS[0], replace(GREEDY, structured=wanted))], compiled=True)
    assert len(request.progress.output) == 21
    assert accepted(request) == [3] * 5


@rest
def test_programs_that_do_not_draft_write_the_same(grammars, plain, monkeypatch):
    engine, launched = lean(grammars), []
    asked = jobs(replace(GREEDY, num_speculative_tokens=0))[0]
    compile_steps(engine, *asked)
    watch(monkeypatch, engine.runner, lambda step: launched.append(step.key))
    (request,) = serve(engine, [asked], compiled=True)
    assert request.progress.output == plain[0].progress.output
    assert {k.room for k in launched} == {0}


@rest
@pytest.mark.parametrize("depth", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_suffix_drafts_change_nothing(grammars, plain, depth):
    engine = engine_with(grammars, suffix_drafts=True, num_speculative_tokens=depth)
    shaped = [job for job in jobs() if job[1].structured]
    requests = [serve(engine, [job], exactly=True)[0] for job in shaped]
    assert [r.progress.output for r in requests] == [r.progress.output for r in plain if r.constraints]
    suffix = [r.progress.speculation.of(Origin.SUFFIX) for r in requests]
    assert sum(s.accepted for s in suffix) > 0


@rest
def test_what_a_grammar_forces_is_drafted_whatever_was_before(grammars):
    """A match that goes against what is forced is not drafted."""
    wanted = StructuredOutput(choice=["zq9!zq9!zq9!zq9?zq9!"])
    engine = engine_with(grammars, suffix_drafts=True)
    (request,) = serve(engine, [(PROMPTS[0], replace(GREEDY, structured=wanted))], exactly=True)
    assert accepted(request) == [3] * 5
    assert request.progress.speculation.of(Origin.SUFFIX).accepted > 0


@rest
def test_depths_of_requests_and_engine_change_nothing(grammars, plain):
    """Depths 0 and 1 beside deeper ones; then depths chosen step by step."""
    engine = ready(grammars)
    depths = [0, 1, 2, 3, 3, 2, 1, 0]
    limited = [(p, replace(o, num_speculative_tokens=d)) for (p, o), d in zip(jobs(), depths, strict=True)]
    found = serve(engine, limited, compiled=True)
    assert [r.progress.output for r in found] == [r.progress.output for r in plain]
    asked = [engine.make_request(*job) for job in jobs() if job[1].structured]
    requests = [replace(r, fixed_depth=False) for r in asked]
    for r in requests:
        engine.submit(r)
    finish(engine)
    assert [r.progress.output for r in requests] == [r.progress.output for r in plain if r.constraints]
    assert len(engine.stats().depth_steps) > 2


@rest
@pytest.mark.parametrize("at", [9, 10])  # before drafts, and between drafts and verification
def test_outputs_whose_grammar_was_spoilt_by_another_go_on_alone(grammars, plain, monkeypatch, at):
    masks, calls, steps_before = grammars.masks, [], {}

    def spoiling(windows, rows, width):
        calls.append(width)
        if len(calls) == at:
            for w in windows:
                w.matcher.inner.consume_token(0)
                assert w.matcher.failed
            steps_before.update({r.id: len(accepted(r)) for r in requests})
        return masks(windows, rows, width)

    engine = ready(grammars)
    requests = [engine.make_request(*job) for job in jobs()]
    monkeypatch.setattr(grammars, "masks", spoiling)
    for r in requests:
        engine.submit(r)
    finish(engine)
    assert [r.progress.output for r in requests] == [r.progress.output for r in plain]
    alone = [r for r in requests if r.constraints and r.constraints.matcher and r.constraints.matcher.alone]
    assert len(alone) > 1
    after = [n for r in alone for n in accepted(r)[steps_before[r.id] + 1 :]]
    assert after == [0] * len(after)
    assert len(after) > len(alone)
    assert sum(sum(accepted(r)) for r in requests if r not in alone) > 0


@rest
def test_sampled_output_is_valid(grammars, tokenizer):
    options = replace(GREEDY, temperature=1.5, top_p=0.98, frequency_penalty=0.1)
    requests = serve(ready(grammars), jobs(options) * 2, compiled=True)
    for r in requests:
        if r.params.structured:
            assert r.progress.finish_reason == "stop"
            check(r.params.structured, text(tokenizer, r))
    structured = [r for r in requests if r.constraints]
    assert len({tuple(r.progress.output) for r in structured}) > len(structured) / 2
    assert sum(r.progress.speculation.accepted for r in structured) > len(structured)


@rest
def test_a_seed_fixes_the_output_whatever_shares_the_batch(grammars):
    options = replace(GREEDY, temperature=1.2, seed=11)
    together = serve(ready(grammars), jobs(options), compiled=True)
    for (prompt, p), want in list(zip(jobs(options), together, strict=True))[:3]:
        (alone,) = serve(ready(grammars), [(prompt, p)], compiled=True)
        assert alone.progress.output == want.progress.output


@pytest.mark.slow
def test_coupled_verification_gives_a_seed_one_output_at_every_depth(grammars):
    engine = engine_with(grammars, verifier="coupled")
    options = replace(GREEDY, temperature=1.2, seed=11)
    deepest = serve(engine, jobs(options))
    for depth in (0, 2):
        shallow = jobs(replace(options, num_speculative_tokens=depth))
        requests = [engine.make_request(*job) for job in shallow]  # the same programs do
        for r in requests:
            engine.submit(r)
        finish(engine)
        assert [r.progress.output for r in requests] == [r.progress.output for r in deepest]
    assert sum(r.progress.speculation.accepted for r in deepest if r.constraints) > 20


@rest
def test_preempted_requests_go_on_in_their_grammar(grammars, plain):
    engine = ready(grammars, num_pages=6)
    short = replace(GREEDY, max_tokens=48)
    some = [(job, want) for job, want in zip(jobs(short), plain, strict=True) if want.constraints]
    requests = serve(engine, [job for job, _ in some], compiled=True)
    assert engine.stats().preemptions > 0
    assert [r.progress.output for r in requests] == [want.progress.output for _, want in some]
    assert engine.stats().pages_used == 0


@rest
def test_an_abort_disturbs_nobody(grammars, plain):
    engine = ready(grammars)
    requests = [engine.make_request(*job) for job in jobs()]
    for r in requests:
        engine.submit(r)
    while len(requests[0].progress.output) < 10:
        engine.step()
    engine.abort(requests[0])
    finish(engine)
    assert requests[0].progress.finish_reason == "abort"
    assert requests[0].progress.output == plain[0].progress.output[: len(requests[0].progress.output)]
    assert [r.progress.output for r in requests[1:]] == [r.progress.output for r in plain[1:]]


@rest
def test_max_tokens_cuts_the_output_short(grammars, plain):
    """As in vLLM: the end comes where it comes, and the reason says so."""
    prompt, options = jobs()[0]
    (request,) = serve(ready(grammars), [(prompt, replace(options, max_tokens=12))], compiled=True)
    assert request.progress.finish_reason == "length"
    assert request.progress.output == plain[0].progress.output[:12]


@rest
def test_a_stop_token_of_the_request_may_end_it(grammars, tokenizer):
    """Inside, where the grammar has that token anyway; or in place of the model's own, once all is said."""
    inside, elsewhere = (tokenizer.encode(c, add_special_tokens=False)[0] for c in (",", "~"))
    prompt, options = jobs()[0]
    stopped = prompt, replace(options, stop_token_ids=[inside])
    (request,) = serve(ready(grammars), [stopped], compiled=True)
    assert request.progress.finish_reason == "stop"
    assert request.progress.output.index(inside) == len(request.progress.output) - 1
    favoured = replace(jobs()[2][1], stop_token_ids=[elsewhere], logit_bias={elsewhere: 100})
    (request,) = serve(ready(grammars), [(prompt, favoured)], compiled=True)
    assert request.progress.output[-1] == elsewhere
    check(WANTED["choice"], tokenizer.decode(request.progress.output[:-1]))


@rest
def test_a_grammar_that_fails_ends_its_request_alone(grammars, plain):
    engine = ready(grammars)
    requests = [engine.make_request(*job) for job in jobs()]
    for r in requests:
        engine.submit(r)
    while len(requests[0].progress.output) < 10:
        engine.step()
    assert requests[0].constraints is not None
    requests[0].constraints.advance([0])  # not allowed: llguidance refuses all that follows
    finish(engine)
    assert requests[0].progress.finish_reason == "error"
    assert requests[0].progress.output == plain[0].progress.output[: len(requests[0].progress.output)]
    assert [r.progress.output for r in requests[1:]] == [r.progress.output for r in plain[1:]]
    assert engine.stats().pages_used == 0


@rest
def test_serving_compiles_nothing(grammars, compilations):
    engine = ready(grammars)
    requests = [engine.make_request(*job) for job in jobs()]
    compiled = engine.runner.keys
    for r in requests:
        engine.submit(r)
    engine.step()
    compilations.clear()
    finish(engine)
    assert compilations == []
    assert engine.runner.keys == compiled


def test_a_server_is_ready_for_grammars_at_once(grammars):
    engine = engine_with(grammars, adaptive_depth=True)
    first, rest = engine.warm_up_keys()
    requests = [engine.make_request(*job) for job in jobs(SamplingParams(logprobs=20))]
    for slot, r in enumerate(requests[:4]):
        r.residence.slot = slot
    need = engine.buckets.step(requests[:4], 3)
    assert need.mode.structured
    assert any(isinstance(key, StepKey) and key.covers(need) for key in first)
    assert not [key for key in rest if isinstance(key, StepKey) and key.mode.structured]
    first, rest = engine_with(None).warm_up_keys()
    assert not any(isinstance(k, StepKey) and k.mode.structured for k in (*first, *rest))


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 3}, {"structured": "json"}])
def test_what_cannot_be_combined_is_refused(options):
    with pytest.raises(RequestError, match="structured"):
        SamplingParams(**{"structured": WANTED["regex"]} | options)


def test_bad_grammars_and_models_without_tokens_are_refused(grammars):
    engine = engine_with(grammars)
    bad = SamplingParams(structured=StructuredOutput(json_schema={"type": "nothing"}))
    with pytest.raises(RequestError, match="cannot be compiled"):
        engine.make_request([5], bad)
    with pytest.raises(RequestError, match="needs a tokenizer that fits the model"):
        make_engine().make_request([5], SamplingParams(structured=WANTED["regex"]))


@pytest.mark.slow
def test_on_eight_devices(grammars, plain):
    mesh = make_mesh(4, 2)
    placed = on_mesh(params(), mesh, CFG)
    engine = make_engine(placed, CFG, mesh, grammars, max_num_seqs=8, max_model_len=248)
    requests = serve(engine, jobs())
    assert [r.progress.output for r in requests] == [r.progress.output for r in plain]
    assert sum(r.progress.speculation.accepted for r in requests if r.constraints) > 10


@rest
def test_a_structured_step_is_timed_with_its_drafting(grammars, tokenizer, monkeypatch):
    """The host waits for the drafts before it launches the rest."""
    engine = ready(grammars)
    programs, drafted, launched = local_runner(engine).programs, [], []
    draft, track = programs.draft_phase, engine._track

    def draft_phase(*args: Any) -> Any:
        drafted.append(time.perf_counter())
        return draft(*args)

    monkeypatch.setattr(programs, "draft_phase", draft_phase)
    monkeypatch.setattr(engine, "_track", lambda launch: launched.append(launch) or track(launch))
    options = replace(GREEDY, structured=StructuredOutput(regex="[a-z]{20}"))
    serve(engine, [(tokenizer.encode("ab"), options)], compiled=True)
    began = [launch.pending.at for launch in launched if launch.rows]
    assert drafted[-len(began) :]
    assert all(a <= b for a, b in zip(began, drafted[-len(began) :], strict=True))
