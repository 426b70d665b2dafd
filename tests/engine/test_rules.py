"""Rules beside a grammar, at every depth: allowed tokens, bad words, bounded thoughts."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tokenizers
from scipy import stats

from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.structured import allowed
from mtp_jax.errors import RequestError
from mtp_jax.text.grammar import Grammars, StructuredOutput
from mtp_jax.text.thoughts import Thoughts
from mtp_jax.text.tokenizer import Tokenizer
from tests import tiny_tokenizer
from tests.engine.structured import CFG, EOS, engine_with, lean, params
from tests.models import Reference, accepted, make_engine, prompts, serve

OPENS, CLOSES = 104, 105
PROMPTS = prompts(4, vocab=104)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder = tiny_tokenizer.write(tmp_path_factory.mktemp("tokenizer"), OPENS)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([Thoughts.OPEN, Thoughts.CLOSE])
    assert backend.token_to_id(Thoughts.CLOSE) == CLOSES
    return Grammars(Tokenizer(backend, {}, {}), CFG.vocab_size, CFG.eos_token_ids)


def run(grammars: Grammars, options: SamplingParams, ids: Any = PROMPTS) -> list[Request]:
    return serve(lean(grammars), [(p, options) for p in ids], compiled=True)


@pytest.fixture(scope="module")
def free(grammars) -> list[Request]:
    return run(grammars, GREEDY)


def same_at_depth_0(grammars: Grammars, options: SamplingParams, ids: Any = PROMPTS) -> list[Request]:
    """Outputs at depth 3, which are those at depth 0, with drafts accepted."""
    engine = lean(grammars)
    deep = serve(engine, [(p, options) for p in ids], compiled=True)
    flat = serve(engine, [(p, replace(options, num_speculative_tokens=0)) for p in ids], compiled=True)
    assert not any(map(sum, map(accepted, flat)))
    assert [r.progress.output for r in deep] == [r.progress.output for r in flat]
    assert sum(map(sum, map(accepted, deep))) > 0.3 * sum(len(r.progress.output) for r in deep)
    return deep


def test_only_allowed_tokens_are_written(grammars, free):
    allowed = sorted({t for r in free for t in r.progress.output})[::2]
    deep = same_at_depth_0(grammars, replace(GREEDY, allowed_token_ids=allowed))
    assert {t for r in deep for t in r.progress.output} <= {*allowed}
    assert any(t not in allowed for r in free for t in r.progress.output)


def test_a_bias_adds_to_what_is_allowed(grammars):
    options = replace(GREEDY, allowed_token_ids=[7, 9], logit_bias={9: 100, 11: 100})
    assert {t for r in run(grammars, options) for t in r.progress.output} == {9}


def test_bad_words_are_not_written(grammars, free):
    """Pairs of tokens that the free outputs hold, and single ones."""
    pairs = [pair for r in free for pair in zip(r.progress.output[5:7], r.progress.output[6:8], strict=True)]
    words = ["~", *(w for pair in pairs if (w := grammars.backend.decode(pair)).strip() == w != "")]
    spelt = [tuple(grammars.encode(w)) for w in words]
    assert sum(len(s) > 1 for s in spelt) > 2
    deep = same_at_depth_0(grammars, replace(GREEDY, bad_words=words))

    def holds(r: Request) -> bool:
        return any(
            tuple(r.progress.output[i : i + len(s)]) == s
            for s in spelt
            for i in range(len(r.progress.output) - len(s) + 1)
        )

    assert any(map(holds, free))
    assert not any(map(holds, deep))


@pytest.mark.parametrize("budget", [0, 5])
def test_a_thought_is_ended_at_its_budget(grammars, budget):
    thinking = [[*p, OPENS] for p in PROMPTS]
    for r in same_at_depth_0(grammars, replace(GREEDY, max_thinking_tokens=budget), thinking):
        assert r.progress.output.index(CLOSES) <= budget


def test_a_grammar_goes_on_behind_a_bounded_thought(grammars):
    wanted = StructuredOutput(regex="[a-m ]{6,16}[x-z]")
    options = replace(GREEDY, ignore_eos=False, structured=wanted, max_thinking_tokens=4)
    for r in same_at_depth_0(grammars, options, [[*p, OPENS] for p in PROMPTS]):
        closed = r.progress.output.index(CLOSES)
        assert closed <= 4
        assert re.fullmatch(str(wanted.regex), grammars.backend.decode(r.progress.output[closed + 1 :]))
        assert (r.progress.output[-1], r.progress.finish_reason) == (EOS, "stop")


@pytest.mark.rest
def test_sampled_tokens_have_the_distribution_of_depth_0(grammars, free):
    """Three tokens of the two likeliest each, where a pair and a token must not appear."""
    prompt = PROMPTS[0]
    pair = free[0].progress.output[1:3]
    words = [grammars.backend.decode(pair), "~"]
    options = SamplingParams(temperature=2.0, top_k=2, max_tokens=3, ignore_eos=True, bad_words=words)
    jobs = [(prompt, replace(options, seed=i)) for i in range(300)]
    requests = serve(lean(grammars), jobs, compiled=True)
    assert sum(sum(accepted(r)) for r in requests) > 150
    spelt, reference = [grammars.encode(w) for w in words], Reference(params(), CFG)
    law = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, p in law.items():
            scores = reference.logprobs([*prompt, *text])[-1] / options.temperature
            for s in spelt:
                if list(text[len(text) - len(s) + 1 :]) == s[:-1]:
                    scores[s[-1]] = -np.inf
            for token in np.argsort(scores)[-2:]:
                two = np.exp(np.sort(scores)[-2:] - scores.max())
                longer[(*text, int(token))] = p * np.exp(scores[token] - scores.max()) / two.sum()
        law = longer
    seen = Counter(tuple(r.progress.output) for r in requests)
    assert seen.keys() <= law.keys()
    kept = [text for text in law if law[text] * len(requests) > 5]
    want = np.array([law[text] for text in kept])
    got = np.array([seen[text] for text in kept])
    assert stats.chisquare(got, want / want.sum() * got.sum()).pvalue > 0.01


def test_masks_end_at_a_draft_that_is_none(grammars):
    """A broken drafter leaves -1; what follows it is never kept."""
    engine = engine_with(grammars)
    options = replace(GREEDY, ignore_eos=False, structured=StructuredOutput(choice=["a9", "x9"]))
    request = engine.make_request([5], replace(options, bad_words=["a"]))
    (a,), (x, y), free = grammars.encode("a"), grammars.encode("x9"), 2**32 - 1

    def tokens(drafts: list[int]) -> list[set[int]]:
        masks = allowed(grammars, [(1, request)], (2, 3), CFG.vocab_size, np.array([[0, 0], drafts]))
        assert (masks[0] == free).all()
        bits = np.unpackbits(masks[1].view(np.uint8), axis=-1, bitorder="little")[:, : CFG.vocab_size]
        return [set(np.flatnonzero(row).tolist()) for row in bits]

    assert tokens([x, -1])[:2] == [{x}, {y}]
    assert tokens([-1, x]) == [{x}, {*range(CFG.vocab_size)}, {*range(CFG.vocab_size)}]
    assert a not in tokens([x, y])[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids holds 'a'; expected integers"),
        ({"bad_words": "word"}, "bad_words = 'word'; expected strings"),
        ({"bad_words": ["a", " "]}, "bad_words holds ' '; expected words"),
        ({"bad_words": ["a\ud800"]}, r"bad_words holds 'a\\ud800'; expected words"),
        ({"max_thinking_tokens": -1}, "max_thinking_tokens = -1; expected an integer from 0"),
    ],
)
def test_what_means_nothing_is_refused(options, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)


def test_a_dead_end_is_no_error_of_the_model(grammars):
    """The choice has tokens that are left out; one that is complete ends, though its end is left out."""
    ids = grammars.encode("ab")
    for choice, reason in (("abcd", "no_token"), ("ab", "stop")):
        form = StructuredOutput(choice=[choice])
        options = replace(GREEDY, ignore_eos=False, structured=form, allowed_token_ids=ids)
        for depth in (0, 3):
            (r, *_) = run(grammars, replace(options, num_speculative_tokens=depth))
            assert (r.progress.output, r.progress.finish_reason) == (ids, reason)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"allowed_token_ids": [40, 41], "max_thinking_tokens": 0}, "allowed_token_ids leaves out"),
        ({"allowed_token_ids": [40, 41], "max_thinking_tokens": 9}, "allowed_token_ids leaves out"),
        ({"bad_words": ["</think>"], "max_thinking_tokens": 9}, "bad_words leaves out"),
    ],
)
def test_a_budget_that_cannot_end_a_thought_is_refused(grammars, options, says, inside):
    """Unless no thought can begin."""
    engine, prompt = engine_with(grammars), [*PROMPTS[0], *([OPENS] if inside else [])]
    if inside or "bad_words" in options:
        with pytest.raises(RequestError, match=f"forces </think>, token {CLOSES}, which {says}"):
            engine.make_request(prompt, SamplingParams(**options))
    else:
        engine.make_request(prompt, SamplingParams(**options))
        both = replace(SamplingParams(**options), allowed_token_ids=[40, OPENS])
        with pytest.raises(RequestError, match="forces </think>"):
            engine.make_request(prompt, both)


def test_what_the_model_cannot_do_is_refused(grammars, tmp_path):
    engine = engine_with(None)
    for options in (SamplingParams(bad_words=["a"]), SamplingParams(max_thinking_tokens=3)):
        name = "bad_words" if options.bad_words else "max_thinking_tokens"
        with pytest.raises(RequestError, match=f"{name} needs a tokenizer that fits"):
            engine.make_request([5], options)
    with pytest.raises(RequestError, match="allowed_token_ids names token 112; expected ids from 0 to 111"):
        engine.make_request([5], SamplingParams(allowed_token_ids=[3, 112]))
    plain = Tokenizer.from_dir(tiny_tokenizer.write(tmp_path, 104))
    assert plain is not None
    without = make_engine(params(), CFG, grammars=Grammars(plain, CFG.vocab_size, CFG.eos_token_ids))
    with pytest.raises(RequestError, match="</think> is no token of this model"):
        without.make_request([5], SamplingParams(max_thinking_tokens=3))
