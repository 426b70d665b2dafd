"""Times of launches, predicted from counted work and from rates that were measured.

A launch takes the time to start, the time of instructions that wait for each other, and the root of a sum of
squares: its bytes' time on the memory bus, the time of the bytes that the busiest multiprocessor asks of the
second-level cache, and the time of its tensor cores. These three overlap in part; that squares say how far
was chosen by all measured times together. Every constant has a source of its own.
"""

from collections.abc import Iterable, Mapping
from math import exp, hypot, log
from statistics import median

from kernels_pallas.check.case import Case, KernelPlan, Work
from kernels_pallas.check.device import RATES
from kernels_pallas.deviceless.budget import Budget, budgets
from kernels_pallas.measured import newest
from kernels_pallas.splits import PROCESSORS

# Sources are the tables of docs/kernels.md, unless a comment names another.
# A copy's share of the data sheet's bandwidth: 3.0 of an H100's 3.35 TB/s.
COPY = 0.9
# Bytes per cycle that the second-level cache gives each multiprocessor when all ask: 5.9 to 6.0 TB/s at
# 1.7 GHz, in o-512, o-4096 and gated-32x2048 of the H100; and the most that one takes, by its port's width.
ASKED, PORT = 26, 64
# Operations per cycle and multiprocessor: the data sheet's 989 and 1,979 TFLOP/s at 1.83 GHz.
TENSOR = {"bf16": 4096, "fp8": 8192}
# Hz: the most, at which steps ran; and the clock to which the card's 700 W hold a launch that multiplies for
# longer than it reads memory: 1,410 to 1,770 MHz in seven cases, this in the median.
CLOCK, LIMITED = 1.98e9, 1.68e9
# Cycles of an instruction that waits for the one before: the router of 19,000 instructions took 20 us, warm.
ISSUE = 2
# Seconds of a kernel with next to no work (mla_low_rank/window1-batch1, warm), and between two of a graph.
START, NODE = 2.1e-6, 0.13e-6
# A prediction is in the band if neither time is longer than the other times this number.
BAND = 1.3


def launch(work: Work, plan: KernelPlan | None, card: str, path: int = 0) -> float:
    """Predicted seconds of one launch on a card of `RATES`.

    plan: None: the work spread evenly. path: instructions on a warp's path, beside the plan's.
    """
    cut = plan or KernelPlan(PROCESSORS, work.bytes / PROCESSORS, work.flops / PROCESSORS)
    cycles = cut.waves * cut.flops / TENSOR[work.format]
    memory = work.bytes / (COPY * RATES[card].bandwidth)
    clock = CLOCK if cycles / CLOCK <= memory else LIMITED
    asked = cut.waves * cut.asked / min(PORT, ASKED * PROCESSORS / cut.processors)
    waited = cut.waves * (cut.path + path) * ISSUE
    return START + waited / clock + hypot(memory, asked / clock, cycles / clock)


def kernel(case: Case, card: str) -> float:
    """Predicted seconds of a case's kernel alone; its path is the budget's."""
    return launch(case.work, case.plan, card, _limits(case).path or 0)


def predicted(case: Case, card: str) -> float:
    """Predicted seconds of a call, with the launches beside the kernel that the budget has."""
    return kernel(case, card) + (_limits(case).launches - 1) * START


def ratios(cases: Iterable[Case]) -> dict[str, float]:
    """Predicted over measured time, of every case of which a time was measured, on that card."""
    known = ((case, newest(case.name)) for case in cases)
    return {c.name: predicted(c, run.card) * 1e6 / run.us[c.name] for c, run in known if run}


def apart(found: Mapping[str, float]) -> float:
    """The median factor between predicted and measured times."""
    return exp(median(abs(log(ratio)) for ratio in found.values()))


def inside(ratio: float) -> bool:
    """Whether a prediction is in the band."""
    return 1 / BAND <= ratio <= BAND


def _limits(case: Case) -> Budget:
    kernel, shape = case.name.split("/")
    return budgets()[kernel].of(shape)
