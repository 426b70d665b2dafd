"""The functions of docs/research.md: each is jitted from outside, and the default backend has derivatives."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.model import nextn, trunk, xla
from tests.models import TINY, tiny_params
from tests.rounding import near, of_model

PAGE = Path(__file__).resolve().parents[2] / "docs/research.md"
IDS = jnp.asarray(np.arange(12)[None] % 7 + 3)
# A pass forward, and one back through the products of each of its factors.
TERMS = 3 * of_model(TINY, IDS.size)
Call = Callable[..., Any]
CALLS: dict[str, Call] = {
    "trunk.forward": lambda p: trunk.forward(p, TINY, IDS),
    "trunk.forward_traced": lambda p: trunk.forward_traced(p, TINY, IDS, taps=(0, 1)),
    "trunk.logits": lambda p: trunk.logits(p, trunk.forward(p, TINY, IDS)),
    "nextn.teacher_forced": lambda p: nextn.teacher_forced(p, TINY, 0, IDS[:, 1:], hidden(p)[:, :-1]),
    "nextn.drafts_forced": lambda p: nextn.drafts_forced(p, TINY, IDS, hidden(p)[:, :-2], 2),
    "nextn.logits": lambda p: nextn.logits(p, 0, hidden(p)),
}


def hidden(params: Any) -> jax.Array:
    return trunk.forward(params, TINY, IDS)


@pytest.fixture(scope="module")
def params() -> Any:
    return tiny_params()


def test_all_functions_of_the_page_are_here():
    named = re.findall(r"^\| `((?:trunk|nextn)\.\w+)", PAGE.read_text(), re.MULTILINE)
    assert {*named} == {*CALLS}


@pytest.mark.parametrize("name", CALLS)
def test_each_is_traced_from_outside(params, name):
    call = CALLS[name]
    shapes = jax.eval_shape(call, params)
    lowered = jax.jit(call).lower(params)
    assert jax.tree.leaves(lowered.out_info) == jax.tree.leaves(shapes)
    assert type(lowered.out_info) is type(shapes)


def test_a_traced_pass_is_mapped_and_jitted(params):
    traced = jax.jit(CALLS["trunk.forward_traced"])(params)
    assert isinstance(traced, trunk.Traced)
    assert traced.hidden.shape == (*IDS.shape, TINY.hidden_size)
    assert {*traced.taps} == {0, 1}
    assert jax.tree.map(lambda a: a, traced).hidden is traced.hidden


def test_the_default_backend_has_the_derivatives_of_the_dense_one(params):
    """Reverse and forward; the loop over visits alone has none in reverse."""

    def loss(p: Any, *on: Any) -> jax.Array:
        return jnp.square(trunk.logits(p, trunk.forward(p, TINY, IDS, *on))).mean()

    dense = xla(experts="dense")
    both = jax.jit(lambda p: (jax.grad(loss)(p), jax.grad(lambda q: loss(q, dense))(p)))
    ours, theirs = both(params)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        near(one, other, TERMS)
    direction = jax.tree.map(jnp.ones_like, params)
    _, slope = jax.jit(lambda p, d: jax.jvp(loss, (p,), (d,)))(params, direction)
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(ours)]
    near(slope, sum(leaf.sum() for leaf in leaves), TERMS, size=sum(np.abs(leaf).sum() for leaf in leaves))
