"""A layer of DeepSeek-V3's dimensions chooses the kernels by itself when it is lowered for a Hopper GPU."""

import re
from typing import Literal

import jax
import pytest

from mtp_jax.model.backend import backend
from mtp_jax.model.mla import Form
from mtp_jax.model.sharding import make_mesh
from tests.kernels.compile_step import DENSE, LOADS, Load, layers_of


def kernels_in(
    kind: str, wanted: Literal["auto", "xla"] = "auto", form: Form = "absorbed", load: Load = DENSE
) -> int:
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        function, inputs = layers_of(make_mesh(1, 1), 1, backend(wanted), form, load)
        inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
        text = function.trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    return len(re.findall(r"@mosaic_gpu_v2\b", text))


@pytest.mark.parametrize("form", ["absorbed", "naive"])
def test_kernels_are_chosen_on_hopper(form: Form):
    # Linear layers q_a, q_b, kv_a and o; attention; the choice of experts and the layout of their rows; two
    # products of the experts and two of the shared expert; three norms and the heads' results, quantised.
    assert kernels_in("NVIDIA H200", form=form) == 4 + 1 + 2 + 2 + 2 + 4


def test_few_tokens_have_kernels_of_their_own():
    """The router lays out rows, parts of slots' rows are merged, one kernel rotates and absorbs queries."""
    assert kernels_in("NVIDIA H200", load=LOADS["slots1_"]) == 4 + 2 + 1 + 2 + 2 + 4 + 1


def test_rows_that_tokens_chose_are_attended_to_by_a_kernel():
    """With an indexer XLA norms and rotates before attention, and gathers the rows."""
    # q_a, q_b, the index queries and keys, kv_a and o; scores, choice, attention to two parts of the rows and
    # their merge; all behind it as without an indexer.
    assert kernels_in("NVIDIA H200", load=LOADS["sparse_"]) == 6 + 4 + 2 + 2 + 2 + 2


def test_none_where_there_are_none_or_none_are_wanted():
    assert kernels_in("NVIDIA B200") == 0
    assert kernels_in("NVIDIA H200", "xla") == 0
