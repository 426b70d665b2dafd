"""The work of a launch, counted from the weights."""

from dataclasses import replace

import jax
import pytest

from mtp_jax import checkpoint
from mtp_jax.api.local import local_runner
from mtp_jax.decode.keys import SamplingMode, StepKey
from mtp_jax.lab.bench import cost
from mtp_jax.lab.bench.cost import of_entries, of_head, of_nextn, of_trunk
from mtp_jax.lab.bench.subject import load
from mtp_jax.lab.planning.work import expected_experts
from mtp_jax.model import backend
from mtp_jax.model.draft_rows import with_draft_rows
from mtp_jax.model.narrow import Fp8
from mtp_jax.model.stack import Stack
from tests import golden


@pytest.mark.parametrize(
    "key",
    [
        StepKey(2, 3, 4, SamplingMode()),
        StepKey(1, 0, 4, SamplingMode()),
        StepKey(0, 0, 4, SamplingMode(), 16, 1),
        StepKey(2, 3, 4, SamplingMode(), 16, 1),
    ],
)
def test_quantised_weights_are_fewer_bytes_but_as_many_operations(key):
    directory = golden.model_dir("fp8")
    plain = checkpoint.load(directory, dtype="bfloat16", narrow="dequantise")
    kept = checkpoint.load(directory, dtype="bfloat16", narrow="keep")
    leaves = jax.tree.leaves(kept.params, is_leaf=lambda a: isinstance(a, Fp8))
    assert any(isinstance(a, Fp8) for a in leaves)
    one, other = (cost.of_launch(key, m.config, m.params, 16, "bfloat16", 1) for m in (plain, kept))
    assert one.flops == other.flops > 0
    assert other.bytes < one.bytes


@pytest.mark.parametrize("variant", ["bf16", "fp8", "v4_fp4", "dsa_v32_fp8"])
def test_a_runners_own_layout_costs_the_same(variant, monkeypatch):
    """Layers alike are a stack in a runner that loops over them, which depends on the processor."""
    monkeypatch.setattr(backend, "multiplies_bf16", lambda: False)
    subject = load(str(golden.model_dir(variant)))
    engine = subject.engine(1, slots=2, max_model_len=32)
    params, key = local_runner(engine).params, StepKey(2, 1, 2, SamplingMode())
    assert variant in ("v4_fp4", "dsa_v32_fp8") or any(isinstance(p, Stack) for p in params.layers)
    one, other = (cost.of_launch(key, subject.config, p, 16, "float32", 1) for p in (subject.params, params))
    assert one == other


def test_with_two_nextn_layers_they_take_turns_and_the_second_catches_up():
    model = checkpoint.load(golden.model_dir("rigged_mtp2"))
    key = StepKey(1, 3, 0, SamplingMode())
    work, plain = (
        cost.of_launch(k, model.config, model.params, 16, "float32", 1) for k in (key, replace(key, depth=0))
    )
    trunk, head, (one, two) = of_trunk(model.params), of_head(model.params), map(of_nextn, model.params.nextn)
    narrow, wide = (expected_experts(model.config, w) for w in (1, 4))
    drafts = 3 * head.always + 2 * one.touched(narrow) + two.touched(narrow)
    rows = 2 * of_entries(model.params.nextn[1]).always  # of the newest token, and of the window
    known = one.touched(wide) + rows
    more = trunk.touched(wide) - trunk.touched(narrow)
    assert work.bytes - plain.bytes == pytest.approx(more + drafts + known)


@pytest.mark.parametrize("variant", ["rigged", "glm46"])
def test_nextn_rows_of_a_prompt_cost_their_merge_and_latents(variant):
    model = checkpoint.load(golden.model_dir(variant))
    plain = replace(model.params, nextn=())
    key = StepKey(0, 0, 0, SamplingMode(), 16, 1)
    with_rows, without = (
        cost.of_launch(key, model.config, p, 16, "float32", 1) for p in (model.params, plain)
    )
    (layer,) = model.params.nextn
    assert with_rows.bytes - without.bytes == of_entries(layer).always
    assert with_rows.flops - without.flops == 2 * 16 * of_entries(layer).always / 4


def test_a_draft_head_is_read_for_every_draft_and_its_entries_once():
    found = checkpoint.load(*(golden.model_dir("eagle3", part) for part in ("model", "draft")))
    params, key = found.params, StepKey(1, 3, 0, SamplingMode())
    work, plain = (
        cost.of_launch(k, found.config, params, 16, "float32", 1) for k in (key, replace(key, depth=0))
    )
    assert params.drafter is not None
    narrow, wide = (expected_experts(found.config, w) for w in (1, 4))
    more = of_trunk(params).touched(wide) - of_trunk(params).touched(narrow)
    drafts = 3 * (of_nextn(params.drafter).always + cost.nbytes(params.drafter.head))
    assert work.bytes - plain.bytes == pytest.approx(more + drafts + of_entries(params.drafter).always)


def test_drafts_read_the_rows_that_they_choose_among():
    found = checkpoint.load(golden.model_dir("rigged"))
    part, key = with_draft_rows(found.params, range(8), None), StepKey(2, 3, 0, SamplingMode())
    whole, less = (cost.of_launch(key, found.config, p, 16, "float32", 1) for p in (found.params, part))
    assert part.draft_rows is not None
    rest = cost.nbytes(found.params.table) - cost.nbytes(part.draft_rows.table)
    assert rest > 0
    assert whole.bytes - less.bytes == 3 * rest
    assert cost.of_draft(found.params).always - cost.of_draft(part).always == rest
