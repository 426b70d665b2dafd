"""Trees as a drafter grows them: the choice of nodes, a plain construction without a cache, and the law."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.decode.drafter.grow import Candidates
from mtp_jax.decode.keys import TreeShape
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError
from mtp_jax.heads.build import build
from mtp_jax.model.config import IndexerConfig, ModelConfig
from tests.decode.law import CFG, Case, emitted, p_values
from tests.models import TINY, Reference, _run_nextn, accepted, make_engine, prompts, rigged, serve

# Every node sees more rows than its layer chooses. DeepSeek-V3.2 has groups of experts, GLM-5.1 has none.
INDEX = IndexerConfig(heads=4, dim=8, topk=8, shared=(False, False))
V32 = replace(TINY, indexer=INDEX)
GLM5 = replace(TINY, n_group=1, topk_group=1, indexer=replace(INDEX, interleaved=True))


def candidates(rng: np.random.Generator, rows: int) -> Candidates:
    """Random trees of 9 candidates, with equal scores, and in the last two rows one score everywhere."""
    parents = np.stack([[rng.integers(-1, i) for i in range(9)] for _ in range(rows)])
    scores = np.zeros((rows, 9), np.float32)
    for row, i in np.ndindex(rows, 9):
        above = 1 if parents[row, i] < 0 else scores[row, parents[row, i]]
        scores[row, i] = above * (rng.choice([0, 0.5, 1]) if row < rows - 2 else rows - 1 - row)
    return Candidates(*map(jnp.asarray, (rng.integers(0, 9, (rows, 9)), scores, parents)))


def test_the_best_candidates_are_a_tree_of_any_size(rng):
    rows, nodes = 60, 6
    found = candidates(rng, rows)
    count = rng.integers(0, nodes + 1, rows)
    best = jax.jit(Candidates.best, static_argnums=1)(found, nodes, count)
    tokens, parents = map(np.asarray, best)
    found = jax.tree.map(np.asarray, found)
    for row in range(rows):
        ranked = sorted(range(9), key=lambda i: (-found.scores[row, i], i))
        kept = sorted(ranked[: count[row]])
        assert tokens[row, : count[row]].tolist() == found.tokens[row, kept].tolist()
        above = [int(found.parents[row, i]) for i in kept]
        assert parents[row, : count[row]].tolist() == [0 if p < 0 else kept.index(p) + 1 for p in above]
        assert (parents[row] <= np.arange(nodes)).all()


def plain_tree(told: Reference, ids: list[int], shape: TreeShape) -> set[tuple[int, ...]]:
    """The ways to all nodes of a tree after these ids, each by a pass over the whole text."""
    begin, states = len(ids) - 1, dict[tuple[int, ...], np.ndarray]()

    def after(way: tuple[int, ...]) -> list[tuple[float, int]]:
        rows, at = np.array(told._trunk(ids)[0]), begin + len(way) - 1
        for i in range(len(way)):
            rows[begin + i] = states[way[:i]]
        z, logits = _run_nextn(told.params, told.cfg, 0, told._padded([*ids[1:], *way]), rows)
        states[way], p = np.asarray(z[at]), np.asarray(jax.nn.softmax(logits[at]))
        return [(float(p[t]), int(t)) for t in np.argsort(-p)[: shape.topk]]

    level = [(p, (t,)) for p, t in after(())]
    found = [*level]
    for _ in range(1, shape.steps):
        beams = sorted(level, reverse=True)[: shape.topk]
        level = [(score * p, (*way, t)) for score, way in beams for p, t in after(way)]
        found += level
    return {way for _, way in sorted(found, reverse=True)[: shape.nodes]}


@pytest.mark.rest
@pytest.mark.parametrize(
    ("cfg", "tree"),
    [
        pytest.param(TINY, "3x3x8", id="dense"),
        pytest.param(V32, "4x3x12", id="v32", marks=pytest.mark.slow),
        pytest.param(GLM5, "4x3x12", id="glm5"),
    ],
)
def test_an_engine_accepts_the_ways_of_plain_trees(cfg: ModelConfig, tree: str):
    """The text is that of depth 0, and a chain of as many steps takes more of them."""
    shape, told, tokens = TreeShape.of(tree), Reference(rigged(cfg, noise=1.3), cfg), 24
    engine = make_engine(
        told.params,
        cfg,
        tree=tree,
        num_speculative_tokens=shape.nodes,
        verifier="coupled",
        max_num_seqs=2,
        max_model_len=80,
    )
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    some = prompts(2, 20)
    requests, steps = serve(engine, [(prompt, params) for prompt in some]), []
    for prompt, request in zip(some, requests, strict=True):
        plain, chain = told.speculate(prompt, tokens), told.speculate(prompt, tokens, shape.steps)
        assert request.progress.output == plain.ids
        ids, counts = [*prompt, plain.ids[0]], []
        while len(ids) < len(prompt) + tokens:
            ways, way = plain_tree(told, ids, shape), ()
            while (following := (*way, int(told.logits([*ids, *way])[-1].argmax()))) in ways:
                way = following
            ids += following
            counts.append(len(way))
        assert accepted(request) == counts
        steps.append((len(counts), len(chain.accepted)))
    trees, chains = map(sum, zip(*steps, strict=True))
    assert trees < chains


@pytest.mark.parametrize(
    "grammar", [pytest.param(False, marks=pytest.mark.rest), pytest.param(True, marks=pytest.mark.slow)]
)
def test_lossless(grammar: bool):
    """Rows that draw, with 0 to 3 nodes each; ``tests/decode/test_coupled.py`` has the control."""
    tree = build(CFG, tree=TreeShape(2, 2, 3))
    assert min(p_values(tree, CFG, "coupled", grammar, reader=build(CFG))) > 1e-4


@pytest.mark.slow
def test_a_tree_that_draws_accepts_more_than_its_first_way():
    tree, chain = (
        emitted("sampled", "coupled", False, Case(build(CFG, tree=shape)))
        for shape in (TreeShape(2, 2, 3), None)
    )
    # Three steps of 3 nodes, and of 2 drafts.
    assert tree.accepted[tree.drafted == 9].mean() > 1.1 * chain.accepted[chain.drafted == 6].mean()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4x3", "expected TOPKxSTEPSxNODES"),
        ("4x3x-1", "expected TOPKxSTEPSxNODES"),
        ("1x3x3", "one child per node is a chain; use num_speculative_tokens"),
        ("8x5x20", "runs the draft layer over 8 nodes in each of 4 steps"),
        ("4x0x3", "expected 1 step or more"),
        ("9999x1x8", "has 9999 children per node; expected at most 31"),
        ("32x1x8", "has 32 children per node; expected at most 31"),
        ("4x3x3", "expected 4 to 31 nodes"),
        ("4x3x32", "expected 4 to 31 nodes"),
        ("2x2x7", "expected 3 to 6 nodes"),
        ("[[0], [1]", "expected lists of ranks in JSON"),
        ("[0, 1]", "expected lists of ranks in JSON"),
        ('[["0"]]', "expected lists of ranks in JSON"),
        ("[[0], [1, 0]]", r"has \[1, 0\]; expected every node once, behind its parent"),
        ("[[0], [31]]", r"has \[31\]; expected .* ranks from 0 to 30"),
        ("[[0], [-1]]", r"has \[-1\]"),
        ("[[0], []]", r"has \[\]"),
        ("[[0], [1], [0]]", r"has \[0\]; expected every node once"),
        ("[[0], [0, 0]]", "has 2 nodes; expected 3 to 31"),
        ("[]", "has 0 nodes; expected 1 to 31"),
        (
            str([[a, b][:n] for a in range(6) for b in range(6) for n in (1, 2) if n > 1 or not b]),
            "has 42 nodes",
        ),
    ],
)
def test_sizes(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        TreeShape.of(text)
    assert TreeShape.of("4x3x12") == TreeShape(4, 3, 12)
    assert TreeShape.of("[[0], [0, 2], [1]]") == TreeShape(3, 2, 3, ((0,), (0, 2), (1,)))
