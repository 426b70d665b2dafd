"""Several processes compute what one does: greedy, sampled, adaptive, structured, sparse attention."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mtp_jax import LLM
from tests import golden, tiny_tokenizer
from tests.hosts.ranks import ranks
from tests.hosts.worker import complete, draft_and_again

# One bucket of pages and of chunks: each program is compiled by every process.
SIZES = {"max_num_seqs": 4, "max_model_len": 60, "page_size": 64, "prefill_chunk": 16, "seed": 3}
FIXED = {**SIZES, "num_speculative_tokens": 3}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
PROMPTS = [[5, 9, 11, 7], [3, *range(20, 46)], [40, 41, 42]]
GREEDY = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.3, "max_tokens": 8, "ignore_eos": True}
# Greedy and sampled rows side by side, more than there are slots.
MIXED = {"prompts": PROMPTS * 2, "params": [GREEDY] * 3 + [{**SAMPLED, "seed": i} for i in range(3)]}
SHAPED = {"temperature": 0, "max_tokens": 40, "json_schema": SCHEMA}
STRUCTURED = {"prompts": ["def", [5, 6]], "params": [SHAPED, GREEDY]}


def _model(folder: Path, variant: str) -> Path:
    shutil.copytree(golden.model_dir(variant), folder / "model")
    return tiny_tokenizer.write(folder / "model", golden.raw_config(variant)["vocab_size"])


def _check(
    folder: Path, llm: dict[str, Any], jobs: list[Any], hosts: int, mesh: list[int], variant: str = "rigged"
) -> None:
    llm = {**llm, "model": str(_model(folder, variant))}
    out = folder / "found.json"
    plan = json.dumps({"mesh": mesh, "llm": llm, "jobs": jobs, "draft": PROMPTS[0], "out": str(out)})
    with ranks(["-m", "tests.hosts.worker", "HOSTS", "RANK", "COORDINATOR", plan], hosts) as group:
        codes = [r.process.wait(240) for r in group]
        texts = [r.text for r in group]
    assert codes == [0] * hosts, "\n\n".join(texts)
    assert all("replayed" in text for text in texts[1:])
    alone = LLM(**llm, compile_cache=None)
    wanted = [*complete(alone, jobs), *draft_and_again(alone, PROMPTS[0], jobs)]
    found = json.loads(out.read_text())
    assert [ids for ids, _ in found] == [ids for ids, _ in wanted]
    assert all(accepted > 0 for _, accepted in found)


def test_ids_are_those_of_one_process(tmp_path):
    """Greedy, sampled and structured, a draft, and all greedy rows again after the cache was given back."""
    _check(tmp_path, FIXED, [MIXED, STRUCTURED], hosts=2, mesh=[2, 2])


def test_adaptive_depth_and_sparse_attention(tmp_path):
    """Depths are chosen by measured time; coupled, a seed gives one text at every depth."""
    own = {"num_speculative_tokens": 1, "adaptive_depth": True, "verifier": "coupled"}
    _check(tmp_path, {**SIZES, **own}, [MIXED], hosts=2, mesh=[2, 2], variant="dsa_v32_rigged")


@pytest.mark.slow
def test_four_processes(tmp_path):
    _check(tmp_path, FIXED, [MIXED, STRUCTURED], hosts=4, mesh=[4, 2])
