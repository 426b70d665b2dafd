"""The model that predicts times: against measured times, and against the counts that it is made of."""

import tomllib
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from kernels_pallas.check.case import KernelPlan, Work
from kernels_pallas.check.cases.grouped_matmul import plan
from kernels_pallas.check.device import RATES
from kernels_pallas.check.registry import cases
from kernels_pallas.deviceless import prediction
from kernels_pallas.deviceless.prediction import LIMITED, START, apart, inside, launch, predicted, ratios
from kernels_pallas.deviceless.step import STEPS, lines
from kernels_pallas.grouped_matmul.tile import ProductSizes, Tile
from kernels_pallas.measured import newest, runs
from tests.kernels.compile_step import BUDGET

PAGE = Path(__file__).parents[2] / "docs" / "measured" / "2026-11-28-compiled.md"
ALL = {c.name: c for c in cases() if not c.small}
# Short calls, which the table's method hardly resolves; and FP8 rows, whose expansion is not counted.
OUTSIDE = {
    "router/v3-64",
    "mla_decode/heads16-window4-batch1-32k",
    "mla_decode/fp8-heads16-window4-batch128-4k",
}


def test_predictions_are_near_measured_times():
    found = ratios(ALL.values())
    assert found.keys() == {name for run in runs() for name in run.us}
    assert {name for name, ratio in found.items() if not inside(ratio)} == OUTSIDE
    assert apart(found) < 1.115
    assert found["grouped_matmul/gated-32x2048"] < 1.235
    assert found["fp8_matmul/o-4096"] < 1.215
    # Nothing was chosen by times of steps.
    for window in (1, 4):
        name = f"share, 1 slot, window {window}, without mla_absorb"
        run = newest(name)
        assert run
        assert 0.8 < STEPS[name].seconds(run.card) * 1e6 / run.steps[name] < 1


def test_no_prediction_is_below_the_floor():
    h200 = RATES["H200"]
    for name, case in ALL.items():
        assert predicted(case, "H200") > max(h200.floor(case.work), START), name


def test_the_slowest_part_decides():
    def us(work, plan=None, path=0):
        return (launch(work, plan, "H200", path) - START) * 1e6

    assert us(Work(0, 4.8e9, "bf16"), KernelPlan(132, 0)) == pytest.approx(1e3 / 0.9)
    even = KernelPlan(132, 0, 989.4e12 / 1.83e9 * LIMITED * 1e-3 / 132)
    assert us(Work(0, 0, "bf16"), even) == pytest.approx(1e3, rel=1e-3)
    # Work of a thread block too many takes a second wave; half the thread blocks leave half of the GPU idle.
    assert us(Work(0, 0, "bf16"), replace(even, blocks=133)) == pytest.approx(2e3, rel=1e-3)
    asked = KernelPlan(132, 1e6)
    assert us(Work(0, 0, "fp8"), asked) == pytest.approx(1e6 / 26 / 1980)
    assert us(Work(0, 0, "fp8"), replace(asked, blocks=20)) == pytest.approx(1e6 / 64 / 1980)
    assert us(Work(0, 0, "fp8"), KernelPlan(16, 0), path=990) == pytest.approx(1.0)


@pytest.mark.parametrize(("rows", "asked"), [(128, 128), (256, 512 / 3)])
def test_two_thread_blocks_of_a_tile_fetch_weights_once(rows, asked):
    """Operations per byte that is asked of the second-level cache, of a large product."""
    sizes = ProductSizes(Tile(rows, 128), jnp.float8_e4m3fn, False, 4096, 7168, 16384, 4096 // rows)
    cut = plan(sizes, rows=0)
    assert cut.flops / cut.asked == pytest.approx(asked)
    assert cut.flops * cut.blocks == 2 * 4096 * 7168 * 16384
    assert (ALL["fp8_matmul/o-4096"].plan == plan(sizes, rows=4096)) == (rows == 256)


def test_a_step_has_the_launches_that_were_compiled():
    """Those of one GPU: of one in eight, they are the same but for collectives."""
    budget = tomllib.loads(BUDGET.read_text(encoding="utf-8"))
    for name, of in {
        "share, 1 slot, window 1": "slots1_window1_one",
        "share, 1 slot, window 4": "slots1_one",
        "one of 8 GPUs, 128 slots, window 4": "one",
        "wide, 128 slots, window 4": "one",
    }.items():
        step = STEPS[name]
        assert step.launches == budget[of]["launches_per_layer"]
        assert len(step.attention()) + len(step.moe()) <= step.launches


def test_the_report_says_that_it_predicts(monkeypatch):
    *of_cases, summary, one, four, before_one, before_four, many, wide = lines()
    assert summary == (
        "17 of 20 cases within a factor of 1.3 of their measured times, in the median a factor of 1.11"
    )
    assert {line.split()[0] for line in of_cases if line.endswith("OUTSIDE")} == OUTSIDE
    steps = one, four, before_one, before_four, many, wide
    assert all(line.startswith("PREDICTED for an H200: ") for line in steps)
    assert "measured" not in one
    assert before_one.endswith("measured 6.6 ms, H200")
    # The page has these figures.
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    for step in STEPS.values():
        layer, whole = sum(step.layer("H200").values()) * 1e6, step.seconds("H200") * 1e3
        assert any(f"| {layer:,.0f} |" in row and f"| {whole:.1f} |" in row for row in rows)
    # Slower memory makes every step longer.
    before = [step.seconds("H200") for step in STEPS.values()]
    monkeypatch.setattr(prediction, "COPY", 0.45)
    assert all(step.seconds("H200") > t for step, t in zip(STEPS.values(), before, strict=True))
