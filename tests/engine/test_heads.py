"""An engine that drafts with heads from elsewhere: the oracle's drafts, text and acceptance, in all modes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.medusa.declared import MedusaTree
from mtp_jax.api.propose import propose
from mtp_jax.checkpoint import Loaded, load
from mtp_jax.decode.keys import TreeShape
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError, RequestError
from mtp_jax.heads.eagle3.declared import Eagle3Config
from mtp_jax.model.params import init_params
from mtp_jax.model.sharding import make_mesh
from mtp_jax.text.grammar import Grammars, StructuredOutput
from mtp_jax.text.tokenizer import Tokenizer
from tests import golden, tiny_tokenizer
from tests.eagle3 import forward
from tests.engine.files import in_files, known, written
from tests.examples import medusa
from tests.golden import EAGLES, model_dir
from tests.models import accepted, make_engine, on_mesh, serve
from tests.rounding import near, of_model

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
HEADS = (*golden.HEADS, "medusa")
rest = pytest.mark.rest


@cache
def loaded(variant: str) -> Loaded:
    if variant == "medusa":
        return medusa.loaded()
    return load(model_dir(variant), model_dir(variant, "draft"), dtype="float32")


def expected(variant: str, of: str = "expected") -> dict[str, np.ndarray]:
    """The oracle's numbers; of Medusa heads numbers computed here, without an engine."""
    return medusa.expected() if variant == "medusa" else golden.expected(variant, of)


def depths(variant: str) -> list[int]:
    """The numbers of drafts of which the oracle has the text and the acceptance, the most first."""
    names = (key for key in expected(variant) if key.startswith("spec_ids."))
    return sorted((int(name.rpartition(".")[2]) for name in names), reverse=True)


def engine_of(variant: str, **config: Any) -> Engine:
    """Pages and chunks of 16 tokens: prompts of the oracle, of 32, take two of either."""
    found = loaded(variant)
    return make_engine(found.params, found.config, **{"num_speculative_tokens": depths(variant)[0], **config})


def tree_engine(variant: str, tree: str, **config: Any) -> Engine:
    nodes = TreeShape.of(tree).nodes
    return engine_of(variant, tree=tree, num_speculative_tokens=nodes, verifier="coupled", **config)


def job(variant: str, depth: int, tokens: int = 32) -> tuple[list[int], SamplingParams]:
    prompt = expected(variant)["input_ids"].tolist()
    return prompt[:tokens], replace(GREEDY, num_speculative_tokens=depth)


def crowd(variant: str, shortest: int) -> list[tuple[list[int], SamplingParams]]:
    return [job(variant, 3, tokens) for tokens in range(shortest, shortest + 8, 2)]


def told(requests: Sequence[Request]) -> list[tuple[list[int], list[int]]]:
    return [(r.progress.output, accepted(r)) for r in requests]


def kept(requests: Sequence[Request]) -> int:
    return sum(map(sum, map(accepted, requests)))


# DFlash2 has DFlash's form, and more.
MARKS = {v: rest for v in HEADS if v not in ("eagle3", "dspark")} | {"dflash": pytest.mark.slow}
FORMS = [pytest.param(v, marks=MARKS.get(v, ())) for v in HEADS]


@pytest.mark.parametrize("variant", FORMS)
def test_drafts_text_and_acceptance_are_the_oracles(variant: str):
    """From chunks and from cached pages."""
    engine, want, (most, *fewer) = engine_of(variant, max_num_seqs=1), expected(variant), depths(variant)
    first, ids, logits = propose(engine, job(variant, most)[0], most)
    assert first == want["greedy_ids"][0]
    assert ids.tolist() == want["draft_rec_ids" if variant in EAGLES else "draft_ids"].tolist()
    if variant in EAGLES:
        head = logits[np.isfinite(logits)].reshape(most, -1)
        near(head, want["draft_rec_logits"], of_model(engine.cfg, len(job(variant, most)[0]) + most))
    engine.flush_prefix_cache()
    for depth in (most, *fewer):
        (request,) = serve(engine, [job(variant, depth)], exactly=depth == most, compiled=True)
        assert request.progress.cached_tokens == (0 if depth == most else 16)
        assert request.progress.output == want[f"spec_ids.{depth}"].tolist() == want["greedy_ids"].tolist()
        assert accepted(request) == want[f"spec_accept.{depth}"].tolist()
        assert kept([request]) > 3


