"""The tools that hold kernels to account: lowering, verification, rates, reports, the command."""

import re
from collections import Counter
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import KERNELS
from kernels_pallas.check import __main__ as check
from kernels_pallas.check import timing
from kernels_pallas.check.case import Case, UnavailableError, Work
from kernels_pallas.check.device import RATES, rates
from kernels_pallas.check.lower import lower
from kernels_pallas.check.registry import cases
from kernels_pallas.check.timing import CALLS, repeated
from kernels_pallas.check.verify import verify
from kernels_pallas.deviceless import budget, report
from kernels_pallas.measured import Run, kernels, measured, runs
from mtp_jax.model.backend import backend
from mtp_jax.model.products.hopper import HopperProducts

ALL = {c.name: c for c in cases()}
# One of each attention kernel; the others are slow.
FAST = ("mla_decode/heads16-window4-batch1-32k", "mla_prefill/small-ragged")
DOUBLING = Case(
    name="test/doubling",
    inputs=lambda key: (jnp.arange(1.0, 9.0),),
    kernel=lambda x, interpret=None: 2 * x,
    reference=lambda x: x + x,
    work=Work(flops=8, bytes=64, format="bf16"),
)


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in ALL])
def test_every_case_lowers_for_cuda(name):
    assert "@mosaic_gpu" in lower(ALL[name])


def test_names_of_cases_are_unique_and_have_a_budget():
    assert len(ALL) == len(cases())
    known = budget.budgets()
    assert {name.split("/")[0] for name in ALL} == set(known)
    shapes = {(kernel, shape) for kernel, limits in known.items() for shape in limits.cases}
    assert shapes <= {tuple(name.split("/")) for name in ALL}


def test_a_right_kernel_passes_and_wrong_ones_do_not():
    def wrong(change):
        return replace(DOUBLING, kernel=lambda x, interpret=None: change(2 * x))

    key = jnp.zeros(2, jnp.uint32)
    assert verify(DOUBLING, key).faults(1e-2) == []
    (fault,) = verify(wrong(lambda y: y.at[3].mul(1.2)), key).faults(1e-2)
    assert "relative distance" in fault
    (fault,) = verify(wrong(lambda y: y.at[3].set(jnp.nan)), key).faults(1e-2)
    assert fault.startswith("1 elements are NaN")


def test_no_output_hides_what_is_wrong_with_another():
    def two(x):
        return 2 * x, x

    def infinite(x, interpret=None):
        return 2 * x, x.at[0].set(jnp.inf)

    key, pair = jnp.zeros(2, jnp.uint32), replace(DOUBLING, reference=two)
    assert verify(replace(pair, kernel=lambda x, interpret=None: two(x)), key).faults(1e-2) == []
    # Infinite on both sides: no element to blame, and no distance.
    both = replace(pair, kernel=infinite, reference=infinite)
    (fault,) = verify(both, key).faults(1e-2)
    assert "relative distance nan" in fault
    # A reference too large for its norm: everything would be near it.
    huge = replace(DOUBLING, kernel=lambda x, interpret=None: x, reference=lambda x: x.at[0].set(-1e30))
    (fault,) = verify(huge, key).faults(1e-2)
    assert "relative distance nan" in fault


def test_timed_programs_make_every_call():
    seen = []

    def double(x):
        seen.append(x)
        return 2 * x

    flush = repeated(double)((jnp.full(3, 0.5),), jnp.zeros(4))
    np.testing.assert_array_equal(flush, CALLS)
    assert seen


def test_floor_is_the_longer_of_moving_and_multiplying():
    h200 = RATES["H200"]
    assert rates("NVIDIA H200") is h200
    assert rates("NVIDIA A100-SXM4-80GB") is None
    assert rates("NVIDIA H100 80GB HBM3") is RATES["H100"]
    assert rates("NVIDIA H100 PCIe") is RATES["H100 PCIe"]
    assert rates("NVIDIA H200 NVL") is RATES["H200 NVL"]
    assert rates("NVIDIA GH200 480GB") is RATES["GH200"]
    assert rates("NVIDIA GH200 144G HBM3e") is RATES["GH200 144G"]
    assert h200.floor(Work(0, 4.8e9, "bf16")) == pytest.approx(1e-3)
    assert h200.floor(Work(1.58e12, 4.8e9, "bf16")) == pytest.approx(2e-3)
    assert h200.floor(Work(1.58e12, 4.8e9, "fp8")) == pytest.approx(1e-3)


def test_without_a_gpu_the_command_says_so(capsys):
    assert check.main(["mla_decode"]) == 2
    assert "need an NVIDIA GPU of the Hopper generation" in capsys.readouterr().err


def test_an_unknown_pattern_is_an_error(capsys):
    assert check.main(["--dry-run", "no-such-kernel"]) == 2
    assert "no-such-kernel" in capsys.readouterr().err


