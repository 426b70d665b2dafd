"""Static rules pass a right kernel, written by hand, and fail each copy of it that breaks one."""

from dataclasses import replace

import pytest

from kernels_pallas.deviceless import barriers, fences, flow, host_rules, registers, report, static

# A kernel of three warpgroups that copies a matrix in and out by TMA.
HOST = """
declare i32 @mosaic_gpu_launch_kernel(ptr, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, ptr, ptr)
define i32 @a_mosaic_gpu(ptr %0, ptr %1, ptr %2) {
  %66 = alloca [128 x i8], i64 1, align 64
  %111 = alloca [2 x i64], align 8
  store i64 512, ptr %111, align 4
  %112 = getelementptr i64, ptr %111, i32 1
  store i64 4096, ptr %112, align 4
  %115 = alloca [2 x i64], align 8
  store i64 4096, ptr %115, align 4
  %116 = getelementptr i64, ptr %115, i32 1
  store i64 1, ptr %116, align 4
  %119 = alloca [2 x i64], align 8
  store i64 64, ptr %119, align 4
  %120 = getelementptr i64, ptr %119, i32 1
  store i64 64, ptr %120, align 4
  call void @mosaic_gpu_init_tma_desc(ptr %66, ptr %110, i64 7, i64 2, ptr %111, ptr %115, i64 128, ptr %119)
  %181 = alloca i64, i64 1, align 8
  store i64 64, ptr %181, align 4
  %182 = alloca i64, i64 1, align 8
  store i64 1, ptr %182, align 4
  %183 = alloca i64, i64 1, align 8
  store i64 64, ptr %183, align 4
  call void @mosaic_gpu_init_tma_desc(ptr %66, ptr %180, i64 3, i64 1, ptr %181, ptr %182, i64 16, ptr %183)
  %9 = call i32 @mosaic_gpu_launch_kernel(ptr %0, SIZES, i32 226432, i32 0, ptr %1, ptr %8)
  ret i32 %9
}
""".replace("SIZES", "i32 4, i32 2, i32 1, i32 2, i32 1, i32 1, i32 384, i32 1, i32 1")
MATRIX = host_rules.Descriptor(7, (512, 4096), (4096, 1), (64, 64), 128)
LINE = host_rules.Descriptor(3, (64,), (1,), (64,), 16)
LAUNCH = host_rules.HostLaunch((4, 2, 1), (2, 1, 1), (384, 1, 1), 226432)

PTX = """
.visible .entry a_mosaic_gpu_kernel(.param .b64 a)
{
	.reg .pred 	%p<9>;
	.loc	1 10 4
	mov.b32 	%r59, 256;
	mov.b32 	%r60, 2;
	// begin inline asm
	@%p6 mbarrier.init.shared::cta.b64 [%r58], %r59;
	// end inline asm
	@%p6 mbarrier.init.shared.b64 [%r57], %r60;
	bar.sync 	0;
	@%p1 bra 	$L__BB0_2;
	setmaxnreg.dec.sync.aligned.u32 24;
	.loc	1 11 4
	mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r58], %r2;
	bar.sync %r9, 128;
	@%p2 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%a], [%b];
	ret;
$L__BB0_2:
	setmaxnreg.inc.sync.aligned.u32 240;
$L__BB0_3:
	// begin inline asm
	{
	.reg .pred       P1;
	LAB_WAIT:
	mbarrier.try_wait.parity.shared.b64 P1, [%r58], %r1, %r2;
	@P1 bra.uni DONE;
	bra.uni     LAB_WAIT;
	DONE:
	}
	// end inline asm
	.loc	1 20 4
	st.shared.b32 	[%rd6], %r7;
	stmatrix.sync.aligned.m8n8.x4.shared.b16 [%rd7], {%r1, %r2, %r3, %r4};
	.loc	1 21 4
	fence.proxy.async.shared::cta;
	bar.sync %r9, 128; // after the fence
	.loc	1 22 4
	{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, p; }
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
	.loc	1 23 4
	mbarrier.arrive.release.cta.shared::cta.b64 _, [%r58], 1;
	.loc	1 24 4
	@%p2 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd3, {%r1, %r2} ], [%r8];
	cp.async.bulk.commit_group;
	cp.async.bulk.wait_group 	0;
	ld.shared.b32 	%r7, [%rd6];
	bar.sync %r9, 128; // after the copy
	.loc	1 25 4
	{
	@%p3 mapa.shared::cluster.u32 mapped_addr, %r57, %r88;
	@%p3 mbarrier.arrive.shared::cluster.b64 _, [mapped_addr];
	}
	@%p4 bra 	$L__BB0_3;
	ret;
}
	.file	1 "/a/folder/kernel.py"
"""
RESOURCES = (
    "Resources(smem_scratch_bytes=9, barrier_counts=Counter({Barrier(arrival_count=2, num_barriers=1, "
    "orders_tensor_core=False): 1, ClusterBarrier(collective_dims=(<Dimension.x: 0>,), arrival_count=1, "
    "num_barriers=1, leader_tracked=False): 1}), scoped_gmem_semaphores={})"
)

