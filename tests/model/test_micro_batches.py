"""A pass that is cut in two by slots gives what a whole one gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.validate import check_config
from mtp_jax.errors import ConfigError
from mtp_jax.model import micro_batches
from mtp_jax.model.backend import backend, xla
from mtp_jax.model.sharding import make_mesh
from tests.models import TINY


def test_each_batch_has_a_share_of_every_shard():
    on = xla(make_mesh(2, 1), micro_batches=2)
    given = {"a": jnp.arange(8), "b": jnp.arange(16).reshape(8, 2)}
    first, second = micro_batches.cut(given, 1, on)
    assert first["a"].tolist() == [0, 1, 4, 5]
    assert second["a"].tolist() == [2, 3, 6, 7]
    jax.tree.map(np.testing.assert_array_equal, micro_batches.joined([first, second], on), given)


@pytest.mark.parametrize(
    ("slots", "parts", "batches"),
    [(8, 1, 2), (4, 1, 2), (2, 1, 1), (6, 1, 1), (8, 2, 1)],
)
def test_what_is_uneven_or_has_a_prompt_in_it_stays_whole(slots, parts, batches):
    assert micro_batches.count(slots, parts, xla(make_mesh(2, 1), micro_batches=2)) == batches
    assert micro_batches.count(slots, parts, xla(make_mesh(2, 1))) == 1


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ConfigError, match="micro_batches = 2 with one data shard"):
        backend("xla", make_mesh(1, 2), micro_batches=2)
    with pytest.raises(ConfigError, match="max_num_seqs = 6 does not divide into micro_batches = 2 of 2"):
        check_config(TINY, EngineConfig(max_num_seqs=6, micro_batches=2), 2)
