"""Several processes compute what one does: greedy, sampled, adaptive, structured, sparse attention."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_jax import LLM
from mtp_jax.checkpoint import save_checkpoint
from mtp_jax.model.config import ModelConfig
from tests import golden, tiny_tokenizer, v4
from tests.examples import medusa
from tests.hosts.ranks import ranks
from tests.hosts.worker import complete, draft_and_again, scored_and_updated
from tests.models import TINY, rigged, tiny_params

# One bucket of pages, of slots and of chunks: every process compiles every program.
SIZES = {"max_num_seqs": 2, "max_model_len": 60, "page_size": 64, "prefill_chunk": 16, "dtype": "float32"}
PROMPTS = [[5, 9, 11, 7], [3, *range(20, 46)], [40, 41, 42]]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SAMPLED = {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.3, "max_tokens": 12, "ignore_eos": True}
SHAPED = {"temperature": 0, "max_tokens": 12, "regex": "[0-9]{4,9}"}
ECHOED = {**SHAPED, "prompt_logprobs": 0}
ALL_GREEDY = {"prompts": PROMPTS, "params": [GREEDY] * 3}
# Greedy and sampled rows side by side.
MIXED = {"prompts": PROMPTS, "params": [{**SAMPLED, "seed": 1}, GREEDY, {**SAMPLED, "seed": 2}]}
STRUCTURED = {"prompts": [[5, 6], [7, 8, 9]], "params": [SHAPED, GREEDY]}
ONE = {"prompts": [PROMPTS[0]], "params": [ECHOED]}


# Most that the processes may take.
_SECONDS = 600


def written(cfg: ModelConfig, folder: Path) -> Path:
    save_checkpoint(folder, cfg, tiny_params(cfg), "float32")
    return tiny_tokenizer.write(folder, cfg.vocab_size)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return written(TINY, tmp_path_factory.mktemp("tiny"))


def check(
    model: Path,
    out: Path,
    llm: dict[str, Any],
    jobs: list[Any],
    hosts: int = 2,
    data: int = 2,
    of_many: dict[str, Any] | None = None,
    seconds: float = _SECONDS,
    memory: Sequence[int] = (),
    other: Path | None = None,
) -> list[str]:
    """Over so many processes and in this one: the same ids, and drafts that were accepted.

    of_many: options of the former alone. memory: bytes that a device of each rank seems to have. other:
    weights that replace the model's. Returns the texts that the ranks printed.
    """
    llm = {**SIZES, **llm, "model": str(model)}
    plan = {
        "mesh": [data, 2],
        "llm": llm | (of_many or {}),
        "jobs": jobs,
        "draft": PROMPTS[0],
        "other": other and str(other),
        "out": str(out / "found.json"),
    }
    arguments = ["-m", "tests.hosts.worker", "HOSTS", "RANK", "COORDINATOR", json.dumps(plan)]
    others = {rank: {"WORKER_MEMORY": str(size)} for rank, size in enumerate(memory)}
    with ranks(arguments, hosts, others) as group:
        codes = [r.process.wait(seconds) for r in group]
        texts = [r.text for r in group]
    assert codes == [0] * hosts, "\n\n".join(texts)
    assert all("replayed" in text for text in texts[1:])
    alone = LLM(**llm, compile_cache=None)
    wanted = [*complete(alone, jobs), *draft_and_again(alone, PROMPTS[0], jobs)]
    if other:
        wanted += scored_and_updated(alone, PROMPTS[0], jobs, str(other))
        before, after = wanted[-4:-2]
        assert before != after
    found = json.loads((out / "found.json").read_text())
    assert [ids for ids, _ in found] == [ids for ids, _ in wanted]
    assert all(accepted > 0 for _, accepted in found)
    return texts


@pytest.mark.rest  # make test holds a group to one process in test_failure.py
def test_a_greedy_structured_request(tmp_path):
    """With the experts of its one layer; then a draft, and the same again after the cache was given back.

    Then scores, and both with other weights. Rank 1 has less memory: its share is the cache's size on both.
    """
    cfg = replace(TINY, num_hidden_layers=1, first_k_dense_replace=0)
    model, other = written(cfg, tmp_path / "model"), tmp_path / "other"
    save_checkpoint(other, cfg, rigged(cfg, seed=9), "float32")
    asking = {**ONE, "params": [{**ECHOED, "routed_experts": True}]}
    own = {"num_speculative_tokens": 1, "return_routed_experts": True}
    share, memory = {"memory_fraction": 0.5}, (40_000_000, 20_000_000)
    texts = check(model, tmp_path, own, [asking], of_many=share, memory=memory, other=other)
    (more, agreed), (less, found) = (
        [list(map(int, pair)) for pair in re.findall(r"offered (\d+), agreed (\d+)", text)][-1]
        for text in texts
    )
    assert more > 1.9 * less
    assert agreed == found == less


@pytest.mark.slow
def test_greedy_and_structured_side_by_side(tiny, tmp_path):
    check(tiny, tmp_path, {"num_speculative_tokens": 1}, [STRUCTURED])


@pytest.mark.slow
@pytest.mark.parametrize("job", [ALL_GREEDY, MIXED], ids=["greedy", "mixed"])
def test_without_a_grammar(tiny, tmp_path, job):
    check(tiny, tmp_path, {"num_speculative_tokens": 1}, [job])


@pytest.mark.slow
def test_drafts_of_a_part_of_the_vocabulary(tiny, tmp_path):
    part = [i for i in range(TINY.vocab_size) if i % 3]
    check(tiny, tmp_path, {"num_speculative_tokens": 1, "draft_vocab": part}, [ALL_GREEDY])


@pytest.mark.slow
def test_forced_acceptance(tiny, tmp_path):
    """Every rank keeps drafts by the seeds of the requests, greedy ones too."""
    params = [{**p, "seed": i} for i, p in enumerate(MIXED["params"])]
    options = {"num_speculative_tokens": 1, "synthetic_acceptance": 1.6}
    check(tiny, tmp_path, options, [{**MIXED, "params": params}])


@pytest.mark.slow
def test_experts_that_move(tiny, tmp_path):
    """Rows take an all-to-all between the hosts, and experts are placed anew twice a request."""
    more = {"redundant_experts": 8, "expert_rebalance": 5}
    check(tiny, tmp_path, {"num_speculative_tokens": 1}, [ALL_GREEDY, ALL_GREEDY], of_many=more)


@pytest.mark.slow
def test_adaptive_depth_and_sparse_attention(tmp_path):
    """Depths are chosen by measured time, on rank 0 alone."""
    model = golden.model_dir("dsa_v32_rigged")
    check(model, tmp_path, {"num_speculative_tokens": 1, "adaptive_depth": True}, [ALL_GREEDY])


@pytest.mark.slow
@pytest.mark.timeout(4 * _SECONDS)
def test_four_processes(tiny, tmp_path):
    """On few cores four processes take minutes to compile the same."""
    check(
        tiny, tmp_path, {"max_num_seqs": 4, "num_speculative_tokens": 1}, [MIXED], 4, 4, seconds=3 * _SECONDS
    )


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["eagle3_mla", "dspark"])
def test_a_draft_head(tmp_path: Path, variant: str):
    head = str(golden.model_dir(variant, "draft"))
    check(
        golden.model_dir(variant), tmp_path, {"num_speculative_tokens": 3, "draft_model": head}, [ALL_GREEDY]
    )


@pytest.mark.slow
def test_a_tree_of_medusa_heads(tmp_path: Path):
    tree = {"tree": "[[0], [0, 0], [1]]", "draft_model": str(medusa.write(tmp_path / "heads"))}
    outside = {"drafter": "examples.medusa:MedusaConfig"}
    check(golden.model_dir(medusa.TRUNK), tmp_path, tree | outside, [ALL_GREEDY])


@pytest.mark.slow
def test_deepseek_v4(tmp_path: Path):
    """Rows of windows and inputs of compressors are split over the hosts, as slots and pages are."""
    cfg = v4.model(num_hidden_layers=3, compress_ratios=[4, 128, 0, 0])
    sizes = {"num_speculative_tokens": 2, "page_size": 128, "max_model_len": 300, "prefill_chunk": 64}
    prompts = [[3 + i, *(5 + (7 * k * k) % 50 for k in range(120 + 20 * i))] for i in range(2)]
    job = {"prompts": prompts, "params": [GREEDY] * 2}
    check(written(cfg, tmp_path / "model"), tmp_path, sizes, [job, job])
