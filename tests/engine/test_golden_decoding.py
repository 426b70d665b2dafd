"""Decoding against an independent implementation: tokens, accepted drafts of every step, and draft logits.

Texts alone would not show a broken drafter, so acceptance must be the oracle's, step by step. Its loop reuses
NextN layer 0, so the variants with two layers are loaded with one; their chain is compared as drafts.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest

from mtp_jax.api.propose import propose
from mtp_jax.checkpoint import Loaded, load
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from tests.golden import DECODED, DECODED_FAST, expected, model_dir
from tests.models import Reference, accepted, make_engine, serve
from tests.rounding import near, of_model

# Drafts of the others are never accepted.
RIGHT = ("rigged", "rigged_mtp2", "glm47_flash", "dsa_v32_rigged", "dsa_glm52", "glm46", "glm46_bf16")
TWO_LAYERS = ("rigged_mtp2", "mtp2")
rest = pytest.mark.rest


@functools.cache
def loaded(variant: str, layers: int = 1) -> Loaded:
    return load(model_dir(variant), dtype="float32", num_nextn_layers=layers)


def engine_of(variant: str, layers: int = 1) -> Engine:
    found = loaded(variant, layers)
    return make_engine(found.params, found.config, max_num_seqs=1, prefill_chunk=64)


def jobs(variant: str):
    want = expected(variant)
    greedy = SamplingParams(temperature=0, max_tokens=len(want["greedy_ids"]))
    prompt = want["input_ids"].tolist()
    return [(prompt, replace(greedy, num_speculative_tokens=depth)) for depth in range(4)]


def served(engine: Engine, variant: str) -> list[Request]:
    """The text at depths 0 to 3, one after the other, in the programs that the deepest needs."""
    deepest = serve(engine, jobs(variant)[-1:], exactly=True)
    return [*(serve(engine, [job], compiled=True)[0] for job in jobs(variant)[:-1]), *deepest]


def close(engine: Engine, prompt: np.ndarray, got: np.ndarray, want: np.ndarray) -> None:
    near(got, want, of_model(engine.cfg, len(prompt) + len(want)))


def marked(fast: tuple[str, ...], *further: str):
    """The variants, of which all but the fast ones are slow. further: what others of them hold already."""
    marks = {v: rest if v in further else () for v in fast}
    return [pytest.param(v, marks=marks.get(v, pytest.mark.slow)) for v in DECODED]


@pytest.mark.parametrize("variant", marked(DECODED_FAST, "dsa_v32_rigged", "dsa_glm52"))
def test_tokens_and_acceptance(variant):
    want = expected(variant)
    for depth, request in enumerate(served(engine_of(variant), variant)):
        assert request.progress.output == want["greedy_ids"].tolist()
        if depth:
            assert accepted(request) == want[f"spec_accept.{depth}"].tolist()
            assert variant not in RIGHT or request.progress.speculation.accepted > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.slow
def test_tokens_and_acceptance_of_shallow_executables(depth):
    """The same in executables that are compiled for the depth, not deeper ones that stop early."""
    want = expected("rigged")
    (request,) = serve(engine_of("rigged"), [jobs("rigged")[depth]], exactly=True)
    assert request.progress.output == want["greedy_ids"].tolist()
    assert accepted(request) == want[f"spec_accept.{depth}"].tolist()


# One of each kind of attention and drafting; model/test_golden compares the logits of all drafts.
KINDS = ("rigged", "dsa_v32", "dsa_glm52", "glm46")


@rest
@pytest.mark.parametrize("variant", marked(KINDS))
def test_drafts_by_recursion(variant):
    want = expected(variant)
    # Later drafts of GLM-5.2 look at what the first one chose.
    kind = "draft_share" if variant == "dsa_glm52" else "draft_rec"
    engine, prompt = engine_of(variant), want["input_ids"]
    first, ids, logits = propose(engine, prompt.tolist(), 4)
    assert first == want["greedy_ids"][0]
    assert ids.tolist() == want[f"{kind}_ids"].tolist()
    close(engine, prompt, logits, want[f"{kind}_logits"])


def test_the_state_before_the_norm_gives_other_drafts():
    """Recycling the wrong hidden state would be noticed: somewhere the oracle's two answers differ."""
    assert any((expected(v)["draft_rec_prenorm_ids"] != expected(v)["draft_rec_ids"]).any() for v in DECODED)


@rest
@pytest.mark.parametrize("variant", TWO_LAYERS)
def test_drafts_by_a_chain_of_layers(variant):
    want = expected(variant)
    engine, prompt = engine_of(variant, layers=2), want["input_ids"]
    _, ids, logits = propose(engine, prompt.tolist(), 2)
    assert ids.tolist() == want["draft_chain_ids"].tolist()
    close(engine, prompt, logits, want["draft_chain_logits"])


@rest
def test_tokens_and_acceptance_of_two_layers():
    found, want = loaded("rigged_mtp2", 2), expected("rigged_mtp2")
    requests = served(engine_of("rigged_mtp2", layers=2), "rigged_mtp2")
    assert all(r.progress.output == want["greedy_ids"].tolist() for r in requests)
    reference = Reference(found.params, found.config)
    for depth in (1, 2):
        told = reference.speculate(want["input_ids"].tolist(), len(want["greedy_ids"]), depth)
        assert accepted(requests[depth]) == told.accepted
        assert sum(told.accepted) > 0
    # The third draft reuses layer 0. It changes no earlier one.
    assert requests[3].progress.speculation.accepted_per_position[2] > 0