SASS = """
   -:-:-:Y:02        /*0000*/                   MOV R90, 0x400
   -:-:-:Y:05        /*0010*/              @!P2 BRA `(.L_x_0)
   2&1:-:1:-:00      /*0020*/                   USETMAXREG.DEALLOC.CTAPOOL 0x18
   -:-:-:Y:02        /*0030*/                   LDS.128 R20, [R2+0x10]
   -:-:-:Y:02        /*0040*/                   EXIT
.L_x_0:
   -:-:2:Y:02        /*0050*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0
   1:-:-:Y:05        /*0060*/              @!P1 BRA `(.L_x_0)
.L_x_1:
   -:-:-:Y:01        /*0070*/                   HGMMA.64x256x16.F32.BF16 R112, gdesc[UR48].tnspB, R112
   -:-:-:Y:01        /*0080*/               @P1 BRA P2, `(.L_x_1)
   -:-:-:Y:02        /*0090*/                   EXIT
"""
AT_LAUNCH = 168


def broken(text, *changes):
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def test_host_code_is_read():
    assert host_rules.parse(HOST) == host_rules.Host((MATRIX, LINE), (LAUNCH,))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("i32 226432", "i32 %7", "launch_kernel has a form that is not known"),
        ("i32 226432, i32 0", "i32 226432", "launch_kernel has a form that is not known"),
        ("  store i64 1, ptr %116, align 4\n", "", "init_tma_desc has a form that is not known"),
        ("i64 7, i64 2", "i64 7, i64 %3", "init_tma_desc has a form that is not known"),
    ],
)
def test_host_code_of_another_form_is_an_error(old, new, message):
    with pytest.raises(ValueError, match=message):
        host_rules.parse(broken(HOST, (old, new)))


@pytest.mark.parametrize(
    "right", [MATRIX, LINE, replace(MATRIX, sizes=(2**32, 64)), replace(LINE, sizes=(65,))]
)
def test_a_right_descriptor_has_no_fault(right):
    assert list(right.faults()) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"sizes": (1,) * 6}, "rank 6, allowed 1 to 5"),
        ({"element": 11}, "element type 11, allowed 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
        ({"swizzle": 256}, "swizzle of 256 bytes, allowed 16, 32, 64, 128"),
        ({"strides": (4096, 2)}, "stride of the last dimension 2, allowed 1"),
        ({"sizes": (2**32 + 1, 4096)}, "size 4294967297 of dimension 0, allowed 1 to 4294967296"),
        (
            {"strides": (4097, 1)},
            "stride of 8194 bytes of dimension 0, allowed multiples of 16 below 1099511627776",
        ),
        (
            {"strides": (2**39, 1)},
            "stride of 1.09951e+12 bytes of dimension 0, allowed multiples of 16 below 1099511627776",
        ),
        ({"box": (257, 64)}, "box of 257 in dimension 0, allowed 1 to 256"),
        ({"box": (0, 64)}, "box of 0 in dimension 0, allowed 1 to 256"),
        ({"sizes": (32, 4096)}, "box of 64 in dimension 0, allowed 32, the size"),
        ({"box": (64, 4)}, "rows of the box of 8 bytes, allowed multiples of 16"),
        ({"box": (64, 72)}, "rows of the box of 144 bytes, allowed 128, the swizzle"),
    ],
)
def test_a_wrong_descriptor_has_one_fault(change, fault):
    assert list(replace(MATRIX, **change).faults()) == [fault]