def test_a_dry_run_lowers_and_lists(capsys):
    assert check.main(["--dry-run", "mla_decode/heads8-window1-batch1-1k"]) == 0
    out = capsys.readouterr().out
    assert "2 kernels  against xla" in out
    assert re.search(r"1 of 1 cases lower for CUDA, in \d+ s; none has been run", out)


def test_a_case_that_does_not_lower_fails_the_dry_run(capsys, monkeypatch):
    def refuses(x, interpret=None):
        raise NotImplementedError("no such layout")

    monkeypatch.setattr(check, "cases", lambda *_: (replace(DOUBLING, kernel=refuses),))
    assert check.main(["--dry-run"]) == 1
    assert "DOES NOT LOWER: NotImplementedError: no such layout" in capsys.readouterr().out


def test_the_command_verifies_and_times(capsys, monkeypatch):
    def absent(x):
        raise UnavailableError("needs cuDNN")

    wrong = replace(DOUBLING, name="test/small-wrong", kernel=lambda x, interpret=None: 3 * x)
    right = replace(DOUBLING, baselines={"itself": DOUBLING.reference, "cudnn": absent})
    monkeypatch.setattr(check, "cases", lambda *_: (right, wrong))
    monkeypatch.setattr(check, "rates", lambda kind: RATES["H200"])
    monkeypatch.setattr(timing, "FLUSH", 16)
    monkeypatch.setattr(timing, "BUSY", 0)
    monkeypatch.setattr(timing, "_clock", lambda: (1980.0, 350.4))
    assert check.main(["--seed", "1"]) == 1
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert "seed 1" in first
    # On a CPU the difference of the two timed programs may be nothing or less.
    timed = r"( +[\d.]+ us +[\d.]+ TFLOP/s +\d+ GB/s  floor / time +\d+%| +too short to tell)"
    hot = r"; hot ([\d.]+ us|too short to tell) at 1980 MHz, 350 W"
    itself = r"; itself ([\d.]+ us|too short to tell); cudnn unavail.*needs cuDNN"
    assert re.search(rf"distance 0.0e\+00{timed}{hot}{itself}", second)
    assert third.split() == ["test/small-wrong", "distance", "5.0e-01", "WRONG"]
    assert fourth == (
        "test/small-wrong: relative distance 5.00e-01 from the reference, at most 1e-02; "
        "worst in output 1 of 1, float32[8], at [7]: 24.0 instead of 16.0"
    )


def test_a_case_that_cannot_be_timed_does_not_hide_the_others(capsys, monkeypatch):
    times = iter([RuntimeError("out of memory"), 0.0])

    def seconds(*_):
        if isinstance(time := next(times), Exception):
            raise time
        return time

    named = (replace(DOUBLING, name=f"test/{n}") for n in ("first", "second"))
    monkeypatch.setattr(check, "cases", lambda *_, found=tuple(named): found)
    monkeypatch.setattr(check, "rates", lambda kind: RATES["H200"])
    monkeypatch.setattr(check, "seconds", seconds)
    monkeypatch.setattr(check, "hot", lambda *_: timing.Hot(3e-6, None))
    assert check.main(["--seed", "1"]) == 1
    _, first, second, fault = capsys.readouterr().out.splitlines()
    assert re.search(r"test/first +distance 0.0e\+00  NOT TIMED$", first)
    assert re.search(r"test/second +distance 0.0e\+00   *too short to tell; hot 3.0 us$", second)
    assert fault == "test/first: RuntimeError: out of memory"


def test_times_were_measured_of_cases_that_there_are():
    floors = {c.name: c.work for c in cases() if not c.small}
    times = [(run.card, {**run.traced, **run.us}) for run in reversed(runs())]
    found = {name: (card, us) for card, of in times for name, us in of.items()}
    assert found.keys() <= floors.keys()
    for name, (card, us) in found.items():
        assert us * 1e-6 > RATES[card].floor(floors[name]), name
    assert measured("mla_prefill/heads128-chunk4k") == "1387 H100"
    assert measured("router/v3-64") == "16 H200"
    assert measured("router/none") == "-"


def test_a_kernel_without_a_time_runs_only_where_it_is_asked_for(monkeypatch):
    assert set(KERNELS) - kernels() == {"hyper", "mla_absorb", "mla_values"}
    one = Run("H200", runs()[0].date, {"top_k/window4-batch40-12k": 18})
    monkeypatch.setattr("kernels_pallas.measured.runs", lambda: (one,))
    monkeypatch.setattr("mtp_jax.model.backend.is_hopper", lambda: True)
    for on, names in ((backend("auto").products, ["top_k"]), (backend("mosaic_gpu").products, KERNELS)):
        assert isinstance(on, HopperProducts)
        assert [k for k in KERNELS if on.can(k, lambda: None)] == [*names]


