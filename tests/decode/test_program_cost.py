"""What programs cost on a CPU is counted, and may only fall."""

import os
import subprocess
import sys

import pytest

from tests.decode.program_cost import Cost, faults, run_by

PROGRAM = """
%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %next = s32[] fusion(%i), kind=kLoop, calls=%f
  %x = f32[4]{0} dot(%p, %p)
  ROOT %t = (s32[], f32[4]{0}) tuple(%next, %x)
}

%condition (p: (s32[], f32[4])) -> pred[] {
  %p = (s32[], f32[4]{0}) parameter(0)
  ROOT %less = pred[] fusion(%p), kind=kLoop, calls=%g
}

%short (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4]{0} parameter(0)
}

%long (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %a = f32[4]{0} copy(%p)
  ROOT %b = f32[4]{0} fusion(%a), kind=kLoop, calls=%h
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %w = (s32[], /*index=1*/f32[4]{0}) while(%a), condition=%condition, body=%body, LOOP
  %c = f32[4]{0} conditional(%a, %a, %a), branch_computations={%short, %long}
  ROOT %k = f32[4]{0} call(%c), to_apply=%long, frontend_attributes={CALL}
}
"""


@pytest.mark.parametrize(
    ("loop", "rounds"),
    [('backend_config={"known_trip_count":{"n":"5"}}', 5), ("backend_config={}", 1)],
)
@pytest.mark.parametrize(("call", "called"), [('xla_cpu_small_call="true"', 1), ("", 2)])
def test_loops_conditions_and_calls_are_counted(loop, rounds, call, called):
    """A loop of known length by its rounds, a condition by its longer branch, a small call as one kernel."""
    assert run_by(PROGRAM.replace("LOOP", loop).replace("CALL", call)) == rounds * 3 + 2 + called


def test_what_exceeds_a_budget_is_named():
    most = {"instructions": 10, "kernels": 5, "run": 7}
    assert faults("step", Cost(10, 5, 7), most) == []
    assert faults("step", Cost(11, 5, 8), most) == [
        "step: 11 instructions, budget 10",
        "step: 8 run, budget 7",
    ]


def held(*cases: str) -> None:
    """Programs are counted as they are compiled for users."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "tests.decode.program_cost", *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.rest
def test_programs_stay_within_their_budgets():
    held("tiny-sampled", "demo-undrafted")


@pytest.mark.slow
def test_all_programs_stay_within_their_budgets():
    held()