def test_rows_that_are_not_swizzled_may_be_long():
    assert list(replace(MATRIX, box=(64, 256), swizzle=16).faults()) == []


@pytest.mark.parametrize(
    ("change", "registers_", "fault"),
    [
        ({"grid": (4, 65536, 1)}, 168, "grid (4, 65536, 1), allowed 1 to (2147483647, 65535, 65535)"),
        ({"grid": (0, 1, 1)}, 168, "grid (0, 1, 1), allowed 1 to (2147483647, 65535, 65535)"),
        ({"block": (1, 4, 65)}, 32, "block (1, 4, 65), allowed 1 to (1024, 1024, 64)"),
        ({"block": (512, 3, 1)}, 32, "1536 threads in a block, allowed 1024"),
        ({}, 169, "67584 registers in a block, allowed 65536"),
        ({"shared": 232449}, 168, "232449 bytes of shared memory in a block, allowed 232448"),
        (
            {"grid": (16, 1, 1), "cluster": (16, 1, 1)},
            168,
            "cluster (16, 1, 1), allowed 1 to 8 thread blocks",
        ),
        ({"cluster": (2, 0, 1)}, 168, "cluster (2, 0, 1), allowed 1 to 8 thread blocks"),
        ({"grid": (3, 1, 1)}, 168, "grid (3, 1, 1), allowed multiples of the cluster (2, 1, 1)"),
    ],
)
def test_a_launch_is_within_the_limits_of_the_gpu(change, registers_, fault):
    assert list(LAUNCH.faults(AT_LAUNCH)) == list(replace(LAUNCH, cluster=(0, 0, 0)).faults(AT_LAUNCH)) == []
    assert list(replace(LAUNCH, **change).faults(registers_)) == [fault]


def found_registers(sass, asked=(24, 240)):
    return list(registers.faults(flow.sass(sass), list(asked), AT_LAUNCH))


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("LDS.128 R20", "LDS.128 R21", "setmaxnreg at 0x0020: R24 is used at 0x0030 (LDS.128), at most R23"),
        ("[R2+0x10]", "[R23.64]", "setmaxnreg at 0x0020: R24 is used at 0x0030 (LDS.128), at most R23"),
        (
            "R112",
            "R113",
            "setmaxnreg at 0x0050: R240 is used at 0x0070 (HGMMA.64x256x16.F32.BF16), at most R239",
        ),
        ("0x18", "0xb0", "setmaxnreg at 0x0020: sets 176 registers, at most 168, the number at launch"),
        ("0xf0", "0xa0", "setmaxnreg at 0x0050: sets 160 registers, at least 168, the number at launch"),
    ],
)
def test_registers_stay_below_the_number_that_a_warp_has(old, new, fault):
    found = found_registers(
        broken(SASS, (old, new)), (24 if new != "0xb0" else 176, 240 if new != "0xa0" else 160)
    )
    assert found_registers(SASS) == []
    assert fault in found


def test_a_request_that_ptxas_dropped_is_a_fault():
    dropped = broken(SASS, ("USETMAXREG.DEALLOC.CTAPOOL 0x18", "NOP"))
    assert found_registers(dropped)[0].startswith(
        "setmaxnreg: the machine code sets 240 registers, the PTX asks for 24, 240"
    )


