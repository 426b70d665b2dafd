"""Products and norms by kernels on a Hopper GPU (docs/kernels.md).

Products with FP8 weights take their rows in e4m3. A norm, or the kernel that joins the heads' results,
quantises rows once for all products that read them. A product may leave float32 parts that the next norm
sums. Quantised rows and float32 parts stay between these products.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas import FORMS, KERNELS
from kernels_pallas.fp8_matmul import api as fp8_matmul
from kernels_pallas.grouped_matmul import api as grouped_matmul
from kernels_pallas.hyper import api as hyper
from kernels_pallas.rms_norm import api as norms
from kernels_pallas.weighed import Weighed
from mtp_jax.errors import ConfigError
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.hyper import Entered
from mtp_jax.model.layers import rms_norm
from mtp_jax.model.narrow import Fp4, Fp8, Matrix
from mtp_jax.model.params import Hyper, HyperHead, Mlp, Moe
from mtp_jax.model.products import e4m3
from mtp_jax.model.products.e4m3 import HopperRows
from mtp_jax.model.products.plain import Products, Reader, Readers, Split
from mtp_jax.model.products.stream import (
    Parts,
    PendingResidual,
    PendingStreams,
    ProductResult,
    parts,
    plus,
    stream,
    summed,
)
from mtp_jax.model.sharding import constrain, partition, sharded, ways


@dataclass(frozen=True)
class HopperProducts(Products):
    """Products by kernels, and the kernels that other parts of a pass may run.

    Attributes:
        kernels: names of the kernels that may run, of `kernels_pallas.KERNELS` and ``FORMS``.
        strict: whether a product, experts or attention that such a kernel cannot compute is a ConfigError.
    """

    kernels: frozenset[str] = frozenset((*KERNELS, *FORMS))
    strict: bool = False

    @property
    def loops(self) -> bool:
        """True: a loop is one command of a graph, and one program serves every depth."""
        return True

    # The kernels that run

    def can(self, kernel: str, check: Callable[..., None], *args: Any, must: bool = False) -> bool:
        """Whether a kernel may run and takes these arguments, which its ``check`` tells.

        must: whether arguments that it refuses are a ConfigError.
        """
        if kernel not in self.kernels:
            return False
        try:
            check(*args)
        except ValueError as e:
            if must:
                raise ConfigError(f"{e}; take kernels=auto or kernels=xla") from e
            return False
        return True

    def runs(self, kernel: str, check: Callable[..., None], *args: Any) -> bool:
        """Whether a kernel computes these arguments; ``strict``: a ConfigError if it refuses them."""
        return self.can(kernel, check, *args, must=self.strict)

    def do_without(self, kernel: str, what: str) -> None:
        """Raises ConfigError if a kernel must compute what it has no form for."""
        if self.strict and kernel in self.kernels:
            raise ConfigError(f"{what} has no kernel; take kernels=auto")

    def takes(self, reader: Reader | Mlp | Moe | None, dtype: Any) -> bool:
        """Whether a kernel computes this reader from rows in e4m3. dtype: dtype of the rows before."""
        x = jax.ShapeDtypeStruct((1, 1), dtype)
        if isinstance(reader, Moe):
            gate_up, down = reader.gate_up, reader.down
            narrow = isinstance(gate_up, Fp8) and isinstance(down, Fp8)
            return narrow and self.runs("grouped_matmul", check_experts, x, gate_up, down)
        if isinstance(reader, Mlp):
            both = reader.gate_up, reader.down
            parts = [e4m3.part(w.values, self.mesh, None, "mlp") for w in both if isinstance(w, Fp8)]
            check, block = fp8_matmul.check, fp8_matmul.BLOCK
            return len(parts) == 2 and all(self.runs("fp8_matmul", check, x, part, block) for part in parts)
        if reader is None or not isinstance(reader.weight, Fp8):
            return False
        values = e4m3.part(reader.weight.values, self.mesh, *e4m3.axes_of(reader.weight, reader.split))
        matrix = jax.ShapeDtypeStruct((math.prod(values.shape[:-1]), values.shape[-1]), values.dtype)
        return self.runs("fp8_matmul", fp8_matmul.check, x, matrix, 64)

    # The residual stream

    def norm(
        self, x: Any, weight: Float[Array, " D"], eps: float, readers: Readers = ()
    ) -> tuple[PendingResidual, HopperRows | Float[Array, "B W D"]]:
        """The stream with its addends summed, and normed, quantised for the readers that take it so.

        Without addends a kernel's norm returns the stream as it came.
        """
        x, added = stream(x)
        shape = x.shape
        given = [a if isinstance(a, Weighed) else parts(a, self.mesh).values for a in (x, *added)]
        taken = [self.takes(reader, x.dtype) for reader in readers]
        can = (self.can("rms_norm", norms.check, shape[-1], a.dtype) for a in given)
        if not any(taken) or not all(can):
            total = plus(x, added)
            return PendingResidual(total, ()), rms_norm(total, weight, eps)
        also_plain = not all(taken)

        def local(weight, *given):
            normed = norms.rms_norm(
                given,
                weight,
                eps,
                rows=rows,
                total=bool(added),
                plain=also_plain,
                implementation="mosaic_gpu",
            )
            whole = [a.reshape(-1, *shape[1:]) for a in (normed.total, normed.plain) if a is not None]
            return whole, normed.quantised

        rows = shape[0] * shape[1] // ways("slots", self.mesh)
        specs = (partition(), *(partition(None, "slots"),) * len(given))
        out = [partition("slots")] * (bool(added) + also_plain), e4m3.of_rows()
        with jax.named_scope("norm"):
            run = sharded(local, self.mesh, specs, out)
            whole, quantised = run(weight, *given)
        normed = HopperRows(shape, whole[-1] if also_plain else None, quantised)
        return PendingResidual(whole[0] if added else x, ()), normed

    def add(self, x: Any, *outs: ProductResult) -> PendingResidual:
        """Keep results beside the stream, for the next norm to sum and to add."""
        return PendingResidual(constrain(summed(stream(x).x), self.mesh, "slots", None, None), outs)

    def tap(self, x: Any) -> Float[Array, "B W D"]:
        """The stream with everything left to be added."""
        return constrain(plus(*stream(x)), self.mesh, "slots", None, None)

    def finish(self, x: Any, weight: Float[Array, " D"], eps: float) -> Float[Array, "B W D"]:
        """The norm at the end, of the stream with all addends."""
        return rms_norm(plus(*stream(x)), weight, eps)

    # Several residual streams

    def enter(
        self, x: Any, p: Hyper, cfg: ModelConfig, weight: Float[Array, " D"], readers: Readers = ()
    ) -> tuple[Entered, HopperRows | Float[Array, "B W D"]]:
        """The result before it and the gates' product by a kernel; gates, gated sum and norm by another."""
        if not self._enters(before(x)):
            return super().enter(x, p, cfg, weight, readers)
        taken = [self.takes(reader, before(x).dtype) for reader in readers]
        wanted = hyper.InputForms(plain=not taken or not all(taken), quantised=any(taken))
        x, found = self._gated(x, p, cfg, weight, wanted)
        assert found.gates is not None, "a sublayer's result has gates"
        (slots, window, count, _), gates = x.shape, found.gates
        entered = Entered(
            x, gates.out.reshape(slots, window, count), gates.mix.reshape(slots, window, count, count)
        )
        shape = (slots, window, x.shape[-1])
        plain = None if found.plain is None else found.plain.reshape(shape)
        return entered, HopperRows(shape, plain, found.quantised)

    def leave(self, x: Entered, *outs: ProductResult) -> Any:
        """Keep results beside the streams, for the next sublayer's gates, if a kernel then adds them."""
        outs = tuple(summed(a) if isinstance(a, Weighed) else a for a in outs)
        given = [parts(a, self.mesh).values for a in outs]
        if self._projects(x.streams, *given):
            return PendingStreams(x, outs)
        return super().leave(x, *outs)

    def streams(self, x: Any) -> Any:
        """Several streams as an array, with a result that is left to be added."""
        return super().leave(x.entered, *x.results) if isinstance(x, PendingStreams) else x

    def collapse(self, x: Float[Array, "*b S D"], p: HyperHead, cfg: ModelConfig) -> Float[Array, "*b D"]:
        """The gates and the gated sum by kernels."""
        each = x.reshape(len(x), -1, *x.shape[-2:])
        if not self._enters(each):
            return super().collapse(x, p, cfg)
        total = self._gated(each, p, cfg, None, hyper.InputForms(total=True))[1].total
        assert total is not None, "the gated sum is wanted"
        return total.reshape(*x.shape[:-2], -1)

    def _gated(
        self,
        x: Any,
        p: Hyper | HyperHead,
        cfg: ModelConfig,
        weight: Array | None,
        wanted: hyper.InputForms,
    ) -> tuple[Float[Array, "B W S D"], hyper.SublayerInput]:
        """The streams as an array, and the result of ``kernels_pallas.hyper.enter``."""
        assert cfg.hyper is not None, "parameters of hyper-connections have a configuration"
        rule = hyper.GateRule(cfg.hyper.iterations, cfg.hyper.eps, cfg.rms_norm_eps)
        x, projected = self._projected(x, p.mix)

        def local(x, *given):
            return hyper.enter(flat(x), *given, rule=rule, wanted=wanted, implementation="mosaic_gpu")

        rows = partition("slots")
        quantised = e4m3.of_rows() if wanted.quantised else rows
        out: Any = hyper.SublayerInput(rows, rows, quantised, rows)  # pyright: ignore[reportArgumentType]
        with jax.named_scope("hyper"):
            run = sharded(local, self.mesh, (rows, rows, partition()), out)
            return x, run(x, projected, hyper.GateParams(p.scale, p.base, weight))

    def _projected(
        self, x: Any, weight: Float[Array, "o SD"]
    ) -> tuple[Float[Array, "B W S D"], hyper.Projected]:
        """The streams as an array, and their product with the weight of the next gates."""
        streams, given = before(x), [parts(a, self.mesh).values for a in left_of(x)]
        if not self._projects(streams, *given):
            wide = streams.reshape(*streams.shape[:2], -1).astype(jnp.float32)
            products, squares = self.exactly(wide, weight), (wide * wide).sum(axis=-1)
            found = products.reshape(-1, len(weight), 1), squares.reshape(-1, 1)
            return x, hyper.Projected(*found)

        def local(x, gates, weight, *results):
            own = gates and hyper.Gates(gates[0].reshape(-1, count), gates[1].reshape(-1, count, count))
            streams, projected = hyper.project(flat(x), results, own, weight, implementation="mosaic_gpu")
            return streams.reshape(x.shape), projected

        count, rows = streams.shape[2], partition("slots")
        gates = (x.entered.out, x.entered.mix) if isinstance(x, PendingStreams) else None
        specs = rows, rows, partition(), *(partition(None, "slots"),) * len(given)
        with jax.named_scope("hyper"):
            return sharded(local, self.mesh, specs, rows)(streams, gates, weight, *given)

    def _enters(self, x: Float[Array, "B W S D"]) -> bool:
        """Whether a kernel makes the gates and the gated sum of these streams."""
        return self.can("hyper", hyper.check_enter, self._own(x))

    def _projects(self, x: Float[Array, "B W S D"], *results: Float[Array, "_ _ D"]) -> bool:
        """Whether a kernel adds results to these streams, and multiplies them with the gates' weight."""
        return self.can("hyper", hyper.check_project, self._own(x), *results)

    def _own(self, x: Float[Array, "B W S D"]) -> jax.ShapeDtypeStruct:
        """Streams of one device's tokens [T, S, D]."""
        tokens = x.shape[0] * x.shape[1] // ways("slots", self.mesh)
        return jax.ShapeDtypeStruct((tokens, *x.shape[2:]), x.dtype)

    def joined(self, x: Float[Array, "B W N v"], o: Matrix, absorbed: bool) -> Any:
        """Heads side by side, [B, W, N * v], as the product with ``o`` takes them."""
        wide = (*x.shape[:2], x.shape[2] * x.shape[3])
        own = e4m3.part(x, self.mesh, "slots", None, "heads")
        taken = self.takes(Reader(o, "in"), x.dtype)
        if not taken or not self.can("rms_norm", norms.check_blocks, *own.shape[2:], x.dtype):
            return x.reshape(wide)

        def local(x):
            rows = x.reshape(-1, *x.shape[2:])
            # In the absorbed form a product gives them head by head, which spares a transpose.
            given = rows.swapaxes(0, 1) if absorbed else rows
            return norms.quantise(given, blocks_first=absorbed, implementation="mosaic_gpu")

        rows = sharded(local, self.mesh, (partition("slots", None, "heads"),), e4m3.of_rows("heads"))(x)
        return HopperRows(wide, None, rows)

    # Products

    def plain(self, x: Any) -> Float[Array, "B W D"]:
        """Rows of a product that does not take them quantised."""
        return e4m3.plain(x)

    def linear(self, x: Any, w: Matrix, *, split: Split | None = None) -> Float[Array, "..."]:
        """A product with an FP8 weight by a kernel; rows are, or are turned into, e4m3 with 1x128 blocks."""
        if not isinstance(w, Fp8) or not self.takes(Reader(w, split), e4m3.dtype_of(x)):
            return super().linear(e4m3.plain(x), w, split=split)
        axes, given = e4m3.axes_of(w, split), e4m3.operand(x)
        (slots, width), mesh = x.shape[:2], self.mesh

        def local(x, w):
            matrix = w.values.reshape(-1, w.shape[-1])
            y = fp8_matmul.fp8_matmul(x.flat(), matrix, w.scale, implementation="mosaic_gpu")
            y = y[:rows].reshape(-1, width, *w.shape[:-1])
            return jax.lax.psum(y, "model") if over_model else y

        rows, over_model = slots * width // ways("slots", mesh), split == "in" and ways("heads", mesh) > 1
        specs = Fp8(partition(*axes), partition(axes[0], axes[-1]))
        out = partition("slots", None, axes[0])
        return sharded(local, mesh, (given.split(axes[-1]), specs), out)(given, w)

    def result(self, x: Any, w: Matrix, *, split: Split | None = None) -> ProductResult:
        """A product whose parts and padding a kernel may leave to its reader."""
        if not isinstance(w, Fp8) or not self.takes(Reader(w, split), e4m3.dtype_of(x)):
            return self.linear(x, w, split=split)
        return self._left(x, [w], split)[0]

    def results(self, x: Any, *ws: Any) -> tuple[ProductResult, ...]:
        """Products of the same rows, in one launch where kernels take all weights and it takes no longer."""
        dtype = e4m3.dtype_of(x)
        taken = all(self.takes(Reader(w), dtype) for w in ws)
        return self._left(x, ws, None) if taken else super().results(x, *ws)

    def _left(self, x: Any, ws: Sequence[Any], split: Split | None) -> tuple[Parts, ...]:
        """Products with FP8 weights, whose parts and padding kernels leave to the readers.

        split: of every weight.
        """
        given, shards = e4m3.operand(x), ways("slots", self.mesh)
        rows = x.shape[0] * x.shape[1] // shards

        def local(x, ws):
            weights = [(w.values.reshape(-1, w.shape[-1]), w.scale) for w in ws]
            found = fp8_matmul.fp8_parts(x.flat(), weights, rows, implementation="mosaic_gpu")
            if split == "in" and ways("heads", self.mesh) > 1:
                whole = (y if len(y) == 1 else y.sum(axis=0, keepdims=True) for y in found)
                found = [jax.lax.psum(y.astype(jnp.bfloat16), "model") for y in whole]
            return tuple(found)

        axes = [e4m3.axes_of(w, split) for w in ws]
        specs = tuple(Fp8(partition(*own), partition(own[0], own[-1])) for own in axes)
        out = tuple(partition(None, "slots", own[0]) for own in axes)
        run = sharded(local, self.mesh, (given.split(axes[0][-1]), specs), out)
        shapes = [(*x.shape[:2], math.prod(w.shape[:-1])) for w in ws]
        each = zip(run(given, tuple(ws)), shapes, strict=True)
        return tuple(Parts(values, shape, shards) for values, shape in each)

    def by_group(self, x: Float[Array, "B W G i"], w: Matrix) -> Float[Array, "B W G o"]:
        """Products of groups with FP8 weights by a kernel; rows are turned into e4m3 with 1x128 blocks."""
        whole_blocks = w.shape[1] % fp8_matmul.BLOCK == 0
        if not whole_blocks or not self.takes(Reader(w, "out"), x.dtype):
            return super().by_group(x, w)

        def local(x, w):
            scale = w.scale.reshape(len(w.values), -1, w.scale.shape[-1])
            given = x.reshape(-1, *x.shape[2:]), w.values, scale
            return fp8_matmul.fp8_by_group(*given, implementation="mosaic_gpu").reshape(*x.shape[:3], -1)

        heads = partition("heads")
        specs = partition("slots", None, "heads"), Fp8(heads, heads)
        return sharded(local, self.mesh, specs, partition("slots", None, "heads"))(x, w)

    def mlp(self, x: Any, p: Mlp, limit: float | None = None) -> Float[Array, "B W D"]:
        """A dense MLP by two kernels."""
        if not self.takes(p, e4m3.dtype_of(x)):
            return super().mlp(e4m3.plain(x), p, limit)
        given, (slots, *wide), mesh = e4m3.operand(x), x.shape, self.mesh

        def local(x, gate_up, down):
            weights = gate_up.values, down.values, gate_up.scale, down.scale
            y = fp8_matmul.fp8_mlp(x.flat(), *weights, limit=limit, implementation="mosaic_gpu")
            y = y[:rows].reshape(-1, *wide)
            return y if mesh is None else jax.lax.psum(y, "model")

        rows = slots * wide[0] // ways("slots", mesh)
        width = partition(None, "mlp")
        specs = given.split(), width, width
        return sharded(local, mesh, specs, partition("slots"))(given, p.gate_up, p.down)


def before(x: Any) -> Float[Array, "B W S D"]:
    """Several streams, without a result that is left to be added."""
    return x.entered.streams if isinstance(x, PendingStreams) else x


def left_of(x: Any) -> tuple[ProductResult, ...]:
    """The results that are left to be added to several streams."""
    return x.results if isinstance(x, PendingStreams) else ()


def flat(x: Float[Array, "B W S D"]) -> Float[Array, "T S D"]:
    """Streams token by token."""
    return x.reshape(-1, *x.shape[2:])


def check_experts(x: Any, gate_up: Any, down: Any) -> None:
    """Raise ValueError for weights that the kernel of routed experts cannot take."""
    for narrow in (Fp8, Fp4):
        if isinstance(gate_up, narrow) != isinstance(down, narrow):
            name = narrow.__name__.upper()
            raise ValueError(
                f"grouped_matmul on mosaic_gpu: experts' gate, up and down are {name} together or not at all"
            )
    for w in (gate_up, down):
        grouped_matmul.check(x, *e4m3.arrays(w))
