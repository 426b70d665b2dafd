"""Sizes that nobody gave follow from the model, the device and its memory; sizes that were given stay."""

from dataclasses import replace
from typing import Any

import pytest

from mtp_jax.api.options import LLMOptions
from mtp_jax.decode.launches import UNROLLED
from mtp_jax.engine.buckets import Buckets
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.defaults import LONG, Target, slots, told, unasked
from tests.models import TINY

JOYAI = replace(TINY, n_routed_experts=256, num_experts_per_tok=8, max_position_embeddings=131072)
DENSE = replace(JOYAI, n_routed_experts=0)
GPU, WHOLE_TABLE = Target(cpu=False), Target(cpu=False, reach="table")
GIVEN: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 6, "prefill_chunk": 96, "num_pages": 70}


def engine(on: Target = GPU, cfg=JOYAI, **given: Any) -> EngineConfig:
    return LLMOptions(**given).engine(cfg, on)


@pytest.mark.parametrize(
    ("cfg", "on", "length", "chunk"),
    [
        (JOYAI, GPU, 131072, 8192),
        (replace(JOYAI, num_experts_per_tok=4), GPU, 131072, LONG),
        (replace(JOYAI, n_routed_experts=128), GPU, 131072, 4096),  # 250 rows of an expert take 4,000 tokens
        (DENSE, GPU, 131072, 256),
        (JOYAI, Target(cpu=False, reach="keys"), 131072, 256),
        (JOYAI, WHOLE_TABLE, LONG, 256),
        (JOYAI, Target(), 131072, 256),
        (JOYAI, Target(reach="table"), LONG, 256),
        (replace(JOYAI, max_position_embeddings=2048), WHOLE_TABLE, 2048, 256),
    ],
)
def test_length_and_chunk(cfg, on, length, chunk):
    found = engine(on, cfg)
    assert (found.max_model_len, found.prefill_chunk, found.max_num_seqs) == (length, chunk, 8)


@pytest.mark.parametrize("on", [GPU, WHOLE_TABLE, Target()])
def test_given_sizes_stay(on):
    found = engine(on, **GIVEN)
    assert {name: getattr(found, name) for name in GIVEN} == GIVEN
    assert found.memory_fraction is None
    kept, why = unasked(found, LLMOptions(**GIVEN), 1, lambda: 10**6)
    assert (kept, why) == (found, "as the options say")


def test_a_share_of_memory_is_the_default_of_a_gpu_alone():
    assert engine().memory_fraction == 0.94
    assert engine(memory_fraction=0.5).memory_fraction == 0.5
    assert engine(Target()).memory_fraction is None


@pytest.mark.parametrize(
    ("tokens", "drafts", "chunk", "shards", "micro_batches", "expected"),
    [
        (193 * LONG, 3, 8192, 1, 1, 128),
        (64 * LONG, 3, 8192, 1, 1, 64),
        (64 * LONG - 1, 3, 8192, 1, 1, 32),
        (9**9, 3, 8192, 1, 1, 2048),  # windows of four tokens have the rows of a chunk
        (9**9, 3, 256, 1, 1, 64),
        (9**9, 0, 256, 1, 1, 256),
        (3 * LONG, 3, 8192, 1, 1, 8),  # they share the pages
        (20 * LONG, 3, 8192, 4, 1, 64),
        (LONG, 3, 8192, 3, 1, 9),
        (LONG, 3, 8192, 8, 2, 16),
    ],
)
def test_slots_of_a_gpu(tokens, drafts, chunk, shards, micro_batches, expected):
    config = EngineConfig(
        num_speculative_tokens=drafts, prefill_chunk=chunk, micro_batches=micro_batches, page_size=1
    )
    assert slots(config, tokens, shards) == expected


def test_a_processor_has_pages_for_one_longest_request_at_least():
    options = LLMOptions()
    few, why = unasked(engine(Target(), max_num_seqs=1), LLMOptions(max_num_seqs=1), 1, lambda: 10**6)
    assert (few.max_model_len, few.num_pages) == (131072, few.columns) == (131072, 2049)
    assert (few.longest, why) == (131072, "for a request of that length")
    many, why = unasked(engine(Target(), max_num_seqs=64), options, 1, lambda: 10**6)
    assert (many.max_model_len, many.num_pages, why) == (131072, 64 * 129, "for every slot 8,192 tokens")
    # Memory for fewer: the length follows the pages, also if another host has less memory.
    short, why = unasked(engine(Target()), options, 1, lambda: 900, lambda most: most - 100)
    assert (short.num_pages, short.max_model_len, short.longest) == (800, 51197, 51197)
    assert why == "half of the memory that weights leave"
    line = told(short, options, JOYAI, why)
    assert line == (
        "51,197 tokens of a request (the model's own is 131,072; the pages hold no more), 8 slots, chunks of "
        "256, 800 pages of 64 tokens (half of the memory that weights leave)"
    )


def test_a_short_context_costs_what_it_cost():
    """Up to 8,192 tokens, and where a length is given, every slot has its pages, whatever the memory."""
    given: Any
    for cfg, given in ((replace(JOYAI, max_position_embeddings=LONG), {}), (JOYAI, {"max_model_len": 99000})):
        before = engine(Target(), cfg, **given)
        found, why = unasked(before, LLMOptions(**given), 1, lambda: 1)
        assert (found, found.num_pages, why) == (before, None, "for every slot")
    # A device that does not tell its memory.
    found, _ = unasked(engine(), LLMOptions(), 1)
    assert (found.max_model_len, found.num_pages) == (LONG, None)
    assert "8,192 tokens of a request (the model's own is 131,072; more must be asked for here), " in told(
        found, LLMOptions(), JOYAI, ""
    )


def test_a_long_context_adds_no_program_where_attention_ends_with_the_rows():
    def programs(any_width: bool, **changes: Any) -> int:
        config = replace(engine(adaptive_depth=True), prefill_chunk=256, **changes)
        first, rest = Buckets(config, 1, replace(UNROLLED, any_width=any_width)).server(True)
        return len(first) + len(rest)

    assert programs(True) == programs(True, max_model_len=LONG) == programs(True, max_model_len=2048) < 30
    assert programs(False) > programs(False, max_model_len=LONG) > programs(True)