@rest
@pytest.mark.parametrize(
    "variant", [v if v == "eagle3" else pytest.param(v, marks=pytest.mark.slow) for v in HEADS]
)
def test_pages_that_steps_without_drafts_left_draft_as_well(variant: str):
    engine, want = engine_of(variant, max_num_seqs=1), expected(variant)
    engine.prepare([engine.make_request(*job(variant, depths(variant)[0]))])
    (request,) = serve(engine, [job(variant, 0)], exactly=True)
    assert request.progress.output == want["greedy_ids"].tolist()
    (request,) = serve(engine, [job(variant, 3)], compiled=True)
    assert request.progress.cached_tokens == 16
    assert accepted(request) == want["spec_accept.3"].tolist()
    prompt, params = job(variant, 3)
    longer = ([*prompt, *want["greedy_ids"][:17].tolist()], params)
    (hit,) = serve(engine, [longer], compiled=True)
    engine.flush_prefix_cache()
    (cold,) = serve(engine, [longer], compiled=True)
    assert (hit.progress.cached_tokens, cold.progress.cached_tokens) == (48, 0)
    assert told([hit]) == told([cold])
    assert kept([hit]) > 0


GIVEN = "[[0], [0, 0], [1], [0, 0, 0], [0, 1], [2], [1, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0, 0]]"


@rest
def test_a_tree_of_medusa_heads_accepts_the_ways_of_its_text():
    """All nodes, and the first nodes by request, from chunks and from cached pages."""
    engine, want = tree_engine("medusa", GIVEN, max_num_seqs=1), expected("medusa")
    told, ways = medusa.Text(want["input_ids"].tolist(), 24), json.loads(GIVEN)
    counts = {depth: told.accepted(ways[:depth]) for depth in (10, 6, 3)}
    for depth, count in counts.items():
        (request,) = serve(engine, [job("medusa", depth)], exactly=depth == 10, compiled=True)
        assert request.progress.cached_tokens == (0 if depth == 10 else 16)
        assert request.progress.output == want["greedy_ids"].tolist()
        assert accepted(request) == count
    assert sum(counts[10]) > sum(want["spec_accept.4"])
    assert len(counts[10]) < len(want["spec_accept.4"])


@pytest.mark.parametrize(
    ("variant", "tree", "message"),
    [
        pytest.param("medusa", "3x3x7", "a Medusa head; leave it out, or give lists of ranks", marks=rest),
        ("eagle3", "[[0], [1]]", "lists ranks.* EAGLE-3 head; .*TOPKxSTEPSxNODES"),
        ("dspark", "[[0], [1]]", "lists ranks.* DSpark head; leave it out$"),
        pytest.param(
            "medusa",
            "[[0], [1], [0,0], [0,0,0], [0,0,0,0], [0,0,0,0,0]]",
            "are 5, but the Medusa head makes 4",
            marks=rest,
        ),
    ],
)
def test_a_tree_of_another_kind_is_refused(variant: str, tree: str, message: str):
    with pytest.raises(ConfigError, match=message):
        tree_engine(variant, tree)


GROWN = [("3x3x7", "t3_s3_n8"), pytest.param("4x4x11", "t4_s4_n12", marks=pytest.mark.slow)]


@rest
@pytest.mark.parametrize(
    "variant", [v if v == "eagle3" else pytest.param(v, marks=pytest.mark.slow) for v in EAGLES]
)
@pytest.mark.parametrize(("tree", "name"), GROWN)
def test_trees_text_and_acceptance_are_the_oracles(variant: str, tree: str, name: str):
    """From chunks and from cached pages, over which the drafter's own rows run on; chains accept less."""
    engine, want = tree_engine(variant, tree, max_num_seqs=1), expected(variant, "trees")
    prompt, params = job(variant, engine.config.num_speculative_tokens)
    for cached in (0, 16):
        (request,) = serve(engine, [(prompt, params)], exactly=True)
        assert request.progress.cached_tokens == cached
        assert request.progress.output == want[f"tree.{name}.loop_ids"].tolist()
        assert accepted(request) == want[f"tree.{name}.loop_accept"].tolist()
    steps = [len(expected(variant)[f"spec_accept.{n}"]) for n in depths(variant)]
    assert len(accepted(request)) <= min(steps)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*EAGLES, "medusa"])
