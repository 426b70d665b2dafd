"""Options out of range are refused at once; the message names the option, the value and what is allowed."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from mtp_jax.api import local
from mtp_jax.api.options import LLMOptions
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.keys import SamplingMode, StepKey
from mtp_jax.decode.step import Step
from mtp_jax.engine.config import EngineConfig, EngineOptions
from mtp_jax.engine.defaults import Target
from mtp_jax.engine.request import Request, Status
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.scheduler import Scheduler
from mtp_jax.engine.speculation import Speculation
from mtp_jax.engine.validate import check_config
from mtp_jax.errors import ConfigError, MtpJaxError, RequestError
from mtp_jax.model.backend import xla
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import config_of
from mtp_jax.options import declared, option
from tests import golden
from tests.models import TINY, engine_config, make_engine

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "wrong", "allowed"),
    [
        ("temperature", [-0.1, NAN, INF, "1", None, True], "from 0"),
        ("top_p", [-0.1, -1, 1.1, NAN, None], "from 0 to 1"),
        ("min_p", [-0.1, 1.5, NAN], "from 0 to 1"),
        ("top_k", [-2, 1.5, "3", None, True], "an integer from -1"),
        ("presence_penalty", [-2.1, 2.1, NAN], "from -2 to 2"),
        ("frequency_penalty", [-2.1, 2.1, INF], "from -2 to 2"),
        ("repetition_penalty", [0, -1, 1e-40, 101, INF, NAN], "from 0.01 to 100"),
        ("n", [0, -1, 1025, 1.0, None], "an integer from 1 to 1024"),
        ("max_tokens", [0, -5, 2.0, True], "an integer from 1"),
        ("min_tokens", [-1, 0.5, None], "an integer from 0"),
        ("seed", [-1, 2**32, 1.5], "an integer from 0"),
        ("logprobs", [-1, 21, 1.5], "an integer from 0 to 20"),
        ("prompt_logprobs", [-1, 21, True], "an integer from 0 to 20"),
        ("num_speculative_tokens", [-1, 32, 1.5], "an integer from 0 to 31"),
        ("stop", ["", ["a", ""], [3]], "non-empty strings"),
        ("stop_token_ids", [[2.0], ["2"], [3, None]], "expected integers"),
        ("logit_bias", [{1: 101}, {1: NAN}, {"1": 1}], "from -100 to 100"),
    ],
)
def test_sampling_params(name, wrong, allowed):
    for value in wrong:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        message = str(caught.value)
        assert message.startswith(name)
        assert allowed in message
        if name not in ("stop", "stop_token_ids", "logit_bias"):
            assert repr(value) in message


@pytest.mark.parametrize(
    "edge",
    [
        {"temperature": 0},
        {"top_p": 1},
        {"top_p": 0},
        {"min_p": 1},
        {"top_k": -1},
        {"top_k": 10**9},
        {"max_tokens": None},
        {"max_tokens": 5, "min_tokens": 5},
        {"max_tokens": None, "min_tokens": 5},
        {"seed": 2**32 - 1},
        {"logprobs": 20, "prompt_logprobs": 0},
        {"logit_bias": {3: -100}},
        {"stop": "x"},
        {"stop": ("x", "y")},
    ],
)
def test_the_edges_are_allowed(edge):
    params = SamplingParams(**edge)
    for name, value in edge.items():
        assert getattr(params, name) == value


def test_min_tokens_above_max_tokens():
    with pytest.raises(RequestError, match="min_tokens = 6 is above max_tokens = 5"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_stop_strings_are_a_tuple():
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_iterators_are_read_once():
    given: dict[str, Any] = {"stop": iter(["a", "b"]), "stop_token_ids": map(int, "34")}
    params = SamplingParams(**given)
    assert (params.stop_strings, params.stop_token_ids) == (("a", "b"), (3, 4))
    given = {"stop_token_ids": iter([1, "x"])}
    with pytest.raises(RequestError, match="stop_token_ids holds 'x'"):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("name", "wrong", "allowed"),
    [
        ("num_speculative_tokens", [-1, 32, 1.0, None, True], "an integer from 0 to 31"),
        ("max_num_seqs", [0, 5000, "8"], "an integer from 1 to 4096"),
        ("max_model_len", [1, 0, 2.5], "an integer from 2"),
        ("page_size", [0, 5000], "an integer from 1 to 4096"),
        ("prefill_chunk", [0, 2**17], "an integer from 1"),
        ("drafting", ["none", None], "one of 'greedy', 'sampled'"),
        ("verifier", ["typical", "rejection", 1], "one of 'block', 'coupled'"),
        ("dtype", ["float16", "fp8"], "one of 'float32', 'bfloat16'"),
    ],
)
def test_engine_config(name, wrong, allowed):
    for value in wrong:
        with pytest.raises(ConfigError) as caught:
            EngineConfig(**{name: value})
        message = str(caught.value)
        assert message.startswith(f"{name} = {value!r}")
        assert allowed in message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_speculative_tokens": 5}, "num_speculative_tokens = 5, but tree = '4x3x12' has 12 drafts"),
        ({"verifier": "block"}, "tree = '4x3x12' with verifier = 'block': .*; take verifier = 'coupled'"),
        (
            {"synthetic_acceptance": 2.5},
            "with synthetic_acceptance = 2.5: a law keeps drafts of chains; leave",
        ),
        (
            {"adaptive_verification": True, "adaptive_depth": True},
            ": a ranked step has drafts of chains",
        ),
        ({"tree": "4by3"}, "expected TOPKxSTEPSxNODES"),
    ],
)
def test_trees_and_other_options(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**{"tree": "4x3x12", **given})


def test_a_tree_says_the_number_of_drafts_and_their_verifier():
    found = LLMOptions("model", tree="4x4x11").engine(TINY, Target())
    assert (found.num_speculative_tokens, found.verifier) == (11, "coupled")
    # The drafter itself writes 12 rows, a chain of 4 drafts writes 4.
    assert [found.pages_for_step(52, depth, 200) for depth in (11, 4)] == [1, 1]
    assert [found.pages_for_step(53, depth, 200) for depth in (11, 4)] == [2, 1]
    assert found.without_drafts().tree is None


def test_an_option_that_programs_see(monkeypatch):
    """It is declared, a field of ``Decoding`` has its name, and a step reads it: nothing passes it on."""

    @dataclass(frozen=True, kw_only=True)
    class Louder(EngineConfig):
        loud: bool = option(False, "emit louder tokens", excludes={"tree": "a tree is quiet"})

    @dataclass(frozen=True)
    class Sounding(Decoding):
        loud: bool = False

    monkeypatch.setattr(local, "Decoding", Sounding)
    found = local.decoding_of(TINY, Louder(loud=True), xla())
    assert Step(found, StepKey(1, 1, 1, SamplingMode())).decoding == replace(found, loud=True)
    with pytest.raises(ConfigError, match="loud = True with tree = '2x2x3': a tree is quiet; leave one"):
        Louder(loud=True, tree="2x2x3", verifier="coupled", num_speculative_tokens=3)


@pytest.mark.parametrize(
    ("cfg", "own"),
    [(TINY.with_nextn(()), "no NextN layers"), (TINY.with_nextn((False, True)), "2 NextN layers")],
)
def test_drafters_that_grow_no_trees(cfg: ModelConfig, own: str):
    config = engine_config(tree="2x2x3", num_speculative_tokens=3, verifier="coupled", suffix_drafts=True)
    with pytest.raises(
        ConfigError, match=f"tree = '2x2x3' is grown by one NextN layer.* with {own}; leave it"
    ):
        check_config(cfg, config, 1)


@pytest.mark.parametrize("pages", [0, -3, 1.5, "9"])
def test_num_pages(pages):
    with pytest.raises(ConfigError, match=f"num_pages = {pages!r}"):
        make_engine(num_pages=pages)


def test_errors_are_of_one_family():
    assert issubclass(ConfigError, MtpJaxError)
    assert issubclass(RequestError, MtpJaxError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(RequestError, ValueError)


def test_pages_hold_the_window_past_the_end():
    config = EngineConfig(num_speculative_tokens=3, max_model_len=64, page_size=16)
    assert [config.pages_for(n) for n in (1, 13, 14, 29, 30)] == [1, 1, 2, 2, 3]
    assert config.columns == config.pages_for(64) == 5


def test_speculation_adds_up():
    one = Speculation([3, 0, 1], [3, 3, 3])
    assert (one.steps, one.drafted, one.accepted) == (3, 9, 4)
    assert one.accepted_per_position == (2, 1, 1)
    assert one.acceptance_length == pytest.approx(7 / 3)
    both = one + Speculation([1], [1])
    assert (both.steps, both.drafted, both.accepted) == (4, 10, 5)
    assert Speculation().acceptance_length == 0.0
    assert Speculation().accepted_per_position == ()


def test_a_request_knows_its_times():
    r = Request(0, (1,), SamplingParams(), 0, 4, 3, 5)
    r.progress.emit([], 1.0)
    assert r.progress.first_token_at is None
    r.progress.emit([4], 2.0)
    r.progress.emit([5], 3.0)
    assert (r.progress.first_token_at, r.progress.last_token_at) == (2, 3)
    r.progress.end("stop", 4.0)
    assert (r.status, r.progress.finish_reason, r.progress.output) == (Status.FINISHED, "stop", [4, 5])
    assert r.progress.finished_at == 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"priority": None}, "priority = None; expected an integer"),
        ({"priority": "1"}, "priority = '1'"),
        ({"cache_salt": None}, "cache_salt = None; expected a string"),
        ({"cache_salt": "\ud800"}, "cache_salt = "),
    ],
)
def test_options_of_a_request(options, says):
    with pytest.raises(RequestError, match=says):
        make_engine().make_request([3, 4], SamplingParams(), **options)


def test_without_max_tokens_an_answer_takes_what_the_cache_holds():
    engine = make_engine(num_pages=2, num_speculative_tokens=3)
    assert engine.config.longest == 2 * 16 - 3
    request = engine.make_request([3] * 5, SamplingParams(max_tokens=None))
    assert request.max_tokens == 2 * 16 - 3 - 5
    with pytest.raises(RequestError, match=r"30 tokens > 28 maximum.* raise num_pages = 2"):
        engine.make_request([3] * 30, SamplingParams(max_tokens=None))


def test_a_cache_that_no_memory_holds_is_refused():
    with pytest.raises(ConfigError, match=r"cache takes [\d,.]+ GiB, this computer has [\d,.]+; lower num"):
        make_engine(num_pages=2**22, page_size=4096)
    with pytest.raises(ConfigError, match="num_pages = 16777219; expected an integer from 1 to 4194304"):
        Scheduler(engine_config(max_model_len=2**24, page_size=1, max_num_seqs=1), shards=1)


def test_without_a_seed_every_start_draws_its_own():
    model = config_of(golden.raw_config("rigged"))
    seeds = {LLMOptions().engine(model, Target()).seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(declared(EngineConfig)["seed"].allows(seed) for seed in seeds)
    assert {LLMOptions(seed=7).engine(model, Target()).seed for _ in range(2)} == {7}
