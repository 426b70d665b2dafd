"""A layer of DeepSeek-V3's dimensions chooses the kernels by itself when it is lowered for a Hopper GPU."""

import re

import jax
import pytest

from mtp_jax.model.kernels import Kernels
from mtp_jax.model.mla import Form
from mtp_jax.model.sharding import make_mesh
from mtp_jax.model.trunk import Backend
from tests.kernels.compile_step import layers_of

XLA = Kernels("xla", "xla", "xla")


def kernels_in(on: Backend, kind: str) -> int:
    function, inputs = layers_of(make_mesh(1, 1), 1, on)
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        text = function.trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    return len(re.findall(r"@mosaic_gpu_v2\b", text))


@pytest.mark.parametrize("form", ["absorbed", "naive"])
def test_kernels_are_chosen_on_hopper(form: Form):
    # Linear layers q_a, q_b, kv_a and o; attention; the choice of experts and the layout of their rows; two
    # products of the experts and two of the shared expert; three norms and the heads' results, quantised.
    assert kernels_in(Backend(form), "NVIDIA H200") == 4 + 1 + 2 + 2 + 2 + 4


@pytest.mark.parametrize(
    ("on", "kind"), [(Backend("absorbed"), "NVIDIA B200"), (Backend("absorbed", kernels=XLA), "NVIDIA H200")]
)
def test_none_where_there_are_none_or_none_are_wanted(on, kind):
    assert kernels_in(on, kind) == 0
