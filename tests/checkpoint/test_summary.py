"""Numbers about a checkpoint, from its headers: checked by hand and against DeepSeek-V3's published ones."""

import math

import jax
import pytest

from mtp_jax.checkpoint import load, summarise
from mtp_jax.checkpoint.formats import spec_names
from mtp_jax.checkpoint.fp8 import scale_shape
from mtp_jax.checkpoint.summary import by_dtype
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.family import family_of
from mtp_jax.model.narrow import nbytes
from mtp_jax.model.spec import leaves, may_be_narrow
from mtp_jax.model.specs import param_specs, parameter_counts
from tests.checkpoint.files import read_folder
from tests.golden import VARIANTS, model_dir
from tests.models import apart

V3 = ModelConfig(
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    num_attention_heads=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    first_k_dense_replace=3,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_nextn_predict_layers=1,
    nextn_moe=(True,),
)


def test_deepseek_v3():
    total, active, nextn = parameter_counts(V3)
    assert total == 671_026_419_200
    assert round(active / 1e9, 1) == 37.6
    assert round(nextn / 1e9, 2) == 11.61


def test_deepseek_v3_on_disk():
    """The release: 91,991 tensors of 688,574,839,360 bytes, fp8 where the reader expects it."""
    shapes = {str(n): s.tensor_shape for s in leaves(param_specs(V3)) for n in spec_names(s).flat}
    shapes |= dict.fromkeys(family_of(V3).nextn_copies(V3, 0), (V3.vocab_size, V3.hidden_size))
    tensors, nbytes = 0, 0
    for name, shape in shapes.items():
        fp8, width = may_be_narrow(name), 4 if name.endswith("e_score_correction_bias") else 2
        tensors += 2 if fp8 else 1
        nbytes += math.prod(shape) * (1 if fp8 else width) + (math.prod(scale_shape(shape)) * 4 if fp8 else 0)
    assert (tensors, nbytes) == (91_991, 688_574_839_360)


# One of each kind of attention, and of each format of files.
FAST = ("v3", "bf16", "fp8", "glm46", "dsa_glm52")


@pytest.mark.parametrize("variant", apart(VARIANTS, *FAST))
def test_counts_are_those_of_the_loaded_model(variant: str):
    summary, found = summarise(model_dir(variant)), load(model_dir(variant))
    leaves = jax.tree.leaves(found.params)
    assert summary.config == found.config
    assert summary.parameters + summary.nextn_parameters == sum(x.size for x in leaves)
    assert summary.weight_bytes["float32"] == sum(x.nbytes for x in leaves)
    half = jax.tree.leaves(load(model_dir(variant), dtype="bfloat16").params)
    assert summary.weight_bytes["bfloat16"] == sum(x.nbytes for x in half)
    raw = read_folder(model_dir(variant))
    assert {n: (s.tensors, s.nbytes) for n, s in summary.stored.items()} == {
        dtype: (len(sizes), sum(sizes))
        for dtype in {t.dtype for t in raw.values()}
        if (sizes := [len(t.data) for t in raw.values() if t.dtype == dtype])
    }
    layers = found.config.num_hidden_layers + len(found.config.nextn_moe)
    rank, rope = found.config.kv_lora_rank, 8
    indexed = layers - {"dsa_glm52": 3}.get(variant, 0) if variant.startswith("dsa_") else 0
    key = 32 if variant == "dsa_v32_fp8" else 16
    values = layers * (rank + rope) + indexed * key
    fp8 = layers * (rank + rope * 2 + 4) + indexed * (key + 4)
    if found.config.gqa:  # keys and values of two heads of 16, and a scale for each
        values, fp8 = layers * 64, layers * (64 + 4 * 4)
    assert summary.cache_bytes_per_token == {"float32": values * 4, "bfloat16": values * 2, "fp8": fp8}


@pytest.mark.parametrize("variant", ["v3", "bf16", "fp8"])
def test_memory_on_a_cpu_is_that_of_what_an_engine_loads(variant: str):
    summary = summarise(model_dir(variant))
    on_cpu = load(model_dir(variant), narrow="multiplied").params
    assert summary.weight_bytes_on_cpu == nbytes(on_cpu)
    size = by_dtype({"stored": nbytes(on_cpu)}).removesuffix(" as stored")
    assert f"weights on a CPU    {size}, computed with in float32" in summary.text()
    assert (summary.weight_bytes_on_cpu < summary.weight_bytes["float32"]) == (variant != "v3")


def test_fp8_weights_that_are_kept_are_counted_with_their_scales():
    summary = summarise(model_dir("fp8"))
    kept = load(model_dir("fp8"), dtype="bfloat16", narrow="keep").params
    assert summary.weight_bytes["fp8"] == nbytes(kept)
    assert summary.weight_bytes["fp8"] < summary.weight_bytes["bfloat16"]
    assert "fp8" not in summarise(model_dir("v3")).weight_bytes


def test_text():
    text = summarise(model_dir("fp8")).text()
    for fragment in (
        "architecture        deepseek_v3",
        "3 (1 dense, 2 MoE)",
        "8 routed, 2 per token, 1 shared",
        "1 (MoE; in place)",
        "305,288 (187,784 active per token)",
        "F8_E4M3 (104)",
        "512 B as float32, 256 B as bfloat16",
    ):
        assert fragment in text
    assert "160 (tied)" in summarise(model_dir("tied")).text()
    assert "lmsys NextN" in summarise(model_dir("v3"), model_dir("v3", "nextn")).text()
