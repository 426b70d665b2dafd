"""The work of a launch, counted from the weights."""

import jax
import pytest

from mtp_jax import checkpoint
from mtp_jax.decode.compiled import PrefillKey, StepKey
from mtp_jax.decode.step import SamplingMode
from mtp_jax.model.params import Fp8
from mtp_jax.profiling import cost
from tests import golden


@pytest.mark.parametrize(
    "key", [StepKey(2, 3, 4, SamplingMode()), StepKey(1, 0, 4, SamplingMode()), PrefillKey(16, 4)]
)
def test_quantised_weights_are_fewer_bytes_but_as_many_operations(key):
    directory = golden.model_dir("fp8")
    plain = checkpoint.load(directory, dtype="bfloat16", fp8="dequantise")
    kept = checkpoint.load(directory, dtype="bfloat16", fp8="keep")
    leaves = jax.tree.leaves(kept.params, is_leaf=lambda a: isinstance(a, Fp8))
    assert any(isinstance(a, Fp8) for a in leaves)
    one, other = (cost.of_launch(key, m.config, m.params, 16, "bfloat16", 1) for m in (plain, kept))
    assert one.flops == other.flops > 0
    assert other.bytes < one.bytes
