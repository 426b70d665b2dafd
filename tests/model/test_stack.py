"""Layers in a stack compute what the same layers compute one by one, and take the same memory."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.decode.keys import PageKey, StepKey
from mtp_jax.decode.launches import ReadPages, WritePages
from mtp_jax.engine.engine import Engine
from mtp_jax.model import stack
from mtp_jax.model.backend import xla, xla_cpu
from mtp_jax.model.narrow import Bf16, is_narrow, nbytes, with_bits
from mtp_jax.model.params import Layer, Params
from mtp_jax.model.stack import Stack
from tests.models import GREEDY, TINY, accepted, make_engine, prompts, rigged, serve
from tests.rounding import near, of_model

# One dense layer, then two MoE layers alike.
CFG = replace(TINY, num_hidden_layers=3)


def narrow(layer: Layer) -> Layer:
    """The layer as a bfloat16 checkpoint is kept on a CPU."""

    def weight(w: Any) -> Any:
        return with_bits(Bf16(jnp.asarray(np.asarray(w).astype(jnp.bfloat16)))) if w.ndim > 1 else w

    kept = jax.tree.map(weight, layer)
    wide = {n: getattr(layer.mlp, n) for n in ("router", "bias") if hasattr(layer.mlp, n)}
    return replace(kept, mlp=replace(kept.mlp, **wide))


def params() -> Params:
    whole = rigged(CFG)
    return replace(whole, layers=tuple(map(narrow, whole.layers)))


def memory(tree: Any) -> set[int]:
    """Where narrow weights lie. XLA copies small arrays that begin elsewhere than it likes."""
    weights = [w for w in jax.tree.leaves(tree, is_leaf=is_narrow) if is_narrow(w)]
    return {np.asarray(a).ctypes.data for a in jax.tree.leaves(weights)}


def in_groups(engine: Engine) -> list[int]:
    return [len(g) if isinstance(g, Stack) else 1 for g in local_runner(engine).params.layers]


def run(*features: str) -> tuple[Engine, Any, Any]:
    """An engine on such a processor, what it answers to long and short prompts, and its pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtp_jax.model.device.processor_features", lambda: features)
        engine = make_engine(params(), CFG, num_speculative_tokens=1, max_model_len=128)
    jobs = [(p, GREEDY) for p in (*prompts(3), *prompts(1, shortest=40))]
    requests = [serve(engine, [job], exactly=True)[0] for job in jobs]
    runner = local_runner(engine)
    runner.compile([PageKey(2)])
    pages = runner.do(ReadPages(0, (1, 3))).read()
    return engine, [(r.progress.output, accepted(r)) for r in requests], pages


@pytest.fixture(scope="module")
def stacked() -> tuple[Engine, Any, Any]:
    return run("avx2")


@pytest.mark.rest
def test_a_stack_computes_what_its_layers_compute(stacked):
    """Tokens, acceptance and pages, those of other layouts included: a page has one form.

    Layers are apart where matrix instructions multiply them, which is another form of every product.
    """
    together, said, pages = stacked
    apart, expected, wanted = run("avx2", "amx_bf16")
    assert in_groups(together) == [1, 2]
    assert in_groups(apart) == [1, 1, 1]
    assert said == expected
    assert sum(sum(kept) for _, kept in said) > 20
    assert local_runner(together).page_bytes == local_runner(apart).page_bytes
    assert [a.shape for a in pages] == [a.shape for a in wanted]
    for got, want in zip(pages, wanted, strict=True):
        near(got, want, of_model(CFG, 64))
    runner = local_runner(together)
    runner.do(WritePages(0, (5, 2), wanted))
    for got, want in zip(runner.do(ReadPages(0, (5, 2))).read(), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_layers_that_are_laid_out_are_stacked_where_they_lie():
    given, on = params(), xla_cpu()
    laid_out = on.laid_out(given)
    jax.tree.map(np.testing.assert_array_equal, laid_out, given)
    whole = stack.stacked([*laid_out.layers[1:]])
    assert memory(whole) == memory(laid_out.layers[1])
    assert memory(stack.parts(whole)) == memory(laid_out.layers[1:])
    assert nbytes(whole) == nbytes(laid_out.layers[1:])
    assert not memory(stack.stacked([*given.layers[1:]])) & memory(given.layers)


def test_a_list_that_is_consumed_is_let_go():
    layers = [*params().layers[1:]]
    stack.stacked(layers, consume=True)
    assert layers == []


@pytest.mark.parametrize(
    ("on", "groups"),
    [(xla_cpu(), [1, 2]), (xla_cpu(matrices=True), [1, 1, 1]), (xla(), [1, 1, 1])],
)
def test_only_what_is_read_in_place_is_stacked(on, groups):
    """Products of arrays and matrix instructions would copy every weight out of its stack."""
    assert [len(g) for g in on.arranged(params().layers)] == groups
    assert [len(g) for g in on.arranged(rigged(CFG).layers)] == [1, 1, 1]


@pytest.mark.rest
def test_no_weight_is_copied_out_of_its_stack(stacked):
    """No fusion of a step gives a weight of one layer, in its own width or widened."""
    runner = local_runner(stacked[0])
    step = next(k for k in runner.keys if isinstance(k, StepKey) and k.slots and not k.tokens)
    text, layers = runner.programs.program(step).as_text(), runner.params.layers[1]
    assert isinstance(layers, Stack)
    weights = jax.tree.leaves(layers.tree, is_leaf=is_narrow)
    for w in (w for w in weights if is_narrow(w)):
        shape = ",".join(map(str, w.shape[1:]))
        assert f"[{len(layers)},{shape}]" in text
        kinds = ("u16", "bf16", "f32") if shape.count(",") > 2 else ("u16", "bf16")  # rows may have its shape
        copies = tuple(f" = {kind}[{shape}]" for kind in kinds)
        fusions = (line for line in text.splitlines() if "fusion(" in line)
        assert not [line for line in fusions if any(copy in line for copy in copies)]
