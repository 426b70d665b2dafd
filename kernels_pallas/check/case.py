"""Cases: a kernel's declaration of a shape, which every check can find, run and judge."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import jax
from jaxtyping import PyTree

from kernels_pallas.splits import PROCESSORS

# Trees of arrays.
CaseInputs = tuple[PyTree, ...]
# Part of a program: trees of arrays to trees of arrays.
Operation = Callable[..., PyTree]


class UnavailableError(Exception):
    """A baseline needs a package or device that is missing; the message names it."""


@dataclass(frozen=True)
class External:
    """A baseline of another framework, which cannot be part of a jax program.

    Attributes:
        prepare: takes the inputs; returns a function that makes one call and returns its output, a torch
            tensor laid out as the kernel's. Raises `UnavailableError`.
    """

    prepare: Callable[..., Callable[[], Any]]


@dataclass(frozen=True)
class Work:
    """The least work of a device: the basis of the floor.

    Attributes:
        flops: number of floating-point operations, a multiply-add counted as two.
        bytes: bytes that have to cross the device's memory bus once.
        format: number format that the tensor cores multiply; their peak rate depends on it.
    """

    flops: float
    bytes: float
    format: Literal["bf16", "fp8"]


@dataclass(frozen=True)
class KernelPlan:
    """A kernel's cut of the work: the basis of the predicted time.

    Attributes:
        blocks: number of thread blocks, or tiles of a persistent grid.
        asked: bytes that a thread block, on average, asks of the second-level cache or writes.
        flops: number of operations that its tensor cores do, padding included.
        path: number of instructions that a warp of it runs one after the other, where products and copies
            hide none.
    """

    blocks: int
    asked: float
    flops: float = 0
    path: float = 0

    @property
    def processors(self) -> int:
        """Multiprocessors that have work."""
        return min(self.blocks, PROCESSORS)

    @property
    def waves(self) -> int:
        """Thread blocks that the busiest multiprocessor runs."""
        return -(-self.blocks // PROCESSORS)


@dataclass(frozen=True)
class Case:
    """One shape of one kernel.

    Attributes:
        name: "kernel/shape", unique among all cases.
        inputs: function of a PRNG key that gives random inputs. Traceable: ``jax.eval_shape`` gives their
            shapes without memory.
        kernel: the Mosaic GPU kernel with every static option bound; takes the inputs, and by keyword
            ``interpret``, the parameters of Pallas' interpreter or None.
        reference: a jnp function of the same inputs with the same result, in float32 or better.
        work: the bytes and operations from which the floor of its time is computed.
        plan: the kernel's cut of the work; None: the least work, spread evenly.
        tolerance: largest accepted norm(kernel - reference) / norm(reference), per output.
        baselines: alternatives by name: functions of the same inputs, which raise
            `UnavailableError`, or `External` objects.
    """

    name: str
    inputs: Callable[[jax.Array], CaseInputs]
    kernel: Operation
    reference: Operation
    work: Work
    tolerance: float = 1e-2
    plan: KernelPlan | None = None
    baselines: Mapping[str, Operation | External] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def small(self) -> bool:
        """Whether the case has few thread blocks (30 at most): for Pallas' interpreter, not for timing."""
        return self.name.partition("/")[2].startswith("small")
