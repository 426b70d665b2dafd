"""GGUF files: a model comes out as it went in; everything that is no dense Llama is refused by its name."""

import json
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mtp_jax.checkpoint.gguf_llama import write_gguf
from mtp_jax.checkpoint.plan import make_plan
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.model.family import config_of
from mtp_jax.text.tokenizer import Tokenizer
from tests.checkpoint.gguf_files import TEMPLATE, gguf, llama_facts, named, write
from tests.llama import HEAD, LLAMA, LLAMA3, MLP, Weights, frequencies, weights

# Rope of Llama 3, whose frequencies are of all three kinds.
SCALED = LLAMA | {
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
}


def converted(file: Path) -> tuple[Weights, JsonObject]:
    """The tensors and the config.json of a file's conversion, which loads."""
    folder = file.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    write_gguf(file, folder)
    tensors = {name: tensor.array() for name, tensor in make_plan(folder).tensors.items()}
    return tensors, json.loads((folder / "config.json").read_text())


def assert_equal(found: Weights, wanted: Weights) -> None:
    assert found.keys() == wanted.keys()
    for name, a in wanted.items():
        assert found[name].dtype == a.dtype
        np.testing.assert_array_equal(found[name], a, err_msg=name)


def factors(config: JsonObject) -> np.ndarray:
    """Numbers that divide the frequencies of rope."""
    plain = {key: value for key, value in config.items() if key != "rope_scaling"}
    return (frequencies(plain) / frequencies(config)).astype(np.float32)


@pytest.mark.parametrize("config", [LLAMA, LLAMA | {"tie_word_embeddings": False}, SCALED])
def test_a_model_comes_out_as_it_went_in(tmp_path: Path, config: JsonObject):
    w = weights(config["tie_word_embeddings"])
    more = {"rope_freqs.weight": factors(config)} if "rope_scaling" in config else {}
    reported = []
    file = write(tmp_path / "model.gguf", named(w) | more, facts=llama_facts(config))
    write_gguf(file, tmp_path / "reported", lambda done, total: reported.append((done, total)))
    found, raw = converted(file)
    assert_equal(found, w)
    wanted = config | {"bos_token_id": 1, "eos_token_id": 0}
    assert config_of(raw) == config_of(wanted)
    total = sum(a.nbytes for a in w.values())
    assert reported[-1] == (total, total)
    assert len(set(reported)) == len(w)


def test_the_tokenizer_is_beside_it(tmp_path: Path):
    facts = llama_facts()
    write_gguf(write(tmp_path / "model.gguf"), tmp_path / "model")
    tokenizer = Tokenizer.from_dir(tmp_path / "model")
    assert tokenizer is not None
    text = "def f(x):<tag>"
    tokens = [facts["tokenizer.ggml.tokens"][i] for i in tokenizer.encode(text)]
    assert "".join(tokens).replace("\u0120", " ") == text
    assert tokens[-1] == "<tag>"
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|end|>")


