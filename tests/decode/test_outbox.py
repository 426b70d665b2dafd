"""Results in a box: nothing that a step returns is in a new place, and the host reads the same."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.api.local import local_runner
from mtp_jax.decode.keys import StepKey
from mtp_jax.decode.outbox import Boxed, into_box
from mtp_jax.decode.programs import Programs
from mtp_jax.decode.result import StepResult
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.model.params import shapes
from mtp_jax.model.sharding import make_mesh
from tests.models import accepted, make_engine, prompts, rigged, serve

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PARAMS = rigged()
SIZES: dict[str, Any] = {"num_speculative_tokens": 3, "max_num_seqs": 2}


def boxed(mesh=None) -> Engine:
    """An engine whose programs have boxes, as on a GPU."""
    engine = make_engine(PARAMS, mesh=mesh, **SIZES)
    runner = local_runner(engine)
    runner.programs = Programs(runner.decoding, shapes(runner.params), runner._abstract)
    runner.programs.lowering.boxed = True
    return engine


def test_a_box_stays_where_it_is():
    """Its copies do not change with it."""

    def step(params, state, add):
        return state + 1, StepResult(params * state + add, None)

    shape = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    lowered = jax.jit(into_box(step), donate_argnums=(1, 2)).lower(shape, shape, shape, shape)
    assert moved(lowered) == 0
    assert moved(jax.jit(step, donate_argnums=1).lower(shape, shape, shape)) == 1
    run = Boxed(lowered.compile(), shape, None)
    two, state = np.full((2, 3), 2, np.int32), cast(Any, jnp.ones((2, 3), jnp.int32))
    state, first = run(two, state, two)
    before = place(run)
    _, second = run(two, state, two)
    assert place(run) == before
    assert [np.unique(r.packed).tolist() for r in (first, second)] == [[4], [6]]


@pytest.mark.rest
@pytest.mark.parametrize("mesh", [None, (1, 2)])
def test_a_step_returns_nothing_in_a_new_place(mesh):
    devices = mesh and make_mesh(*mesh)
    engine, plain = boxed(devices), make_engine(PARAMS, mesh=devices, **SIZES)
    jobs = [(prompt, GREEDY) for prompt in prompts(2)]
    found = serve(engine, jobs, exactly=True)
    assert [r.progress.output for r in found] == [r.progress.output for r in serve(plain, jobs, exactly=True)]
    assert sum(sum(accepted(r)) for r in found) > 5
    programs = local_runner(engine).programs
    steps = {key: run for key, run in programs._compiled.items() if isinstance(key, StepKey)}
    assert {bool(key.tokens) for key in steps} == {False, True}
    assert all(isinstance(run, Boxed) for run in steps.values())
    places = {key: place(run) for key, run in steps.items()}
    serve(engine, jobs, exactly=True)
    assert {key: place(run) for key, run in steps.items()} == places
    assert moved(programs.lowering.program(next(key for key in steps if not key.tokens))) == 0


def place(run: Boxed) -> list[int]:
    assert run._box is not None
    return [shard.data.unsafe_buffer_pointer() for shard in run._box.addressable_shards]


def moved(lowered: jax.stages.Lowered) -> int:
    """Results of a program that alias no argument."""
    text = lowered.as_text()
    aliases = text.count("tf.aliasing_output") + text.count("jax.buffer_donor")
    return len(jax.tree.leaves(lowered.out_info)) - aliases
