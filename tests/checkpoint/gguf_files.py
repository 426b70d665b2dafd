"""Small GGUF files, written by the library's own writer, in the names that llama.cpp's converter gives."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from mtp_jax.json_object import JsonObject
from tests.llama import HEADS, KV_HEADS, LAYERS, LLAMA, Weights, weights

gguf = pytest.importorskip("gguf")

TEXTS = (
    "It's 12345 o'clock, WE'LL wait;  don't\n\n\n  def f(x):\n\treturn x ** 2   \r\n zq <tag>zq<|end|>",
    "Привет, мир! naïve ½ Ⅻ ١٢٣ \u3000深度求索 \u017f'\u017f e\u0301 👩‍👩‍👧 \x85",
)
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
MARKS = {"<|end|>": CONTROL, "<|begin|>": CONTROL, "<tag>": USER_DEFINED, "<spare>": UNUSED}
WHOLE = "\u0120zq"  # a token, " zq", that no merges make
TEMPLATE = "{% for m in messages %}<|begin|>{{ m.content }}<|end|>{% endfor %}"
TOKENS = 96  # of a model, whose embedding has more rows
_BYTES = 256 + len(MARKS)
Facts = dict[str, Any]


def tokenizer_facts(way: str, vocabulary: int, *texts: str) -> Facts:
    """Keys of a tokenizer, learnt from texts, whose texts are first split in a way."""
    learnt = tokenizers.Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 1,
        special_tokens=list(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if vocabulary > _BYTES else [],
        show_progress=False,
    )
    learnt.train_from_iterator([text.replace("zq", "") for text in texts] * 3, trainer)
    model = json.loads(learnt.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), WHOLE]
    assert len(tokens) == vocabulary, f"the texts have pairs for {len(tokens)} tokens"
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": way,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [MARKS.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def llama_facts(config: JsonObject = LLAMA) -> Facts:
    """Keys of a model, and of a tokenizer of its vocabulary."""
    return {
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "llama.vocab_size": config["vocab_size"],
        **tokenizer_facts("smollm", TOKENS, TEXTS[0]),
    }


def paired(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as the converter lays them (``LlamaModel.permute``)."""
    return w.reshape(heads, 2, len(w) // heads // 2, -1).swapaxes(1, 2).reshape(w.shape)


def named(w: Weights) -> Weights:
    """A release's tensors as the converter stores them."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    rotated = {"q_proj": HEADS, "k_proj": KV_HEADS}
    heads = {name: rotated.get(name.split(".")[-2]) for name in w}
    return {
        names.get_name(name, try_suffixes=(".weight",)): paired(a, count) if (count := heads[name]) else a
        for name, a in w.items()
    }


def write(
    path: Path,
    tensors: Weights | None = None,
    *,
    facts: Facts | None = None,
    kinds: Callable[[str, np.ndarray], str] = lambda name, a: "F32",
    architecture: str = "llama",
    **more: Any,
) -> Path:
    """A file of a model. kinds: the type of each tensor. more: options of the writer."""
    writer = gguf.GGUFWriter(path, architecture, **more)
    for key, value in (llama_facts() if facts is None else facts).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            plain = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}[type(value)]
            writer.add_key_value(key, value, gguf.GGUFValueType[plain])
    for name, a in (named(weights()) if tensors is None else tensors).items():
        kind = gguf.GGMLQuantizationType[kinds(name, a)]
        writer.add_tensor(name, gguf.quantize(a, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
