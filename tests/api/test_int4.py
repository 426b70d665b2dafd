"""The text part of a multimodal folder whose experts are packed, served and updated as any model is."""

from typing import Any

import numpy as np
import pytest

from mtp_jax import LLM, CheckpointError, SamplingParams
from mtp_jax.checkpoint import load
from mtp_jax.checkpoint.safetensors_file import open_file
from tests.checkpoint.int4_files import write_models
from tests.models import Reference, prompts

pytestmark = [pytest.mark.rest, pytest.mark.usefixtures("shared_programs")]

SIZES: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_model_len": 64,
    "page_size": 16,
    "prefill_chunk": 16,
    "num_speculative_tokens": 3,
    "adaptive_depth": False,
    "compile_cache": None,
}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_served_and_updated(tmp_path):
    models = write_models(tmp_path)
    (prompt,) = prompts(1, shortest=9)
    plain = load(models.plain)
    want = Reference(plain.params, plain.config, longest=32).speculate(prompt, 12).ids
    llm = LLM(models.nested, **SIZES)

    def tokens() -> list[int]:
        return llm.generate(prompt, PARAMS)[0].outputs[0].token_ids

    assert tokens() == want
    with pytest.raises(CheckpointError, match="parameters do not fit"):
        llm.update_weights(models.plain)
    assert tokens() == want
    arrays = {n: t.array() for n, t in open_file(models.packed / "model.safetensors").items()}
    arrays["model.norm.weight"] = -arrays["model.norm.weight"]
    llm.update_weights(arrays)
    other = tokens()
    assert other != want
    found = llm.update_weights(models.nested, probe=[prompt])
    assert found.acceptance_after is not None
    assert found.acceptance_after > 1.5
    assert tokens() == want
    assert np.asarray(llm.hidden_states(prompt, positions=[-1])).shape == (1, 64)
