"""A layer of a released model's dimensions chooses its kernels when it is lowered for a Hopper GPU."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import pytest

from kernels_pallas.mla_prefill.api import BLOCK
from mtp_jax.checkpoint.random_weights import abstract_params
from mtp_jax.lab.bench.shapes import v3
from mtp_jax.model.backend import backend, mosaic_gpu
from mtp_jax.model.mla import Form
from mtp_jax.model.sharding import make_mesh
from tests.kernels.compile_step import DENSE, LOADS, Load, layers_of, moe_layers

# Fields in which GLM-4.7-Flash's config.json differs from DeepSeek-V3's; its weights are bfloat16.
GLM_FLASH: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536, "num_attention_heads": 20,
    "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
    "vocab_size": 154880, "max_position_embeddings": 202752,
}  # fmt: skip


FORMS = ["absorbed", pytest.param("naive", marks=pytest.mark.rest)]


Built = Callable[[], tuple[Any, tuple[Any, ...]]]


def lowered(kind: str, built: Built) -> str:
    """A function that is built and lowered for a GPU of this kind."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        function, inputs = built()
        inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
        return function.trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()


def calls(kind: str, built: Built) -> int:
    """Kernels that a function calls which is built and lowered for a GPU of this kind."""
    return len(re.findall(r"@mosaic_gpu_v2\b", lowered(kind, built)))


def kernels_in(
    kind: str, wanted: Literal["auto", "xla"] = "auto", form: Form = "absorbed", load: Load = DENSE
) -> int:
    return calls(kind, lambda: layers_of(make_mesh(1, 1), 1, backend(wanted), form, load))


@pytest.mark.parametrize("form", FORMS)
def test_kernels_are_chosen_on_hopper(form: Form):
    # Linear layers q_a with kv_a, q_b and o; attention; the choice of experts and the layout of their rows;
    # two products of the experts and two of the shared expert; three norms and the heads' results, quantised.
    assert kernels_in("NVIDIA H200", form=form) == 3 + 1 + 2 + 2 + 2 + 4


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_of_glm_flash_is_refused_no_kernel(form: Form):
    cfg = replace(v3(2), **GLM_FLASH)
    mesh, on, load = make_mesh(1, 1), mosaic_gpu(strict=True), Load(8, 1024)
    built = partial(moe_layers, cfg, abstract_params(cfg, cfg.dtype, set(), mesh), mesh, on, form, load)
    # Attention, absorbed in parts that a second kernel merges; choice and layout; two products of experts.
    assert calls("NVIDIA H200", built) == {"absorbed": 2, "naive": 1}[form] + 2 + 2


@pytest.mark.rest
def test_few_tokens_have_kernels_of_their_own():
    """The router lays out rows, parts of slots' rows are merged. ``mla_absorb`` has no time on a card yet."""
    assert kernels_in("NVIDIA H200", load=LOADS["slots1_"]) == 3 + 2 + 1 + 2 + 2 + 4


@pytest.mark.rest
def test_rows_that_tokens_chose_are_attended_to_by_a_kernel():
    """With an indexer XLA norms and rotates before attention, and gathers the rows."""
    # q_a, q_b, the index queries and keys, kv_a and o; the rows of all but o quantised; scores, choice,
    # attention to two parts of the rows and their merge; all behind it as without an indexer.
    assert kernels_in("NVIDIA H200", load=LOADS["sparse_"]) == 6 + 5 + 4 + 2 + 2 + 2 + 2


@pytest.mark.rest
def test_a_chunk_of_a_prompt_reads_a_block_of_rows_at_a_time():
    """Nothing is as long as a page table of several blocks, however short the prompts are."""
    load = Load(2, 3 * BLOCK)
    text = lowered("NVIDIA H200", lambda: layers_of(make_mesh(1, 1), 1, backend("auto"), "naive", load))
    width = v3(2).row.width
    assert f"tensor<2x{BLOCK}x{width}xbf16>" in text
    assert f"2x{load.rows}x" not in text


def test_none_where_there_are_none_or_none_are_wanted():
    assert kernels_in("NVIDIA B200") == 0
    assert kernels_in("NVIDIA H200", "xla") == 0