@pytest.mark.parametrize(
    ("instruction", "last"),
    [
        ("IADD3 R4, R5, R6, RZ", 6),
        ("R2UR UR40, R3", 3),
        ("UMOV UR7, 0x180", None),
        ("ST.E.64 desc[UR4][R10.64+0x8], R12", 13),
        ("STSM.16.M88.4 [R180+0x12400], R20", 180),
        ("LDSM.16.M88.4 R16, [R1]", 19),
        ("IMAD.WIDE R2, R3, 0x4, R12", 13),
        ("IMAD.WIDE.U32 R2, R30, 0x4, RZ", 30),
        ("IMAD.WIDE.U32.X R2, P0, R3, R30, R12, P1", 30),
        ("IMAD.WIDE.U32 R30, P0, R3, R4, R12", 31),
        ("CS2R R24, SRZ", 25),
        ("QGMMA.64x32x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24", 39),
        ("HGMMA.64x64x16.F32.BF16 R24, R60, gdesc[UR4], R24", 63),
    ],
)
def test_the_last_register_of_an_instruction(instruction, last):
    name, operands = instruction.split(" ", 1)
    assert registers.last_register(flow.Instruction("", False, name, operands, ())) == last


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("%r59, 256", "%r59, 2", "counts (number of barriers) 2 (2), declared 2 (1), 256 (1)"),
        ("%r60, 2;", "%r60, 1;", "counts (number of barriers) 1 (1), 256 (1), declared 2 (1), 256 (1)"),
        (
            "mbarrier.arrive.release.cta",
            "@%p2 mbarrier.arrive.release.cta",
            "mbarrier.arrive at kernel.py:23: has a predicate, but its barrier counts all threads",
        ),
    ],
)
def test_barriers_count_the_threads_that_arrive(old, new, fault):
    def found(text):
        return list(barriers.faults(flow.ptx(text), RESOURCES, LAUNCH.cluster))

    assert found(PTX) == []
    (only,) = found(broken(PTX, (old, new)))
    assert fault in only


def test_a_count_that_is_no_constant_is_an_error():
    with pytest.raises(ValueError, match="%r61 is no constant"):
        barriers.counts(flow.ptx(broken(PTX, ("[%r58], %r59", "[%r58], %r61"))))


FENCE, AFTER_FENCE = "\tfence.proxy.async.shared::cta;\n", "\tbar.sync %r9, 128; // after the fence\n"
WAIT, AFTER_COPY = "\tcp.async.bulk.wait_group \t0;\n", "\tbar.sync %r9, 128; // after the copy\n"


@pytest.mark.parametrize(
    ("changes", "rule", "read_at"),
    [
        ([(FENCE, "")], "a write to shared memory needs fence.proxy.async, then bar.sync", ["22", "24"]),
        ([(FENCE, "")], "a matrix in shared memory needs fence.proxy.async", ["23", "25"]),
        ([(FENCE, FENCE.replace("\t", "\t@%p2 "))], "a write to shared memory needs", ["22", "24"]),
        (
            [(AFTER_FENCE, "")],
            "a write to shared memory needs fence.proxy.async, then bar.sync",
            ["22", "24"],
        ),
        # The fence before the write.
        (
            [(FENCE, ""), ("\tst.shared", FENCE + "\tst.shared")],
            "a write to shared memory needs fence.proxy.async, then bar.sync",
            ["22", "24"],
        ),
        (
            [("wgmma.wait_group.sync.aligned 0", "wgmma.wait_group.sync.aligned 1")],
            "a product needs",
            ["23", "25"],
        ),
        ([(WAIT, "")], "a copy to device memory needs cp.async.bulk.wait_group 0, then bar.sync", ["25"]),
        ([("wait_group \t0", "wait_group.read \t0")], "a copy to device memory needs", ["25"]),
        ([(AFTER_COPY, "")], "a copy to device memory needs", ["25"]),
        ([(AFTER_COPY, "")], "a use of shared memory needs bar.sync", ["25"]),
    ],
)
def test_memory_is_handed_over_after_its_fence(changes, rule, read_at):
    assert list(fences.faults(flow.ptx(PTX))) == []
    found = [f for f in fences.faults(flow.ptx(broken(PTX, *changes))) if f.startswith(rule)]
    assert [f.split(" and kernel.py:")[1].split()[0] for f in found] == read_at


def test_a_fence_on_one_of_two_paths_is_not_enough():
    around = broken(PTX, (FENCE, f"\t@%p7 bra \t$L__BB0_9;\n{FENCE}$L__BB0_9:\n"))
    assert any(f.startswith("a write to shared") for f in fences.faults(flow.ptx(around)))
    # Both ends of the branch meet before the fence.
    before = broken(PTX, (FENCE, f"\t@%p7 bra \t$L__BB0_9;\n$L__BB0_9:\n{FENCE}"))
    assert list(fences.faults(flow.ptx(before))) == []


