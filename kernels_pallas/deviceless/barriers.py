"""Arrivals that the barriers of a kernel count, held against the barriers that the kernel declares.

Source: PTX ISA, ``mbarrier.init``, and Mosaic GPU's lowering. All 128 threads of a warpgroup arrive at a
barrier, also when TMA copies to it: each thread then expects its share of the bytes. At a cluster's barrier
one thread of a warpgroup arrives, in each thread block with which its own shares a dimension.
"""

import re
from collections import Counter
from collections.abc import Iterator

from kernels_pallas.deviceless.flow import Code

WARPGROUP = 128
# Groups of barriers in the text of Mosaic's resources: fields, and the number of equal groups.
_GROUP = re.compile(r"(\w*)Barrier\((.*?)\): (\d+)")
_CONSTANT = re.compile(r"(%\w+), (\d+)$")


def faults(code: Code, resources: str, cluster: tuple[int, int, int]) -> Iterator[str]:
    """Sentences about counts that differ, and about arrivals that not all threads make.

    Args:
        code: the PTX.
        resources: Mosaic's text of the kernel's resources.
        cluster: thread blocks of a cluster by dimension, 1 where there is no cluster.
    """
    found, declared = counts(code), declared_counts(resources, cluster)
    if found != declared:
        yield f"mbarrier.init: counts (number of barriers) {_listed(found)}, declared {_listed(declared)}"
    for x in code:
        if x.guarded and x.name.startswith("mbarrier.arrive") and "shared::cluster" not in x.name:
            yield f"mbarrier.arrive at {x.place}: has a predicate, but its barrier counts all threads"


def counts(code: Code) -> Counter[int]:
    """The number of barriers that PTX initialises, by the arrivals that they count."""
    constants = {
        found[1]: int(found[2])
        for x in code
        if x.name.startswith("mov.") and (found := _CONSTANT.match(x.operands))
    }
    initialised: Counter[int] = Counter()
    for x in code:
        if x.name.startswith("mbarrier.init"):
            count = x.operands.split(",")[-1].strip()
            if not count.isdigit() and count not in constants:
                raise ValueError(f"{x.place}: mbarrier.init {x.operands}: {count} is no constant")
            initialised[int(count) if count.isdigit() else constants[count]] += 1
    return initialised


def declared_counts(resources: str, cluster: tuple[int, int, int]) -> Counter[int]:
    """The number of barriers that a kernel declares, by the arrivals that they count."""
    declared: Counter[int] = Counter()
    for kind, fields, groups in _GROUP.findall(resources):
        numbers = dict(re.findall(r"(\w+)=(\d+)", fields))
        sizes = [cluster["xyz".index(d)] for d in re.findall(r"Dimension\.([xyz])", fields)]
        # A thread block is once in each of its dimensions, and arrives once.
        each = sum(sizes) - len(sizes) + 1 if kind == "Cluster" else WARPGROUP
        declared[int(numbers.get("arrival_count", 1)) * each] += int(numbers["num_barriers"]) * int(groups)
    return declared


def _listed(found: Counter[int]) -> str:
    return ", ".join(f"{count} ({found[count]})" for count in sorted(found)) or "none"
