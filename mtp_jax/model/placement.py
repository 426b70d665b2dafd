"""Placement of experts in slots, so that every device has about the same work. No jax here.

The published heuristic (github.com/deepseek-ai/EPLB; arXiv 2412.19437, section 3.4): the next copy goes to
the expert with the largest load per copy, then slots are packed, heaviest first, into the device with the
smallest load that still has room. Where nodes divide the groups of experts, groups are packed into nodes
first, so that the rows of a group stay on one node.

A placement is int [P]: the expert of each slot, device by device.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int

Placement = Int[np.ndarray, " P"]
Load = Float[np.ndarray, " E"]
"""Number of times that each expert was chosen."""


def first_placement(experts: int, slots: int) -> Placement:
    """Each expert in the slot of its number; further slots hold the first experts again."""
    return np.arange(slots) % experts


def copies_of(placed: Placement, experts: int, width: int) -> Int[np.ndarray, "E c"]:
    """The slots of each expert, ``width`` at most, then -1, as int32."""
    table = np.full((experts, width), -1, np.int32)
    for expert in range(experts):
        slots = np.flatnonzero(placed == expert)[:width]
        table[expert, : len(slots)] = slots
    return table


def imbalance(placed: Placement, load: Load, devices: int) -> float:
    """Load of the busiest device over the mean; the copies of an expert share its load. 1.0 without load."""
    copies = np.maximum(np.bincount(placed, minlength=len(load)), 1)
    each = (load / copies)[placed].reshape(devices, -1).sum(axis=1)
    return float(each.max() / each.mean()) if load.any() else 1.0


def place(
    load: Load, slots: int, devices: int, nodes: int = 1, groups: int = 1, width: int | None = None
) -> Placement:
    """A placement for this load. width: most copies of an expert; None: any number.

    Devices are split evenly over nodes, experts over groups of neighbours.
    """
    if groups % nodes:
        nodes = groups = 1
    experts = len(load)
    by_group = np.arange(experts).reshape(groups, -1)
    node_of = _packed(load[by_group].sum(axis=1), nodes)
    parts = []
    for node in range(nodes):
        mine = by_group[node_of == node].ravel()
        of, copies = _replicated(load[mine], slots // nodes, width or slots)
        device_of = _packed((load[mine] / copies)[of], devices // nodes)
        parts += [mine[of[device_of == device]] for device in range(devices // nodes)]
    return np.concatenate(parts)


def _packed(load: np.ndarray, bins: int) -> np.ndarray:
    """The bin of each item; all bins get the same number of items."""
    room = len(load) // bins
    total, count, found = np.zeros(bins), np.zeros(bins, int), np.zeros(len(load), int)
    for item in np.argsort(-load, kind="stable"):
        best = int(np.argmin(np.where(count < room, total, np.inf)))
        found[item] = best
        total[best] += load[item]
        count[best] += 1
    return found


def _replicated(load: np.ndarray, slots: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The expert of each slot, in no order, and the copies of each expert."""
    of, copies = [*range(len(load))], np.ones(len(load))
    while len(of) < slots:
        expert = int(np.argmax(np.where(copies < width, load / copies, -1.0)))
        of.append(expert)
        copies[expert] += 1
    return np.array(of), copies


def aligned(goal: Placement, now: Placement, devices: int, nodes: int = 1) -> Placement:
    """The same placement with slots of a device, and devices of a node, renumbered so that little moves."""
    experts, size = int(max(goal.max(), now.max())) + 1, len(goal) // devices
    wanted, have = goal.reshape(devices, size), now.reshape(devices, size)
    out, each = np.empty_like(have), devices // nodes

    def held(by_device: np.ndarray) -> np.ndarray:
        return np.stack([np.bincount(d, minlength=experts) for d in by_device])

    for node in range(nodes):
        first = node * each
        ours = slice(first, first + each)
        alike = (held(wanted[ours]) @ held(have[ours]).T).astype(float)
        for _ in range(each):
            of, at = np.unravel_index(np.argmax(alike), alike.shape)
            out[first + at] = _kept(wanted[first + of], have[first + at])
            alike[of], alike[:, at] = -1, -1
    return out.ravel()


def _kept(wanted: np.ndarray, have: np.ndarray) -> np.ndarray:
    """The experts of a device in an order that leaves experts in place where it has them."""
    rest, out = wanted.tolist(), np.full(len(have), -1)
    for slot, expert in enumerate(have.tolist()):
        if expert in rest:
            out[slot] = expert
            rest.remove(expert)
    out[out < 0] = rest
    return out


def moves(now: Placement, goal: Placement) -> Iterator[tuple[int, int]]:
    """Copies (from slot, over slot) that lead from one placement to another, in order.

    No move overwrites the last copy of an expert. Where every move left would, one such expert is first
    copied over a spare copy, which is restored later. Raises ValueError if there is no spare copy.
    """
    placed = now.copy()
    while (left := np.flatnonzero(placed != goal)).size:
        count = np.bincount(placed)
        free = left[count[placed[left]] > 1]
        target = int(free[0] if free.size else left[0])
        if not free.size:  # the moves left are cycles of experts with one copy each
            spare = np.flatnonzero(count[placed] > 1)
            if not spare.size:
                raise ValueError(
                    "every expert has one copy, so that none can be moved; give redundant experts"
                )
            placed[spare[0]] = placed[target]
            yield target, int(spare[0])
        source = int(np.flatnonzero(placed == goal[target])[0])
        placed[target] = placed[source]
        yield source, target
