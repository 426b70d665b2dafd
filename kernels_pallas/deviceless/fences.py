"""Rules of handing memory over, held in PTX: between threads, tensor cores, copies and thread blocks.

A rule names an action, the fence that must follow it, and the operations before which both must have
happened, on every path. Source: PTX ISA, on the async proxy, ``mbarrier.arrive``, ``wgmma.wait_group`` and
``cp.async.bulk.wait_group``.

The rules follow one warp's code and know no addresses. They do not see: a fence that is missing between plain
stores and an arrival, since threads need none among each other; stores by generic addresses, which may be to
shared memory; a missing wait; a missing fence after stores to device memory.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kernels_pallas.deviceless.flow import Code

# Copies out of shared memory and tensor cores read shared memory by the async proxy.
_ASYNC_READ = (
    r"wgmma\.mma_async|cp\.(reduce\.)?async\.bulk\.(tensor\.\dd\.)?(global|shared::cluster)\.shared::cta"
)
_ARRIVE = r"mbarrier\.arrive"
# One thread arrives for its warpgroup at the barrier of each thread block of a cluster.
_REMOTE_ARRIVE = r"mbarrier\.arrive\.(\w+\.)*shared::cluster"
_BARRIER = re.compile(r"(bar|barrier)(\.cta)?\.sync|barrier\.cluster\.wait")


@dataclass(frozen=True)
class FenceRule:
    """One rule of handing over.

    Attributes:
        name: names the rule in a fault.
        action: an operation that other threads, or other units, are to see the effect of.
        fence: an operation that makes it visible.
        barrier: whether a barrier of the warpgroup must follow the fence, as one thread acts for all.
        before: operations that hand over.
    """

    name: str
    action: str
    fence: str
    barrier: bool
    before: str


RULES = (
    FenceRule(
        "a write to shared memory needs fence.proxy.async, then bar.sync",
        r"st\.shared|stmatrix|(atom|red)\.shared",
        r"fence\.proxy\.async",
        True,
        _ASYNC_READ,
    ),
    # Plain stores may be for threads alone, which need no such fence.
    FenceRule(
        "a matrix in shared memory needs fence.proxy.async",
        r"stmatrix",
        r"fence\.proxy\.async",
        False,
        _ARRIVE,
    ),
    FenceRule(
        "a product needs wgmma.wait_group 0",
        r"wgmma\.mma_async",
        r"wgmma\.wait_group\S* 0$",
        False,
        _ARRIVE,
    ),
    FenceRule(
        "a copy to device memory needs cp.async.bulk.wait_group 0, then bar.sync",
        r"cp\.(reduce\.)?async\.bulk\.(tensor\.\dd\.)?global\.shared::cta",
        r"cp\.async\.bulk\.wait_group 0$",
        True,
        _REMOTE_ARRIVE,
    ),
    FenceRule(
        "a use of shared memory needs bar.sync",
        r"(ld|st|atom|red)\.shared|ldmatrix|stmatrix",
        _BARRIER.pattern,
        False,
        _REMOTE_ARRIVE,
    ),
)

# The first instruction, by index, whose action awaits its fence, and the first that awaits a barrier.
_State = tuple[int, int]


def faults(code: Code) -> Iterator[str]:
    """Sentences about operations that hand over too early, in the order of the rules."""
    for rule in RULES:
        for i, (action, waits) in _early(code, rule):
            yield (
                f"{rule.name}: missing between {code[action].place} ({code[action].name}) and "
                f"{code[i].place} ({code[i].name})"
            ) + ("; the fence is there, the barrier is not" if waits else "")


def _early(code: Code, rule: FenceRule) -> Iterator[tuple[int, tuple[int, bool]]]:
    """Operations before which the rule does not hold, the action, and whether only the barrier is missing."""
    action, fence, before = (re.compile(p) for p in (rule.action, rule.fence, rule.before))
    texts = [f"{x.name} {x.operands}".strip() if "wait_group" in x.name else f"{x.name} " for x in code]
    checked = [i for i, text in enumerate(texts) if before.match(text)]
    if not checked:
        return
    clean = len(code)

    def step(i: int, state: _State) -> _State:
        open_, fenced = state
        text, x = texts[i], code[i]
        # A predicate may leave a fence or a barrier out.
        if not x.guarded:
            if _BARRIER.match(text):
                fenced = clean
            if fence.match(text):
                open_, fenced = clean, min(open_, fenced) if rule.barrier else clean
        if action.match(text):
            open_ = min(open_, i)
        return open_, fenced

    reached = _flow(code, step, (clean, clean))
    for i in checked:
        open_, fenced = reached.get(i, (clean, clean))
        if min(open_, fenced) < clean:
            yield i, (min(open_, fenced), open_ == clean)


def _flow(code: Code, step: Callable[[int, _State], _State], start: _State) -> dict[int, _State]:
    """The state before each instruction that is reached: the earliest actions of all paths to it."""
    reached = {0: start}
    ahead = [0]
    while ahead:
        i = ahead.pop()
        state = step(i, reached[i])
        for following in code[i].after:
            known = reached.get(following)
            met = state if known is None else (min(known[0], state[0]), min(known[1], state[1]))
            if met != known:
                reached[following] = met
                ahead.append(following)
    return reached
