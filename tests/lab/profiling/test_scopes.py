"""Scopes from op names, and time from a trace with known instructions."""

import pytest

from mtp_jax.lab.bench.trace import Op, Trace
from mtp_jax.lab.profiling.scopes import BOOKKEEPING, NOWHERE, Scope, scope_of, scope_of_program, scopes_of
from mtp_jax.lab.profiling.trace import DISPATCH, HOST_GAP, by_scope, launches

HLO = """\
%fused_computation (p.1: f32[2]) -> f32[2] {
  %p.1 = f32[2] parameter(0)
  ROOT %add.1 = f32[2] add(%p.1, %p.1), metadata={op_name="jit(f)/verify/layer_0/attend/add"}
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2] parameter(0)
  %fusion.1 = f32[2] fusion(%x), kind=kLoop, calls=%fused_computation
  %dot.2 = f32[2] dot(%x, %fusion.1)
  %exp.3 = f32[2] exponential(%dot.2), metadata={op_name="jit(f)/draft/nextn_0/mlp/exp"}
  ROOT %copy.4 = f32[2] copy(%exp.3)
}
"""


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("jit(f)/verify/layer_0/attend/dot_general", Scope("verify", "attention")),
        ("jit(f)/draft/nextn_0/moe_experts/while/body/add", Scope("draft", "experts")),
        ("jit(f)/draft/draft_sample/head/dot", Scope("draft", "head")),
        ("jit(f)/commit/add", Scope("commit", "other")),
        ("reduce_sum", NOWHERE),
    ],
)
def test_scope_of_a_path(path, scope):
    assert scope_of(path) == scope


def test_instructions_without_a_path_have_that_of_their_neighbours():
    found = scopes_of(HLO)
    assert found["fusion.1"] == Scope("verify", "attention")  # of what it calls
    assert found["dot.2"] == Scope("draft", "MLP")  # of what uses it
    assert found["copy.4"] == Scope("draft", "MLP")  # of what it uses


def test_a_fusion_with_a_matrix_product_counts_for_the_product():
    def line(name: str, what: str, path: str) -> str:
        return f'  %{name} = f32[4] {what}, metadata={{op_name="jit(f)/{path}"}}'

    hlo = "\n".join(
        [
            "%fused (p: f32[2]) -> f32[4] {",
            line("dot.1", "dot(%p, %p)", "verify/head/dot_general"),
            line("max.2", "reduce(%dot.1)", "accept/sample/reduce_max"),
            "}",
            "%small (p: f32[2]) -> f32[4] {",
            line("exp.3", "exponential(%p)", "verify/head/exp"),
            "}",
            "ENTRY %main (x: f32[2]) -> f32[4] {",
            line("with_product", "fusion(%x), kind=kLoop, calls=%fused", "accept/sample/reduce_max"),
            line("without", "fusion(%x), kind=kLoop, calls=%small", "accept/sample/reduce_max"),
            "}",
        ]
    )
    found = scopes_of(hlo)
    assert found["with_product"] == Scope("verify", "head")
    assert found["without"] == Scope("accept", "sample")


def test_programs_between_steps_are_named_for_what_they_do():
    assert scope_of_program("jit_update") == Scope(BOOKKEEPING, "slots and page tables are renewed")
    assert scope_of_program("jit_convert_element_type") == Scope(BOOKKEEPING, "another program")


def test_every_moment_goes_to_one_scope():
    a, b = Scope("verify", "attention"), Scope("draft", "MLP")
    first = (
        Op(10, 50, "jit_f", "loop", 1),
        Op(20, 30, "jit_f", "inner", 1),
        Op(60, 80, "jit_f", "loop", 2),
        Op(85, 90, "jit_g", "loop", None),
    )
    second = (Op(40, 46, "jit_f", "inner", 1),)
    trace = Trace(0, 100, (first, second))
    assert launches(trace) == {("jit_f", 1): (10, 50), ("jit_f", 2): (60, 80)}
    assert by_scope(trace, {"jit_f": {"loop": a, "inner": b}}) == {
        HOST_GAP: 10 + 10 + 5 + 10,
        a: 10 + 10 + 3 + 4 + 20,  # alone, half of the time beside another thread
        b: 10 + 3,
        Scope(BOOKKEEPING, "another program"): 5,
    }


def test_time_within_a_launch_without_instructions_is_dispatch():
    ops = (Op(10, 20, "jit_f", "x", 7), Op(30, 60, "jit_f", "x", 7))
    times = by_scope(Trace(0, 50, (ops,)), {"jit_f": {"x": Scope("verify", "MLP")}})
    assert times == {HOST_GAP: 10, DISPATCH: 10, Scope("verify", "MLP"): 30}