@pytest.mark.parametrize(
    "config", [{}, {"suffix_drafts": True}, {"kv_cache_dtype": "fp8"}, {"num_pages": 8}], ids=repr
)
def test_trees_change_no_text(variant: str, config: dict[str, Any]):
    """Greedy rows and rows that draw, in crowds; chains and nothing by request, in the same steps."""
    given = str(json.loads(GIVEN)[:9])
    engine = tree_engine(variant, given if variant == "medusa" else "3x3x9", **config)
    jobs = [(prompt, replace(p, max_tokens=40)) for prompt, p in crowd(variant, 14)]
    jobs += [(prompt, replace(p, temperature=0.7, seed=3, repetition_penalty=1.1)) for prompt, p in jobs]
    asked = [
        [(p, replace(o, num_speculative_tokens=n)) for (p, o), n in zip(jobs, each, strict=True)]
        for each in ([9, 9, 2, 9] * 2, [0] * 8)
    ]
    drafted, plain = (serve(engine, each) for each in asked)
    assert [r.progress.output for r in drafted] == [r.progress.output for r in plain]
    assert kept(drafted) > 20
    assert (engine.stats().preemptions > 0) == ("num_pages" in config)


@pytest.mark.slow
@pytest.mark.parametrize("variant", HEADS)
def test_preemption_changes_nothing(variant: str):
    engine = engine_of(variant, num_pages=6)
    jobs = [(prompt, replace(params, max_tokens=40)) for prompt, params in crowd(variant, 14)]
    requests, alone = serve(engine, jobs), [serve(engine_of(variant), [each])[0] for each in jobs]
    assert engine.stats().preemptions > 0
    assert told(requests) == told(alone)
    assert kept(requests) > 10


@pytest.mark.slow
@pytest.mark.parametrize("variant", HEADS)
def test_a_mesh_changes_nothing(variant: str):
    found, mesh = loaded(variant), make_mesh(2, 2)
    params = on_mesh(found.params, mesh, found.config)
    engine = make_engine(params, found.config, mesh, num_speculative_tokens=depths(variant)[0])
    requests = serve(engine, crowd(variant, 26))
    assert told(requests) == told(serve(engine_of(variant), crowd(variant, 26)))
    assert kept(requests) > 10


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "tree"), [("eagle3", "3x3x7"), ("medusa", str(json.loads(GIVEN)[:7]))])
def test_a_mesh_changes_no_trees(variant: str, tree: str):
    mesh = make_mesh(2, 2)
    found = loaded(variant)
    params, config = on_mesh(found.params, mesh, found.config), tree_engine(variant, tree).config
    sizes = {name: getattr(config, name) for name in ("tree", "num_speculative_tokens", "verifier")}
    jobs = [(prompt, replace(p, num_speculative_tokens=7)) for prompt, p in crowd(variant, 26)]
    requests = serve(make_engine(params, found.config, mesh, **sizes), jobs)
    assert told(requests) == told(serve(tree_engine(variant, tree), jobs))
    assert kept(requests) > 10


@pytest.mark.slow
@pytest.mark.parametrize("variant", HEADS)
def test_pages_that_went_to_the_host_and_to_files_come_back_with_the_heads_part(variant: str, tmp_path: Path):
    sizes = {"max_num_seqs": 1, "num_pages": 6, "host_cache_gib": 0.01, **in_files(tmp_path)}
    engine, other = (known(engine_of(variant, **sizes)) for _ in range(2))
    want = expected(variant)
    prompt, params = job(variant, 3)
    serve(engine, [(prompt, params)], exactly=True)
    for step in (-1, -2):
        serve(engine, [(prompt[::step], params)], exactly=True)
    (request,) = serve(engine, [(prompt, params)], compiled=True)
    assert engine.stats().hits_by_tier["host"] == request.progress.cached_tokens == 16
    assert written(engine) > 0
    (fetched,) = serve(other, [(prompt, params)], exactly=True)
    assert other.stats().hits_by_tier["file"] == fetched.progress.cached_tokens == 16
    for got in (request, fetched):
        assert got.progress.output == want["greedy_ids"].tolist()
        assert accepted(got) == want["spec_accept.3"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"suffix_drafts": True}, {"kv_cache_dtype": "fp8"}], ids=repr)
