"""Decode steps of DeepSeek-V3 on one GPU, predicted launch by launch, and predictions beside measured times.

    python -m kernels_pallas.deviceless.step

Nothing is compiled. Heads, widths and vocabulary may be split over GPUs: a step is then one GPU's part,
without the collectives between them. The host is left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kernels_pallas.check.case import Case, Work
from kernels_pallas.check.cases import fp8_matmul, grouped_matmul, mla_absorb, mla_decode, mla_values, router
from kernels_pallas.check.registry import cases
from kernels_pallas.deviceless.prediction import BAND, NODE, START, apart, inside, kernel, launch, ratios
from kernels_pallas.fp8_matmul.api import choose_tile as choose_dense_tile
from kernels_pallas.fp8_matmul.api import one_launch
from kernels_pallas.grouped_matmul.api import choose_gated_tile, choose_tile
from kernels_pallas.grouped_matmul.layout import few
from kernels_pallas.measured import newest
from kernels_pallas.mla_absorb.mosaic_gpu import MOST
from kernels_pallas.mla_decode.api import splits_of
from kernels_pallas.mla_decode.thread_block import PAGE, ROWS
from kernels_pallas.quantised import whole_tiles

# DeepSeek-V3 (arXiv 2412.19437, section 4.2).
HIDDEN, HEADS, Q_RANK, RANK, NOPE, ROPE = 7168, 128, 1536, 512, 128, 64
CHOSEN, INNER, DENSE_INNER, VOCABULARY = 8, 2048, 18432, 129280
# Bytes of a number.
E4M3, BF16, F32 = 1, 2, 4

Launches = Mapping[str, Case | Work]


@dataclass(frozen=True)
class GpuStep:
    """One GPU's part of a step.

    Attributes:
        slots, window: number of slots, and of tokens of each.
        launches: number of launches of an MoE layer, as compiled (tests/kernels/step_budget.toml).
        ways: number of GPUs over which heads, widths and vocabulary are split.
        experts: number of routed experts, of each of which the GPU has its part.
        layers, dense: number of layers of the trunk, and of its layers without experts.
        rows: number of cached rows of a slot.
        fuses: whether kernels do several launches of the measured steps at once.
    """

    slots: int
    window: int
    launches: int
    ways: int = 8
    experts: int = 256
    layers: int = 61
    dense: int = 3
    rows: int = 4096
    fuses: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.slots * self.window

    @property
    def weighs(self) -> bool:
        """Whether the next norm weighs experts' results."""
        return self.fuses and self.tokens % 4 == 0

    def product(self, terms: int, *each: int) -> tuple[Case, int]:
        """Linear layers in FP8 in one launch, and the bytes of their results, all parts of K.

        each: output features of each layer; their reader sums the parts.
        """
        tile, columns = choose_dense_tile(self.tokens, terms, *each), sum(each)
        shape = fp8_matmul.DenseShape(whole_tiles(self.tokens), columns, terms, tile)
        case = fp8_matmul.case("", shape)
        return case, self.tokens * columns * (F32 * tile.splits if tile.splits > 1 else BF16)

    def plain(self, columns: int, terms: int, size: int = BF16) -> Work:
        """A product by XLA, of numbers of ``size`` bytes."""
        moved = columns * terms + self.tokens * (columns + terms)
        return Work(2 * self.tokens * columns * terms, size * moved, "bf16")

    def moved(self, per_token: int, others: int = 0) -> Work:
        """A launch that moves bytes, and next to nothing else."""
        return Work(0, self.tokens * per_token + others, "bf16")

    def attention(self) -> Launches:
        """Launches of attention and of a layer's two norms."""
        heads = HEADS // self.ways
        low = Q_RANK, RANK + ROPE
        if self.fuses and one_launch(self.tokens, HIDDEN, *low):
            q_a, parts_of_low = self.product(HIDDEN, *low)
            projections = {"q_a and kv_a": q_a}
        else:
            (q_a, queries), (kv_a, rows) = (self.product(HIDDEN, n) for n in low)
            projections, parts_of_low = {"q_a": q_a, "kv_a": kv_a}, queries + rows
        o, out = self.product(heads * NOPE, HIDDEN)
        decode = mla_decode.case("", mla_decode.DecodeShape(heads, self.window, (self.rows,) * self.slots))
        q_b, parts = self.product(Q_RANK, heads * (NOPE + ROPE))
        normed, expansion = HIDDEN * (2 * BF16 + E4M3), self.plain(heads * RANK, NOPE)
        weighed = BF16 * HIDDEN * CHOSEN
        outward = {"values": expansion, "quantise": self.moved((BF16 + E4M3) * heads * NOPE)}
        apart = {"rotation": self.moved(2 * BF16 * heads * ROPE), "absorption": expansion}
        if self.fuses and self.tokens <= MOST:
            size = parts // (self.tokens * heads * (NOPE + ROPE))
            shape = mla_absorb.AbsorbShape(
                self.window, self.slots, heads, parts=0 if size == BF16 else size // F32
            )
            apart = {"absorption": mla_absorb.case("", shape)}
            splits = splits_of(self.slots * -(-heads * self.window // ROWS), self.rows // PAGE)
            of_parts = mla_values.ValuesShape(self.window, self.slots, heads, splits)
            outward = {"values": mla_values.case("", of_parts)}
        return {
            "norm": self.moved(2 * BF16 * HIDDEN + normed + (weighed if self.weighs else 0)),
            **projections,
            "low ranks": self.moved(E4M3 * Q_RANK + BF16 * (RANK + ROPE), parts_of_low),
            "q_b": q_b,
            **apart,
            "mla_decode": decode,
            **outward,
            "o": o,
            "norm of the MLP": self.moved(BF16 * HIDDEN + normed, out),
        }

    def mlp(self, inner: int) -> Launches:
        """Launches of a dense MLP."""
        rows, columns = whole_tiles(self.tokens), inner // self.ways
        tile = choose_gated_tile(self.tokens, 1, columns, HIDDEN)
        gated = fp8_matmul.case("", fp8_matmul.DenseShape(rows, columns, HIDDEN, tile, gated=True))
        return {"dense gate and up": gated, "dense down": self.product(columns, HIDDEN)[0]}

    def moe(self) -> Launches:
        """Launches of the experts, the shared one included. Each token chooses evenly, and for itself."""
        ids, inner = self.tokens * CHOSEN, INNER // self.ways
        each, laid = -(-ids // self.experts), few(self.tokens)
        rows, own = (each,) * self.experts, (0, self.experts) if laid else None
        if laid:  # each expert that is chosen multiplies the rows of all tokens
            rows = (self.tokens,) * round(self.experts * (1 - (1 - CHOSEN / self.experts) ** self.tokens))
        gated = choose_gated_tile(each, min(ids, self.experts), inner, HIDDEN)
        up = grouped_matmul.ExpertsShape(rows, inner, HIDDEN, True, gated, shared=laid)
        down = grouped_matmul.ExpertsShape(rows, HIDDEN, inner, False, choose_tile(each, HIDDEN), shared=laid)
        return {
            "logits": self.plain(self.experts, HIDDEN, F32),
            "router": router.case(
                "", router.RouterShape(self.tokens, self.experts, router.DEEPSEEK_V3, own=own)
            ),
            "gate and up": grouped_matmul.case("", up),
            "down": grouped_matmul.case("", down),
            **({} if self.weighs else {"weighing": self.moved(BF16 * HIDDEN * (CHOSEN + 1))}),
            **self.mlp(INNER),
            **({} if laid else {"rows": self.moved(2 * E4M3 * CHOSEN * HIDDEN)}),
        }

    def layer(self, card: str) -> dict[str, float]:
        """Seconds of an MoE layer's launches; launches beside the named ones are short and take a start."""
        found = seconds({**self.attention(), **self.moe()}, card)
        return found | {"others": (self.launches - len(found)) * START, "nodes": self.launches * NODE}

    def seconds(self, card: str) -> float:
        """Predicted seconds: the trunk and the head, and for each draft NextN and the head again."""

        def head(step: GpuStep) -> float:
            return total({"head": step.plain(VOCABULARY // self.ways, HIDDEN)})

        def total(launches: Launches) -> float:
            return sum(seconds(launches, card).values())

        draft = replace(self, window=1)
        drafting = (
            total({"merge": draft.plain(HIDDEN, 2 * HIDDEN)}) + sum(draft.layer(card).values()) + head(draft)
        )
        trunk = (self.layers - self.dense) * sum(self.layer(card).values())
        trunk += self.dense * total({**self.attention(), **self.mlp(DENSE_INNER)})
        return trunk + head(self) + (self.window - 1) * drafting


def seconds(launches: Launches, card: str) -> dict[str, float]:
    """Seconds of each launch on a card."""
    return {
        name: kernel(x, card) if isinstance(x, Case) else launch(x, None, card)
        for name, x in launches.items()
    }


# Models of docs/kernels.md, and the part of DeepSeek-V3 that one of eight GPUs has at 128 slots.
STEPS = {
    "share, 1 slot, window 1": GpuStep(1, 1, launches=16, experts=128),
    "share, 1 slot, window 4": GpuStep(1, 4, launches=16, experts=128),
    "share, 1 slot, window 1, without mla_absorb": GpuStep(1, 1, launches=21, experts=128, fuses=False),
    "share, 1 slot, window 4, without mla_absorb": GpuStep(1, 4, launches=23, experts=128, fuses=False),
    "one of 8 GPUs, 128 slots, window 4": GpuStep(128, 4, launches=21),
    "wide, 128 slots, window 4": GpuStep(128, 4, launches=21, ways=1, layers=5, dense=1),
}


def lines() -> Iterator[str]:
    """The report: predictions over measured times, and predicted steps."""
    found = ratios(cases())
    for name, ratio in found.items():
        yield f"{name:48} predicted / measured {ratio:.2f}{'' if inside(ratio) else ' OUTSIDE'}"
    near = sum(map(inside, found.values()))
    yield (
        f"{near} of {len(found)} cases within a factor of {BAND} of their measured times, "
        f"in the median a factor of {apart(found):.2f}"
    )
    for name, step in STEPS.items():
        layer, run = sum(step.layer("H200").values()), newest(name)
        yield (
            f"PREDICTED for an H200: {name}: kernels of a step {step.seconds('H200') * 1e3:.1f} ms, "
            f"a layer of {step.launches} launches {layer * 1e6:.0f} us"
            + (f"; measured {run.steps[name] / 1e3:g} ms, {run.card}" if run else "")
        )


if __name__ == "__main__":
    print("\n".join(lines()))
