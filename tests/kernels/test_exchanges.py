"""What is read off a compiled program: which collectives products run beside."""

from tests.kernels.compile_exchange import exchanges

TEXT = """HloModule jit_run

%dots (a: bf16[8,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  ROOT %d = bf16[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}
}

%sent (b: s32[8]) -> s32[8] {
  %b = s32[8]{0} parameter(0)
  ROOT %c = s32[8]{0} all-to-all(%b), dimensions={0}
}

ENTRY %main (p: bf16[8,8]) -> bf16[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  %one-start = ((s32[8]), s32[8]) async-start(%p), calls=%sent
  %x = bf16[8,8]{1,0} fusion(%p), kind=kLoop, calls=%dots
  %y = bf16[8,8]{1,0} custom-call(%x), custom_call_target="mosaic_gpu_v2"
  %one-done = s32[8]{0} async-done(%one-start)
  %two-start = ((s32[8]), s32[8]) async-start(%y), calls=%sent
  %z = bf16[8,8]{1,0} copy(%y)
  %two-done = s32[8]{0} async-done(%two-start)
  ROOT %three = bf16[8,8]{1,0} all-to-all(%z), dimensions={0}
}
"""


def test_products_between_start_and_end_are_counted():
    beside, alone = exchanges(TEXT)
    assert [(e.kind, e.products) for e in beside] == [("all-to-all", 2), ("all-to-all", 0)]
    assert alone == ["all-to-all"]
