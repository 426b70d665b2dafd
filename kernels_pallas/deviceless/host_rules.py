"""TMA descriptors and launches in a kernel's host code, held against the rules of the driver and of the GPU.

Sources: CUDA driver API, ``cuTensorMapEncodeTiled`` (rank, sizes, strides, box, swizzle), as Mosaic calls it;
CUDA C++ Programming Guide, technical specifications of compute capability 9.0 (launches). Two rules of the
driver's text are left out. Addresses are known at run time only. Strides that are no multiples of each other
are usual in tiled copies, and the driver takes them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from kernels_pallas.deviceless.budget import SHARED
from kernels_pallas.splits import CLUSTER

# Bytes of an element by Mosaic's number of its type (jaxlib, mosaic/gpu/runtime.cc).
_BYTES = {8: 0.25, 0: 0.5, 1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 2, 9: 4, 10: 8}
MAX_RANK, MAX_SIZE, MAX_STRIDE, MAX_BOX = 5, 2**32, 2**40, 256
# Bytes of which strides and a box's rows are multiples; also Mosaic's number for rows that are not swizzled.
ALIGNED = 16
SWIZZLES = (ALIGNED, 32, 64, 128)
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK, MAX_THREADS, REGISTERS = (1024, 1024, 64), 1024, 65536
# Registers are given to a thread in units of 8.
UNIT = 8

_CALL = re.compile(r"call .*@mosaic_gpu_(init_tma_desc|launch_kernel)\((.*)\)")
_ARRAY = re.compile(r"(%\d+) = alloca (?:\[\d+ x i64\]|i64)")
_ELEMENT = re.compile(r"(%\d+) = getelementptr i64, ptr (%\d+), i32 (\d+)")
_STORE = re.compile(r"store i64 (-?\d+), ptr (%\d+)")


@dataclass(frozen=True)
class Descriptor:
    """A TMA descriptor.

    Attributes:
        element: Mosaic's number of the type.
        sizes, strides, box: the array, and a copy's part of it, in elements; the last dimension last.
        swizzle: bytes of a row that is swizzled; 16 where none is.
    """

    element: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    def faults(self) -> Iterator[str]:
        """Sentences about rules that the descriptor breaks."""
        if not 1 <= len(self.sizes) <= MAX_RANK:
            yield f"rank {len(self.sizes)}, allowed 1 to {MAX_RANK}"
            return
        if self.element not in _BYTES:
            yield f"element type {self.element}, allowed {', '.join(map(str, sorted(_BYTES)))}"
            return
        if self.swizzle not in SWIZZLES:
            yield f"swizzle of {self.swizzle} bytes, allowed {', '.join(map(str, SWIZZLES))}"
        bytes_ = _BYTES[self.element]
        if self.strides[-1] != 1:
            yield f"stride of the last dimension {self.strides[-1]}, allowed 1"
        for i, (size, stride, box) in enumerate(zip(self.sizes, self.strides, self.box, strict=True)):
            if not 1 <= size <= MAX_SIZE:
                yield f"size {size} of dimension {i}, allowed 1 to {MAX_SIZE}"
            step = stride * bytes_
            if i < len(self.sizes) - 1 and (step % ALIGNED or not 0 <= step < MAX_STRIDE):
                yield (
                    f"stride of {step:g} bytes of dimension {i}, "
                    f"allowed multiples of {ALIGNED} below {MAX_STRIDE}"
                )
            if not 1 <= box <= MAX_BOX:
                yield f"box of {box} in dimension {i}, allowed 1 to {MAX_BOX}"
            if box > size:  # not the driver's rule: such a copy is larger than its array
                yield f"box of {box} in dimension {i}, allowed {size}, the size"
        row = self.box[-1] * bytes_
        if row % ALIGNED:
            yield f"rows of the box of {row:g} bytes, allowed multiples of {ALIGNED}"
        if self.swizzle > ALIGNED and row > self.swizzle:
            yield f"rows of the box of {row:g} bytes, allowed {self.swizzle}, the swizzle"


@dataclass(frozen=True)
class HostLaunch:
    """A launch.

    Attributes:
        grid: thread blocks.
        cluster: thread blocks of a cluster; 0 where there is no cluster.
        block: threads of a thread block.
        shared: bytes of shared memory of a thread block.
    """

    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int

    def faults(self, registers: int) -> Iterator[str]:
        """Sentences about limits that the launch exceeds, with ``registers`` of each thread."""
        for limit, sizes, what in ((MAX_GRID, self.grid, "grid"), (MAX_BLOCK, self.block, "block")):
            if not all(1 <= size <= most for size, most in zip(sizes, limit, strict=True)):
                yield f"{what} {sizes}, allowed 1 to {limit}"
        threads = prod(self.block)
        if threads > MAX_THREADS:
            yield f"{threads} threads in a block, allowed {MAX_THREADS}"
        if (held := -(-registers // UNIT) * UNIT * threads) > REGISTERS:
            yield f"{held} registers in a block, allowed {REGISTERS}"
        if not 0 <= self.shared <= SHARED:
            yield f"{self.shared} bytes of shared memory in a block, allowed {SHARED}"
        if self.cluster == (0, 0, 0):
            return
        if not 1 <= min(self.cluster) <= prod(self.cluster) <= CLUSTER:
            yield f"cluster {self.cluster}, allowed 1 to {CLUSTER} thread blocks"
        elif any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            yield f"grid {self.grid}, allowed multiples of the cluster {self.cluster}"


@dataclass(frozen=True)
class Host:
    """Host code of one kernel."""

    descriptors: tuple[Descriptor, ...]
    launches: tuple[HostLaunch, ...]


def parse(text: str) -> Host:
    """Descriptors and launches in the LLVM code that Mosaic dumps.

    Raises:
        ValueError: a call has another form, or an argument that is no constant.
    """
    arrays: dict[str, dict[int, int]] = {}
    places: dict[str, tuple[str, int]] = {}
    descriptors: list[Descriptor] = []
    launches: list[HostLaunch] = []
    for line in text.splitlines():
        if array := _ARRAY.search(line):
            arrays[array[1]] = {}
            places[array[1]] = array[1], 0
        elif (element := _ELEMENT.search(line)) and element[2] in arrays:
            places[element[1]] = element[2], int(element[3])
        elif (store := _STORE.search(line)) and store[2] in places:
            array_name, index = places[store[2]]
            arrays[array_name][index] = int(store[1])
        elif call := _CALL.search(line):
            try:
                arguments = [a.split()[-1] for a in call[2].split(",")]
                if call[1] == "launch_kernel":
                    launches.append(_launch(arguments))
                else:
                    descriptors.append(_descriptor(arguments, arrays))
            except (ValueError, KeyError) as e:
                raise ValueError(
                    f"a call of mosaic_gpu_{call[1]} has a form that is not known; jax 0.11.2's is. It is: "
                    f"{line.strip()}"
                ) from e
    return Host(tuple(descriptors), tuple(launches))


def _descriptor(arguments: list[str], arrays: dict[str, dict[int, int]]) -> Descriptor:
    _, _, element, rank, sizes, strides, swizzle, box = arguments

    def numbers(name: str) -> tuple[int, ...]:
        return tuple(arrays[name][i] for i in range(int(rank)))

    return Descriptor(int(element), numbers(sizes), numbers(strides), numbers(box), int(swizzle))


def _launch(arguments: list[str]) -> HostLaunch:
    # The function; grid, cluster, block; shared memory, whether it starts early; stream, arguments.
    x, y, z, cx, cy, cz, bx, by, bz, shared, _ = map(int, arguments[1:-2])
    return HostLaunch((x, y, z), (cx, cy, cz), (bx, by, bz), shared)