def test_a_write_at_the_end_of_a_loop_reaches_its_beginning():
    last = broken(
        PTX, ("\t@%p4 bra", "\tstmatrix.sync.aligned.m8n8.x4.shared.b16 [%rd7], {%r1};\n\t@%p4 bra")
    )
    early = broken(
        last,
        ("\tst.shared.b32", "\tmbarrier.arrive.release.cta.shared::cta.b64 _, [%r5], 1;\n\tst.shared.b32"),
    )
    assert list(fences.faults(flow.ptx(last))) == []
    (fault,) = fences.faults(flow.ptx(early))
    assert fault == (
        "a matrix in shared memory needs fence.proxy.async: missing between kernel.py:25 "
        "(stmatrix.sync.aligned.m8n8.x4.shared.b16) and kernel.py:20 "
        "(mbarrier.arrive.release.cta.shared::cta.b64)"
    )


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (flow.ptx, broken(PTX, ("$L__BB0_2:", "")), "goes to '\\$L__BB0_2', which is no label"),
        (
            flow.ptx,
            broken(PTX, ("\tbar.sync \t0;", "\tbrx.idx %r1, list;")),
            "goes to a place that the code does not name",
        ),
        (flow.ptx, PTX + "{", "braces of the PTX do not match"),
        (flow.ptx, "", "no .entry"),
        (flow.sass, broken(SASS, ("EXIT", "BRX R2")), "goes to a place that the code does not name"),
        (flow.sass, "", "no instruction"),
    ],
)
def test_code_that_cannot_be_followed_is_an_error(read, text, message):
    with pytest.raises(ValueError, match=message):
        read(text)


KERNEL = report.Kernel("a_0", AT_LAUNCH, 0, 226304, report.Counter(), False, None, 0)
FILES = {".ll": HOST, ".ptx": PTX, ".sass_ctrl": SASS, ".resources.txt": RESOURCES}


def held(folder, **changes):
    for end, text in FILES.items():
        (folder / f"a_0{end}").write_text(changes.get(end[1:].split(".")[0], text))
    return static.checked(folder, (KERNEL,))


def test_all_rules_are_held_in_every_kernel(tmp_path):
    found = held(tmp_path)
    assert (found.kernels, found.descriptors, found.launches, found.faults) == (1, 2, 1, ())
    assert static.summary([found, found]).startswith(
        "static rules: 2 kernels, 4 TMA descriptors, 2 launches, 0 faults"
    )
    (fault,) = held(tmp_path, ll=broken(HOST, ("i64 16, ptr", "i64 8, ptr"))).faults
    assert fault == "a_0: TMA descriptor 1: swizzle of 8 bytes, allowed 16, 32, 64, 128"
    (fault,) = held(tmp_path, ll=broken(HOST, ("i32 226432", "i32 232449"))).faults
    assert fault == "a_0: launch: 232449 bytes of shared memory in a block, allowed 232448"
    (fault,) = held(tmp_path, sass_ctrl=broken(SASS, ("LDS.128 R20", "LDS.128 R21"))).faults
    assert fault.startswith("a_0: setmaxnreg at 0x0020")
    (fault,) = held(
        tmp_path, ptx=broken(PTX, ("wait_group.sync.aligned 0", "wait_group.sync.aligned 1"))
    ).faults[:1]
    assert fault.startswith("a_0: a product needs")
    (fault,) = held(tmp_path, resources=broken(RESOURCES, ("arrival_count=2", "arrival_count=3"))).faults
    assert fault.startswith("a_0: mbarrier.init")


def test_a_dump_of_another_form_does_not_pass(tmp_path):
    (fault,) = held(tmp_path, ll=HOST.replace("init_tma_desc", "make_tma_desc")).faults
    assert fault == "a_0: the PTX copies by TMA, but the host code makes no TMA descriptor"
    (fault,) = held(tmp_path, ll=HOST.replace("launch_kernel", "start_kernel")).faults
    assert fault == "a_0: the host code launches 0 kernels, allowed 1"
    (fault,) = held(tmp_path, ll=HOST.replace("i32 226432", "i32 %7")).faults
    assert fault.startswith("a_0: a call of mosaic_gpu_launch_kernel has a form that is not known")
    (tmp_path / "a_0.ll").unlink()
    found = static.checked(tmp_path, (KERNEL,))
    assert found.faults == ("a_0: no a_0.ll: the rules read the files that jax 0.11.2 dumps; use it",)