@pytest.mark.parametrize("variant", HEADS)
def test_matches_and_an_fp8_cache_change_no_text(variant: str, config: dict[str, Any]):
    engine, jobs = engine_of(variant, **config), crowd(variant, 26)
    undrafted = [(prompt, replace(params, num_speculative_tokens=0)) for prompt, params in jobs]
    drafted, plain = serve(engine, jobs), serve(engine, undrafted)
    assert [r.progress.output for r in drafted] == [r.progress.output for r in plain]
    assert kept(drafted) > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trunk", "variant"), [("dsa_v32_rigged", EAGLES[1]), ("glm46", EAGLES[0]), (golden.V4[0], EAGLES[1])]
)
def test_a_head_beside_other_trunks(trunk: str, variant: str):
    """Random heads, of either shape: their drafts without a cache, and the trunk's own text.

    A tap of DeepSeek-V4 is the mean of its streams; its pages have 128 tokens, and its prompt 272.
    """
    head, found, want = (
        loaded(variant).config.drafter,
        load(model_dir(trunk), dtype="float32"),
        expected(trunk),
    )
    assert isinstance(head, Eagle3Config)
    layer = replace(head.layer, hidden_size=found.config.hidden_size)
    taps, ids = (1, 2, found.config.num_hidden_layers), want["input_ids"]
    cfg = replace(found.config.with_nextn(()), drafter=replace(head, layer=layer, taps=taps))
    own = init_params(cfg, jax.random.key(1)).drafter
    params = replace(found.params, nextn=(), drafter=own)
    sizes: dict[str, Any] = {"page_size": 128, "max_model_len": 300} if cfg.compressed else {}
    engine = make_engine(params, cfg, max_num_seqs=1, num_speculative_tokens=5, **sizes)
    first, drafts, logits = propose(engine, ids.tolist(), 5)
    plain = forward(params, cfg, ids, np.append(ids[1:], first))
    assert drafts.tolist() == plain["draft_ids"].tolist()
    near(logits, plain["draft_logits"], of_model(cfg, len(ids) + 5))
    count = len(want["greedy_ids"])
    (request,) = serve(engine, [(ids.tolist(), replace(GREEDY, max_tokens=count))], exactly=True)
    assert request.progress.output == want["greedy_ids"].tolist()
    assert request.progress.speculation.drafted > count


@pytest.mark.slow
@pytest.mark.parametrize("variant", HEADS)
def test_a_grammar_leaves_the_tokens_of_no_drafts(tmp_path: Path, variant: str):
    found, size = loaded(variant), loaded(variant).config.vocab_size
    tokenizer = Tokenizer.from_dir(tiny_tokenizer.write(tmp_path, size))
    assert tokenizer is not None
    grammars = Grammars(tokenizer, size, found.config.eos_token_ids)
    engine = make_engine(found.params, found.config, grammars=grammars, num_speculative_tokens=3)
    shaped = replace(GREEDY, ignore_eos=False, structured=StructuredOutput(regex="[!-Z]{16,20}"))
    jobs = [
        [(job(variant, 0)[0], replace(shaped, num_speculative_tokens=depth)), job(variant, depth)]
        for depth in (3, 0)
    ]
    drafted, plain = (serve(engine, each) for each in jobs)
    assert [r.progress.output for r in drafted] == [r.progress.output for r in plain]
    assert kept(drafted) > 3


@pytest.mark.slow
@pytest.mark.parametrize("variant", HEADS)
def test_a_head_of_nan_costs_drafts_and_no_request(variant: str):
    found = loaded(variant)
    head: Any = found.params.drafter
    if isinstance(head, MedusaTree):
        broken = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), head)
    else:
        broken = replace(head, norm=jnp.full_like(head.norm, jnp.nan))
    engine = make_engine(replace(found.params, drafter=broken), found.config, num_speculative_tokens=3)
    requests = serve(engine, crowd(variant, 26))
    plain = serve(
        engine, [(prompt, replace(p, num_speculative_tokens=0)) for prompt, p in crowd(variant, 26)]
    )
    assert [r.progress.output for r in requests] == [r.progress.output for r in plain]
    # The likeliest of no numbers is token 0, which the trunk may write, too.
    assert kept(requests) < 0.1 * engine.stats().draft_tokens


@rest
def test_a_tree_has_no_more_children_than_there_are_tokens():
    found = loaded("eagle3")
    few = replace(found.config, vocab_size=20)
    with pytest.raises(ConfigError, match="has 21 children per node, but the model has 20 tokens"):
        make_engine(found.params, few, tree="21x1x8", verifier="coupled", num_speculative_tokens=8)


@rest
def test_a_head_makes_no_more_drafts():
    with pytest.raises(RequestError, match="5 drafts; the DSpark head makes 4 at most"):
        propose(engine_of("dspark", max_num_seqs=1), [5], 5)
    with pytest.raises(ConfigError, match="the Medusa head makes 4 drafts; use 4 or less"):
        engine_of("medusa", num_speculative_tokens=5)
    with pytest.raises(ConfigError, match="the DFlash head makes 4 drafts; use 4 or less"):
        engine_of("dflash", num_speculative_tokens=5)