PTXAS = """ptxas info    : Compiling entry function 'kernel_mosaic_gpu_kernel' for 'sm_90a'
    424 bytes stack frame, 436 bytes spill stores, 440 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 424 bytes cumulative stack size
"""
SERIALISED = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"


def compiled(folder, ptxas=PTXAS):
    (folder / "kernel_0.ptxas").write_text(ptxas)
    (folder / "kernel_0.sass_ctrl").write_text(
        "/*0000*/ HGMMA.64x64x16.F32.BF16 R24\n/*0010*/ HGMMA.64x256x16 R24\n/*0020*/ UTMALDG R1\n"
    )
    (folder / "kernel_0.resources.txt").write_text("Resources(smem_scratch_bytes=226304, tmem=0)")
    return report.kernels(folder)


def test_report_reads_what_the_compiler_says(tmp_path):
    (kernel,) = compiled(tmp_path)
    assert kernel == report.Kernel("kernel_0", 168, 436, 226304, Counter(HGMMA=2), False, 3, 0)
    (kernel,) = compiled(tmp_path, SERIALISED + PTXAS)
    assert kernel.serialised


def test_the_largest_of_unsigned_numbers_is_a_fault(tmp_path):
    signed, unsigned = "/*0030*/ REDUX.MAX.S32 UR4, R12\n", "/*0030*/ REDUX.MAX UR4, R12\n"
    for code, faults in ((signed, 0), (signed + unsigned, 1)):
        compiled(tmp_path)
        (tmp_path / "kernel_0.sass_ctrl").write_text(code)
        found = list(budget.Budget(436, (), 1.0, 3).faults(report.kernels(tmp_path), 1.0, 3))
        assert len(found) == faults


FORWARD = (
    "-:-:-:-:02  /*0000*/  @P0 BRA `(.L_x_1)",
    "0:-:-:Y:05  /*0010*/  IADD3 R1, R1, 0x1, RZ",
    ".L_x_1:",
    "-:-:-:-:05  /*0020*/  EXIT",
    ".L_x_0:",
    "-:-:-:-:00  /*0030*/  BRA `(.L_x_0)",
    "-:-:-:-:00  /*0040*/  NOP",
)


def test_a_path_is_counted_where_code_only_goes_forward():
    assert report._path("\n".join(FORWARD)) == 3
    loop = (".L_x_2:", *FORWARD[1:2], "/*0050*/ @P1 BRA `(.L_x_2)")
    assert report._path("\n".join(loop)) is None
    assert report._path("/*0000*/ CALL.REL.NOINC `(.L_x_9)") is None


def test_a_log_of_another_form_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="the compiler's log has no"):
        compiled(tmp_path, "nothing")


def test_launches_leave_out_control_flow(tmp_path):
    lines = (
        "001: kCopy  [source] kCopy",
        "003: kWhile while",
        "  condition:",
        "    004: kCustomKernel compare",
        "  body:",
        "    006: kCustomCall kCustomCall",
        "007: kAsyncStart  stream=communication_stream[0]",
        "    008: kAllGather kAllGather",
        "009: kAsyncDone    async_id=7",
        "010: kDynamicSliceFusion params=4, results=3",
        "    011: kCustomCall kCustomCall",
    )
    (tmp_path / "module_1.thunk_sequence.txt").write_text("\n".join(lines))
    assert [line.split()[0] for line in report.launches(tmp_path)] == ["001:", "004:", "006:", "008:", "011:"]


def test_budgets_are_held(tmp_path):
    kernels = compiled(tmp_path, SERIALISED + PTXAS)
    limits = budget.Budget(436, ("HGMMA",), 1.0, 3, {"large": {"temp_mib": 9.0}})
    assert list(limits.faults(compiled(tmp_path), 1.0, 3)) == []
    assert list(limits.of("large").faults(compiled(tmp_path), 9.0, 3)) == []
    found = list(budget.Budget(435, ("QGMMA",), 0.5, 2).faults(kernels, 1.0, 3))
    assert [f.split(", at most")[0] for f in found] == [
        "436 bytes of spills",
        "ptxas warns of serialised warpgroup products",
        "no QGMMA",
        "1.0 MiB of temporary memory",
        "3 launches",
    ]
    assert list(budget.Budget(436, (), 1.0, 3, path=3).faults(compiled(tmp_path), 1.0, 3)) == []
    (fault,) = budget.Budget(436, (), 1.0, 3, path=2).faults(compiled(tmp_path), 1.0, 3)
    assert fault == "3 instructions on a path, at most 2"
    assert next(iter(limits.faults((), 0.0, 0))) == "no Mosaic GPU kernel was compiled"