def test_weights_are_the_file_s_own_values(tmp_path: Path):
    """bfloat16 stays; narrow types become float32, by their formulas in ggml-quants.c."""

    def kinds(name: str, a: np.ndarray) -> str:
        if a.ndim == 1:
            return "F32"
        return (
            "F16"
            if a.shape[1] == MLP
            else "BF16"
            if "token" in name
            else "Q4_1"
            if "attn" in name
            else "Q8_0"
        )

    file = write(tmp_path / "model.gguf", kinds=kinds)
    # The same bytes, with rows in the order of the release.
    raw = {t.name: (t.data, t.tensor_type.name) for t in gguf.GGUFReader(file).tensors}
    found, config = converted(file)
    assert config["torch_dtype"] == "bfloat16"
    wanted = named(found)
    seen = set()
    for name, (data, kind) in raw.items():
        seen.add(kind)
        rows = data.reshape(-1, data.shape[-1])
        if kind == "Q8_0":  # blocks of a scale in float16 and 32 bytes
            blocks = rows.reshape(len(rows), -1, 34)
            values = blocks[..., :2].copy().view(np.float16) * blocks[..., 2:].view(np.int8).astype(
                np.float32
            )
        elif kind == "Q4_1":  # blocks of a scale, a least value, and 32 numbers of 4 bits, low halves first
            blocks = rows.reshape(len(rows), -1, 20)
            scale, least = (blocks[..., i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
            values = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1) * scale + least
        else:
            values = data.view(ml_dtypes.bfloat16) if kind == "BF16" else data
        stays = ml_dtypes.bfloat16 if kind == "BF16" else np.float32
        assert wanted[name].dtype == stays
        np.testing.assert_array_equal(wanted[name], values.reshape(wanted[name].shape).astype(stays), name)
    assert seen == {"F32", "F16", "BF16", "Q8_0", "Q4_1"}


def edited(w: Weights, **changes: np.ndarray | None) -> Weights:
    """Tensors with some in the place of others; None leaves one out."""
    return {name: a for name, a in (w | changes).items() if a is not None}


UNEVEN = factors(SCALED) * np.linspace(1, 1.1, HEAD // 2, dtype=np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen2"}, "the architecture 'qwen2' is not supported; expected 'llama'"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8 is not supported; expected 0"),
        (
            {"llama.rope.scaling.type": "yarn"},
            "llama.rope.scaling.type = 'yarn' is not supported; expected 'none'",
        ),
        ({"llama.rope.scale_linear": 2.0}, "llama.rope.scale_linear is not supported"),
        (
            {"llama.rope.dimension_count": 4},
            f"llama.rope.dimension_count = 4 is not supported; expected {HEAD}",
        ),
        ({"llama.attention.key_length": 16}, "llama.rope.dimension_count = 8 is not supported; expected 16"),
        (
            {"llama.block_count": None, "llama.context_length": None},
            "lacks llama.context_length, llama.block_",
        ),
        ({"llama.block_count": 3}, "tensors are missing: blk.2.attn_norm.weight"),
        ({"llama.block_count": 60000}, "it has 20 tensors for 60000 layers"),
        ({"llama.block_count": 1}, "unknown tensors: blk.1.attn_norm.weight"),
        (
            {"llama.attention.head_count": 3},
            "num_key_value_heads = 2 does not divide num_attention_heads = 3",
        ),
        (
            {"llama.feed_forward_length": [48, 64]},
            "intermediate_size = [48, 64]; expected a positive integer",
        ),
        (
            {"llama.attention.layer_norm_rms_epsilon": "small"},
            "rms_norm_eps = 'small'; expected a positive number",
        ),
        ({"split.count": 3}, "it is one of 3 parts; join them first"),
        ({"tokenizer.ggml.pre": "default"}, "tokenizer.ggml.pre = 'default' is not supported"),
        ({"tokenizer.chat_template": 7}, "tokenizer.chat_template = 7; expected text"),
        ({"token_embd.weight": None}, "it has no table token_embd.weight"),
        (
            {"token_embd.weight": np.zeros((90, 32), np.float32)},
            "it has 96 tokens; token_embd.weight has 90",
        ),
        (
            {"blk.1.ffn_up.weight": np.zeros((48, 16), np.float32)},
            "blk.1.ffn_up.weight (48, 16) in the place of (48, 32)",
        ),
        ({"blk.0.attn_q.bias": np.zeros(32, np.float32)}, "unknown tensors: blk.0.attn_q.bias"),
        ({"rope_freqs.weight": UNEVEN}, "rope_freqs.weight has an unknown scaling of rope"),
        ({"rope_freqs.weight": np.ones(3, np.float32)}, "rope_freqs.weight has an unknown scaling of rope"),
        ({"endianess": gguf.GGUFEndian.BIG}, "its numbers are big-endian"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path: Path, changes: JsonObject, message: str):
    tensors = {k: v for k, v in changes.items() if k.endswith((".weight", ".bias"))}
    options = {k: v for k, v in changes.items() if k in ("architecture", "endianess")}
    facts = {k: v for k, v in changes.items() if k not in tensors.keys() | options.keys()}
    facts = {k: v for k, v in (llama_facts() | facts).items() if v is not None}
    file = write(tmp_path / "model.gguf", edited(named(weights()), **tensors), facts=facts, **options)
    with pytest.raises(CheckpointError) as caught:
        write_gguf(file, tmp_path / "out")
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_types_that_the_library_does_not_know_are_refused_by_name(tmp_path: Path):
    file = tmp_path / "model.gguf"
    write(file, kinds=lambda name, a: "F32" if a.ndim == 1 else "F16")
    data = file.read_bytes()
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind its dimensions
    assert data[at] == gguf.GGMLQuantizationType.F16
    file.write_bytes(data[:at] + bytes([gguf.GGMLQuantizationType.Q8_1]) + data[at + 1 :])
    with pytest.raises(
        CheckpointError, match=r"blk.0.ffn_up.weight is in Q8_1, which the library gguf cannot"
    ):
        write_gguf(file, tmp_path / "out")


def test_a_file_that_is_cut_off_or_damaged_is_told_as_such(tmp_path: Path, rng: np.random.Generator):
    whole = write(tmp_path / "whole.gguf").read_bytes()
    header = gguf.GGUFReader(tmp_path / "whole.gguf").data_offset
    cuts = [0, 3, 4, 8, 20, *rng.integers(24, header, 12), header, (header + len(whole)) // 2, len(whole) - 1]
    file = tmp_path / "model.gguf"
    for cut in map(int, cuts):
        file.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"model.gguf is damaged: .*; copy it again"):
            write_gguf(file, tmp_path / "out")
    count = whole.index(key := b"tokenizer.ggml.token_type") + len(key) + 2 * 4  # behind two types
    file.write_bytes(whole[:count] + (2**30).to_bytes(8, "little") + whole[count + 8 :])
    with pytest.raises(CheckpointError, match=r"is damaged: a list of 1073741824 values; expected at most"):
        write_gguf(file, tmp_path / "out")
    for at in rng.integers(0, header, 200):
        file.write_bytes(whole[:at] + bytes([rng.integers(256)]) + whole[at + 1 :])
        try:
            write_gguf(file, tmp_path / "out")
        except CheckpointError:
            continue
        shutil.rmtree(tmp_path / "out")


def test_without_the_library_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = write(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        ConfigError, match=r"is GGUF, which needs the extra gguf; install it with: pip install gguf"
    ):
        write_gguf(file, tmp_path / "out")
