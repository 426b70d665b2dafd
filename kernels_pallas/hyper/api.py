"""The functions that a model calls."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Float

from kernels_pallas.hyper import mosaic_gpu, reference
from kernels_pallas.hyper.rule import STREAMS, GateParams, GateRule, Gates, InputForms, Projected
from kernels_pallas.mosaic import LINE, Interpreter
from kernels_pallas.needs import ArrayOrShape, Implementation, need
from kernels_pallas.quantised import BLOCK, Quantised
from kernels_pallas.rms_norm import api as norms

# Most tokens of ``project``: it adds up the lanes of a warp, by five instructions for each product, token and
# 128 numbers: of 64 tokens they take about as long as the starts of the five launches that it replaces.
MOST = 64
# A stream's width is a multiple of this: the lanes of a warp share the parts that ``project`` leaves, each of
# which is the product of 128 numbers.
WIDTHS = LINE * BLOCK // STREAMS


class SublayerInput(NamedTuple):
    """The input of a sublayer, each form None if not requested, and the gates of its result.

    Attributes:
        total: the gated sum of the streams, bfloat16.
        plain: normed, bfloat16.
        quantised: normed, e4m3, its rows rounded up to whole tiles of products; padding rows are undefined.
        gates: None where streams end.
    """

    total: Float[Array, "T D"] | None
    plain: Float[Array, "T D"] | None
    quantised: Quantised | None
    gates: Gates | None


def project(
    streams: Float[Array, "T S D"],
    results: Sequence[Float[Array, "_ _ D"]],
    gates: Gates | None,
    weight: Float[Array, "o SD"],
    *,
    implementation: Implementation,
    interpret: Interpreter | None = None,
) -> tuple[Float[Array, "T S D"], Projected]:
    """The streams after a sublayer, and their product with the weight of the next gates. One launch.

    arXiv 2512.24880, section 4.2. The norm of all streams is left out: a norm without a weight is a factor of
    the product, which ``enter`` makes of the sums of squares.

    Args:
        streams: bfloat16.
        results: the sublayer's results, bfloat16, or the float32 parts of them to be summed. Rows past T are
            not read.
        gates: the sublayer's; None: none came before, and the streams are returned as they are.
        weight: float32, all streams side by side.
        implementation: "mosaic_gpu" needs a Hopper GPU, bfloat16, four streams, D a multiple of 1,024, and at
            most 64 tokens; "xla" is the oracle in plain jnp.
        interpret: parameters of Pallas' interpreter; None compiles.

    Raises:
        ValueError: inputs that the kernel cannot take.
    """
    if implementation == "mosaic_gpu":
        check_project(streams, *results)
        run: Any = partial(mosaic_gpu.project, interpret=interpret)
    else:
        run = reference.project
    cut, blocked = _blocks(streams), [_blocks(x) for x in results]
    *new, parts, squares = run(cut, blocked, gates, weight.reshape(-1, *cut.shape[1:]))
    return (new[0].reshape(streams.shape) if new else streams), Projected(parts, squares)


def enter(
    streams: Float[Array, "T S D"],
    projected: Projected,
    p: GateParams,
    *,
    rule: GateRule,
    wanted: InputForms,
    implementation: Implementation,
    interpret: Interpreter | None = None,
) -> SublayerInput:
    """The gates of a sublayer, and its input: the gated sum of the streams, normed. One launch.

    arXiv 2512.24880, section 4.2, eqs. 7 to 9.

    Args:
        streams: bfloat16.
        projected: products with the weights [o, S * D] of the gates: of the input, of the result, of the
            matrix; of the input alone where streams end.
        p: parameters of the gates and of the input's norm.
        rule: numbers of the gates.
        wanted: forms of the input.
        implementation: "mosaic_gpu" needs a Hopper GPU, bfloat16, four streams, and D a multiple of 512 up to
            8,192; "xla" is the oracle in plain jnp.
        interpret: parameters of Pallas' interpreter; None compiles.

    Raises:
        ValueError: inputs that the kernel cannot take.
    """
    given = _blocks(streams), projected, p if p.norm is None else p._replace(norm=_blocks(p.norm))
    if implementation == "mosaic_gpu":
        check_enter(streams)
        run: Any = partial(mosaic_gpu.enter, interpret=interpret)
    else:
        run = reference.enter
    out = list(run(*given, rule=rule, wanted=wanted))

    def rows() -> Array:
        found = out.pop(0)
        return found.reshape(found.shape[0], -1)

    one = rows() if wanted.total else None
    normed = rows() if wanted.plain else None
    low = Quantised(rows(), out.pop(0)) if wanted.quantised else None
    return SublayerInput(one, normed, low, Gates(*out) if out else None)


def check_project(streams: ArrayOrShape, *results: ArrayOrShape) -> None:
    """Refuse inputs that ``project`` cannot take, with a ValueError; looks at shapes and dtypes."""
    tokens, count, width = streams.shape
    need(
        "hyper",
        ("number of streams", count, (STREAMS,)),
        ("dtype of streams", str(streams.dtype), ("bfloat16",)),
        *(("dtype of a result", str(x.dtype), ("bfloat16", "float32")) for x in results),
        (f"width over {WIDTHS}", width % WIDTHS, (0,)),
        (f"tokens past the most, {MOST},", max(tokens - MOST, 0), (0,)),
    )


def check_enter(streams: ArrayOrShape) -> None:
    """Refuse inputs that ``enter`` cannot take, with a ValueError; looks at shapes and dtypes."""
    need("hyper", ("number of streams", streams.shape[1], (STREAMS,)))
    norms.check(streams.shape[-1], streams.dtype)
    need("hyper", ("dtype of streams", str(streams.dtype), ("bfloat16",)))


def _blocks(x: Float[Array, "*b D"]) -> Float[Array, "*b k 128"]:
    return x.reshape(*x.shape[:-1], -1, BLOCK)
