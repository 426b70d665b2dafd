"""Texts, acceptance and drafts of an independent implementation, and engines that must repeat them."""

import functools
from dataclasses import replace

import pytest

from mtp_jax.api.propose import propose
from mtp_jax.checkpoint import Loaded, load
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from tests.golden import DECODED, DECODED_FAST, expected, model_dir
from tests.models import accepted, make_engine, serve
from tests.rounding import near, of_model

# Drafts of the others are never accepted.
RIGHT = ("rigged", "rigged_mtp2", "glm47_flash", "dsa_v32_rigged", "dsa_glm52", "glm46", "glm46_bf16")
SPARSE, DENSE = (tuple(v for v in DECODED if v.startswith("dsa") == sparse) for sparse in (True, False))


def marked(variants: tuple[str, ...], fast: tuple[str, ...] = DECODED_FAST, rest: tuple[str, ...] = ()):
    """The variants, of which all but the fast ones are slow. rest: fast ones that hold what others hold."""
    marks = {v: pytest.mark.rest if v in rest else () for v in fast}
    return [pytest.param(v, marks=marks.get(v, pytest.mark.slow)) for v in variants]


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


def check_decoding(variant: str) -> None:
    """Tokens at every depth, and the accepted drafts of every step, are the oracle's."""
    want = expected(variant)
    for depth, request in enumerate(served(engine_of(variant), variant)):
        assert request.progress.output == want["greedy_ids"].tolist()
        if depth:
            assert accepted(request) == want[f"spec_accept.{depth}"].tolist()
            assert variant not in RIGHT or request.progress.speculation.accepted > 0


def check_drafts(variant: str, kind: str, count: int, layers: int = 1) -> None:
    """Drafts after the prompt and their logits are the oracle's."""
    want, engine = expected(variant), engine_of(variant, layers)
    first, ids, logits = propose(engine, want["input_ids"].tolist(), count)
    assert first == want["greedy_ids"][0]
    assert ids.tolist() == want[f"{kind}_ids"].tolist()
    near(logits, want[f"{kind}_logits"], of_model(engine.cfg, len(want["input_ids"]) + count))
