"""FP8 weights that stay FP8: the same model as dequantised, and what kernels make of them."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.expert_layout import reference as layout_reference
from kernels_pallas.fp8_matmul import reference as fp8_reference
from kernels_pallas.grouped_matmul import reference as grouped_reference
from kernels_pallas.grouped_matmul.layout import Groups, OwnGroups, group_all
from kernels_pallas.quantised import whole_tiles
from kernels_pallas.rms_norm import reference as norm_reference
from kernels_pallas.router import reference as router_reference
from mtp_jax.api.propose import propose
from mtp_jax.checkpoint import formats_kept, load, save
from mtp_jax.checkpoint.formats import FP8_BY_HEAD, staying
from mtp_jax.checkpoint.read import Loader
from mtp_jax.checkpoint.safetensors_file import hold
from mtp_jax.errors import CheckpointError, ConfigError
from mtp_jax.model import trunk
from mtp_jax.model.attention import hopper as by_kernels
from mtp_jax.model.attention.source import Paged
from mtp_jax.model.backend import Backend, backend, mosaic_gpu, xla, xla_cpu
from mtp_jax.model.cache import Entries, LayerCache, PagedView, empty_cache
from mtp_jax.model.config import RowFormat
from mtp_jax.model.device import is_hopper, multiplies_bf16, platform
from mtp_jax.model.layers import rope_angles
from mtp_jax.model.mla import Queries, Ups
from mtp_jax.model.narrow import Bf16, Fp8, expand, is_narrow, without_bits
from mtp_jax.model.params import Attention, Params, Spec, param_specs
from mtp_jax.model.products.hopper import HopperProducts, check_experts
from mtp_jax.model.products.stream import summed
from mtp_jax.model.sharding import make_mesh
from mtp_jax.model.sight import Sight
from mtp_jax.model.spec import may_be_narrow, scale_spec
from mtp_jax.model.visible import chain
from tests.golden import model_dir
from tests.model.kinds import latent
from tests.models import GREEDY, TINY, Reference, make_engine, prompts, rigged, serve
from tests.rounding import near, of_model, roundoff

# Every size of a weight is a multiple of what the kernels want, on two devices of `model` too.
ALIGNED = replace(
    TINY,
    hidden_size=512,
    intermediate_size=256,
    moe_intermediate_size=128,
    n_routed_experts=32,
    n_group=4,
    topk_group=2,
    num_attention_heads=16,
    q_lora_rank=512,
    kv_lora_rank=60,
    qk_nope_head_dim=12,
    v_head_dim=128,
    n_shared_experts=2,
    num_nextn_predict_layers=0,
    nextn_moe=(),
)
PRODUCTS = frozenset(("fp8_matmul", "rms_norm"))
EXPERTS = frozenset(("router", "expert_layout", "grouped_matmul"))
kernels = functools.partial(mosaic_gpu, kernels=PRODUCTS | EXPERTS, strict=True)
KERNELS = kernels()


def is_fp8(x: Any) -> bool:
    return isinstance(x, Fp8)


def fp8_leaves(params: Params) -> list[Fp8]:
    return [x for x in jax.tree.leaves(params, is_leaf=is_fp8) if is_fp8(x)]


@functools.cache
def kept(variant: str) -> Any:
    return load(model_dir(variant), narrow="keep")


def specs_of(variant: str) -> list[Spec]:
    return jax.tree.leaves(param_specs(kept(variant).config))


@pytest.mark.parametrize("variant", ["fp8", pytest.param("fp8_ue8m0", marks=pytest.mark.rest)])
def test_weights_stay_fp8_and_expand_to_what_loading_gives(variant):
    whole, params = load(model_dir(variant)).params, kept(variant).params
    weights, specs = jax.tree.leaves(params, is_leaf=is_narrow), specs_of(variant)

    @jax.jit
    def expanded(weights: list[Any]) -> list[jax.Array]:
        def one(own: Any, spec: Spec) -> jax.Array:
            matrix = own.reshape(*own.scale.shape[:-2], *spec.tensor_shape) if is_fp8(own) else own
            return expand(matrix, jnp.float32).reshape(spec.shape)

        return [one(*pair) for pair in zip(weights, specs, strict=True)]

    jax.tree.map(np.testing.assert_array_equal, expanded(weights), jax.tree.leaves(whole))
    found, halves = fp8_leaves(params), [w for w in weights if isinstance(w, Bf16)]
    assert all(w.values.dtype == jnp.float8_e4m3fn and w.scale.dtype == jnp.float32 for w in found)
    assert is_fp8(params.layers[1].mlp.gate_up)
    assert is_fp8(params.layers[0].attention.o)
    # Three quarters of what they are in float32, half of what is bfloat16. Bits are no memory of their own.
    plain = jax.tree.map(without_bits, params, is_leaf=is_narrow)
    saved = sum(x.nbytes for x in jax.tree.leaves(whole)) - sum(x.nbytes for x in jax.tree.leaves(plain))
    of_fp8 = sum(3 * w.values.nbytes - w.scale.nbytes for w in found)
    assert halves
    assert saved == of_fp8 + sum(w.values.nbytes for w in halves)


@pytest.mark.slow
def test_the_engine_decodes_the_same_tokens():
    jobs = [(p, replace(GREEDY, max_tokens=12)) for p in prompts(2, vocab=kept("fp8").config.vocab_size)]
    sizes: dict[str, Any] = {"num_speculative_tokens": 2, "max_num_seqs": 2, "max_model_len": 128}
    got, want = (
        [r.progress.output for r in serve(make_engine(found.params, found.config, **sizes), jobs)]
        for found in (kept("fp8"), load(model_dir("fp8")))
    )
    assert got == want
    assert all(len(tokens) == 12 for tokens in got)


@pytest.mark.rest
def test_drafts_are_those_of_dequantised_weights():
    """Of rows that a prompt left and rows that drafts did."""
    (prompt,) = prompts(1, shortest=20, vocab=kept("fp8").config.vocab_size)
    sizes: dict[str, Any] = {"num_speculative_tokens": 3, "max_num_seqs": 1, "max_model_len": 64}
    narrow, whole = kept("fp8"), load(model_dir("fp8"))
    first, ids, logits = propose(make_engine(narrow.params, narrow.config, **sizes), prompt, 3)
    reference = Reference(whole.params, whole.config)
    assert is_fp8(narrow.params.nextn[0].layer.attention.kv_a)
    assert first == reference.logits(prompt)[-1].argmax()
    want, rows = reference.drafts([*prompt, first], 3)
    assert ids.tolist() == want
    near(logits, rows, 3 * of_model(whole.config, len(prompt) + 3))  # each draft is merged for the next


def test_scales_follow_their_weights():
    specs = param_specs(ALIGNED)
    attention, moe = specs.layers[1].attention, specs.layers[1].mlp
    assert isinstance(attention, Attention)
    heads = scale_spec(attention.q_b)
    assert (heads.shape, heads.axes, heads.names) == (
        (2, 4),
        ("heads", None),
        attention.q_b.names + "_scale_inv",
    )
    out = scale_spec(attention.o)
    assert (out.shape, out.axes) == ((4, 16), (None, "heads"))
    experts = scale_spec(moe.gate_up)
    assert (experts.shape, experts.axes) == ((32, 2, 1, 4), ("experts", None, None, None))
    assert experts.names[3][1] == moe.gate_up.names[3][1] + "_scale_inv"


def test_weights_stay_fp8_by_themselves_where_kernels_multiply_them(monkeypatch):
    monkeypatch.setattr("mtp_jax.checkpoint.is_hopper", lambda: True)
    assert fp8_leaves(load(model_dir("fp8"), dtype="bfloat16").params)
    assert not fp8_leaves(load(model_dir("fp8")).params)
    monkeypatch.undo()
    assert not fp8_leaves(load(model_dir("fp8"), dtype="bfloat16").params)


def test_weights_stay_fp8_in_an_engine_on_a_cpu():
    """But for the parts of a kv_b in which heads share blocks."""
    params = load(model_dir("fp8"), narrow="multiplied").params
    attention = params.layers[0].attention
    assert isinstance(attention, Attention)
    assert len(fp8_leaves(params)) == len(fp8_leaves(kept("fp8").params))
    assert not is_fp8(attention.k_up)
    assert not fp8_leaves(load(model_dir("fp8"), narrow="multiplied", mesh=make_mesh(1, 2)).params)


@pytest.mark.parametrize(("nope", "v"), [(64, 64), (128, 256)])
def test_parts_of_kv_b_stay_fp8_on_a_cpu_where_heads_end_with_blocks(nope, v, rng):
    """Both parts of a head in one block, or each in blocks of its own."""
    cfg = replace(ALIGNED, num_attention_heads=2, kv_lora_rank=192, qk_nope_head_dim=nope, v_head_dim=v)
    attention = param_specs(cfg).layers[0].attention
    assert isinstance(attention, Attention)
    name, shape = attention.k_up.names, attention.k_up.tensor_shape
    values = rng.normal(size=shape).astype(jnp.float8_e4m3fn)
    scale = rng.uniform(0.5, 2, [-(-n // 128) for n in shape]).astype(np.float32)
    tensors = {n: hold(n, a) for n, a in ((name, values), (name + "_scale_inv", scale))}
    for spec in (attention.k_up, attention.v_up):
        assert staying(spec, tensors, formats_kept("float32", "multiplied")) is FP8_BY_HEAD
        assert staying(spec, tensors, formats_kept("float32", "keep")) is None
        read = Loader("float32", set(), on_host=True)._place
        kept = Fp8(*(read(a.spec, tensors, a.dtype) for a in FP8_BY_HEAD.arrays(spec, tensors)))
        np.testing.assert_array_equal(expand(kept, jnp.float32), read(spec, tensors, np.float32))


@pytest.mark.parametrize(
    ("nope", "v", "stay"), [(96, 96, []), (96, 160, ["k_up"]), (160, 96, ["k_up", "v_up"])]
)
def test_a_part_of_kv_b_becomes_an_array_where_its_rows_do_not_follow_blocks(nope, v, stay):
    """Heads of 192 rows; of 256, whose values begin within a block and go on in the next, or end with it."""
    cfg = replace(ALIGNED, num_attention_heads=2, qk_nope_head_dim=nope, v_head_dim=v)
    attention = param_specs(cfg).layers[0].attention
    assert [p for p in ("k_up", "v_up") if FP8_BY_HEAD.can_stay(getattr(attention, p))] == stay


def test_devices_are_told_by_what_is_compiled_for():
    assert (platform(), is_hopper()) == ("cpu", False)
    for kind, hopper in (("NVIDIA H200", True), ("NVIDIA H100 80GB HBM3", True), ("NVIDIA B200", False)):
        device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
            assert (platform(), is_hopper()) == ("gpu", hopper)


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match="narrow = 'twice'; expected one of dequantise, keep"):
        load(model_dir("fp8"), narrow="twice")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="do not divide over 2 devices in fp8 blocks of 128"):
        load(model_dir("fp8"), narrow="keep", mesh=make_mesh(1, 2))
    with pytest.raises(CheckpointError, match="weights in bf16 and fp8 are not written"):
        save(tmp_path / "orbax", kept("fp8").config, kept("fp8").params)


def quantised(w: np.ndarray, spec: Spec) -> Fp8:
    """A weight in FP8; each block of its matrices has a scale of its own."""
    scale = scale_spec(spec)
    matrix = np.asarray(w, np.float32).reshape(*scale.shape[:-2], *spec.tensor_shape)
    rows, columns = (np.arange(n) // 128 for n in spec.tensor_shape)
    peaks = np.zeros(scale.shape, np.float32)
    block: Any = (..., rows[:, None], columns)
    np.maximum.at(peaks, block, np.abs(matrix))
    values = matrix / (peaks / 448)[block]
    return Fp8(jnp.asarray(values.reshape(spec.shape).astype(jnp.float8_e4m3fn)), jnp.asarray(peaks / 448))


@functools.cache
def aligned() -> Params:
    def of(w: jax.Array, spec: Spec) -> Any:
        name = spec.names
        while not isinstance(name, str):
            name = name[0]
        if may_be_narrow(name) and spec.rows is None:
            return quantised(np.asarray(w), spec)
        return w if spec.float32 else jnp.asarray(np.asarray(w).astype(jnp.bfloat16))

    return jax.tree.map(of, rigged(ALIGNED), param_specs(ALIGNED))


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The kernels replaced by their references, which these tests can run; says which were called."""
    seen: list[str] = []

    def replaced(name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, tile: Any, left: int | None = None, **options: Any) -> Any:
            options.pop("interpret", None)
            seen.append(name)
            out = reference(*args, tile, **options)
            if len(out) == 2 and not isinstance(args[1], tuple):
                return out
            out = [y[:left] for y in out]
            if left is None or tile.splits == 1:
                return tuple(y.astype(jnp.bfloat16) for y in out)
            seen.extend(["parts"] * len(out))
            return tuple(jnp.stack([y / tile.splits] * tile.splits) for y in out)

        return run

    fp8 = replaced("fp8", lambda *args: fp8_reference.fp8_matmul(*args[:-1]))
    gated = replaced("fp8", lambda *args, limit: fp8_reference.fp8_matmul(*args[:4], limit=limit))
    grouped = replaced(
        "grouped",
        lambda *args, ending: grouped_reference.grouped_matmul(*args[:-1], rows=args[-1].rows, ending=ending),
    )
    monkeypatch.setattr("kernels_pallas.fp8_matmul.mosaic_gpu.fp8_matmul", fp8)
    monkeypatch.setattr("kernels_pallas.fp8_matmul.mosaic_gpu.fp8_gated", gated)
    monkeypatch.setattr("kernels_pallas.grouped_matmul.mosaic_gpu.grouped_matmul", grouped)

    def tiled(rows: Any, values: Any, scale: Any) -> tuple[Any, Any]:
        """As kernels leave them: what fills the last tile is not written, and may be anything."""
        more = whole_tiles(rows) - rows
        values = jnp.pad(values, ((0, more), (0, 0), (0, 0)), constant_values=jnp.nan)
        return values, jnp.pad(scale, ((0, 0), (0, more)), constant_values=jnp.nan)

    def norm(addends: Any, *args: Any, rows: int, interpret: Any, **options: Any) -> Any:
        del interpret
        seen.append("norm")
        *whole, values, scale = norm_reference.rms_norm([a[:, :rows] for a in addends], *args, **options)
        return (*(a.astype(jnp.bfloat16) for a in whole), *tiled(rows, values, scale))

    def heads(x: Any, *, blocks_first: bool, interpret: Any) -> Any:
        del interpret
        seen.append("heads")
        values, scale = norm_reference.quantise(x, blocks_first=blocks_first)
        return tiled(values.shape[0], values, scale)

    monkeypatch.setattr("kernels_pallas.rms_norm.mosaic_gpu.rms_norm", norm)
    monkeypatch.setattr("kernels_pallas.rms_norm.mosaic_gpu.quantise", heads)

    def choose(
        logits: Any, bias: Any, counted: Any, own: OwnGroups | None = None, *, rule: Any, interpret: Any
    ) -> Any:
        del interpret
        seen.append("choose" if own is None else "choose and lay out")
        ids, weights = router_reference.choose(logits, bias, rule, counted > 0)
        if own is not None:
            return ids.T, weights.T, group_all(ids - own.first, own.count, 64)
        return ids.T, weights.T, router_reference.count(ids, bias.shape[0])

    def arrange(ids: Any, *args: Any, experts: int, rows: int, tokens: int, interpret: Any) -> Groups:
        del interpret
        seen.append("arrange")
        return layout_reference.arrange(ids.T[:tokens], *args, experts=experts, rows=rows)

    monkeypatch.setattr("kernels_pallas.router.mosaic_gpu.choose", choose)
    monkeypatch.setattr("kernels_pallas.expert_layout.mosaic_gpu.arrange", arrange)
    return seen


def hidden(params: Params, on: Backend, slots: int = 4, cfg: Any = ALIGNED) -> np.ndarray:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, ALIGNED.vocab_size, (4, 5))[:slots])
    return np.asarray(jax.jit(lambda p: trunk.forward(p, cfg, tokens, on))(params), np.float64)


@functools.cache
def plainly() -> np.ndarray:
    return hidden(aligned(), xla())


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Of the middle token: rounding flips the choice of an expert for some."""
    return float(np.median(np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)))


# Six quantised activations of a layer follow each other. e4m3 has three bits behind the first: a value moves
# by a sixteenth at most, whose standard deviation is 1 / sqrt(3) of it. Parts summed in bfloat16 add little.
MOVED = np.sqrt(6 * ALIGNED.num_hidden_layers / 3) * 2**-4


@pytest.mark.parametrize("form", ["absorbed", pytest.param("naive", marks=pytest.mark.rest)])
def test_kernels_compute_the_same_model(calls, form):
    want = plainly()
    assert not calls
    got = hidden(aligned(), kernels(form=form))
    # Per layer three norms, and o's input quantised; and parts of q_a, kv_a and o, which the norms sum.
    assert (calls.count("norm"), calls.count("heads"), calls.count("parts")) == (2 * 3, 2, 2 * 3)
    # Per layer q_a with kv_a, q_b, o; a dense MLP or a shared expert of two products; experts of two.
    assert (calls.count("fp8"), calls.count("grouped")) == (2 * 5, 2)
    assert (calls.count("choose"), calls.count("arrange")) == (1, 1)
    assert 0 < distance(got, want) < MOVED


@pytest.mark.rest
def test_kernels_of_few_rows_read_them_where_they_lie(calls):
    got = hidden(aligned(), kernels(), slots=1)
    assert (calls.count("choose and lay out"), calls.count("arrange"), calls.count("grouped")) == (1, 0, 2)
    assert 0 < distance(got, plainly()[:1]) < MOVED


@pytest.mark.rest
def test_kernels_keep_the_limit_of_the_activation(calls):
    cfg = replace(ALIGNED, swiglu_limit=0.01)
    got, want = hidden(aligned(), kernels(), cfg=cfg), hidden(aligned(), xla(), cfg=cfg)
    assert (calls.count("fp8"), calls.count("grouped")) == (2 * 5, 2)
    assert 0 < distance(got, want) < MOVED < distance(got, plainly())


@pytest.mark.rest
@pytest.mark.parametrize("data", [1, 2])
def test_kernels_on_a_mesh(calls, data):
    want = plainly()
    got = hidden(aligned(), kernels(make_mesh(data, 2)))
    assert (calls.count("fp8"), calls.count("grouped")) == (2 * 5, 2)
    assert (calls.count("choose"), calls.count("arrange")) == (1, 1)
    assert distance(got, want) < MOVED


def test_what_kernels_cannot_do_is_refused():
    with pytest.raises(ConfigError, match=r"activations is float32.*use implementation='xla'"):
        trunk.forward(kept("fp8").params, kept("fp8").config, jnp.zeros((1, 3), jnp.int32), KERNELS)
    with pytest.raises(ConfigError, match="experts = 'dense' has no kernel"):
        kernels(experts="dense")


def test_experts_in_two_formats_are_left_to_xla():
    experts = next(p.mlp for p in aligned().layers if hasattr(p.mlp, "gate_up") and is_fp8(p.mlp.gate_up))
    x, plain = jnp.zeros((8, 512), jnp.bfloat16), expand(experts.down, jnp.bfloat16)
    on = HopperProducts()
    assert on.runs("grouped_matmul", check_experts, x, experts.gate_up, experts.down)
    assert not on.runs("grouped_matmul", check_experts, x, experts.gate_up, plain)
    with pytest.raises(ConfigError, match="FP8 together or not at all"):
        HopperProducts(strict=True).runs("grouped_matmul", check_experts, x, experts.gate_up, plain)


@pytest.mark.parametrize("features", [{"avx2"}, {"avx2", "amx_bf16"}], ids=["no AMX", "AMX"])
def test_on_a_cpu_nothing_chooses_a_kernel(features, calls, monkeypatch):
    monkeypatch.setattr("mtp_jax.model.device.processor_features", lambda: features)
    assert multiplies_bf16() == ("amx_bf16" in features)
    assert backend() == xla_cpu(matrices=multiplies_bf16())
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    jax.eval_shape(lambda p, tokens: trunk.forward(p, ALIGNED, tokens, backend()), aligned(), tokens)
    assert not calls


@pytest.mark.rest
@pytest.mark.parametrize(("cache", "data"), [("plain", 1), ("plain", 2), ("fp8", 2)])
def test_attention_of_few_tokens_by_kernels_is_that_of_xla(cache, data, calls, monkeypatch, rng):
    def reference(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return real(*args, **options | {"implementation": "xla"})

        return run

    names = "mla_low_rank", "mla_absorb", "mla_decode", "mla_decode_parts", "mla_values"
    for name in names:
        module = getattr(by_kernels, name.removesuffix("_parts"))
        monkeypatch.setattr(module, name, reference(name, getattr(module, name)))
        monkeypatch.setattr(module, "check", lambda *_: None)
    cfg = ALIGNED
    positions = jnp.asarray([[0, 1], [6, 7], [-1, -1], [3, 4]])
    # Numbers are a device's own: of two devices, each has half of the slots and pages.
    table = jnp.asarray([[4, 0], [2, 3], [5, 5], [1, 0]])
    start = positions[:, 0]
    view = PagedView(table, positions, chain(start, jnp.where(start < 0, 0, 2)))
    x, pages = (
        jnp.asarray(rng.normal(size=shape).astype(jnp.bfloat16))
        for shape in ((4, 2, cfg.hidden_size), (12, 4, cfg.row.width))
    )
    empty = empty_cache(12, 4, cfg, 0, jnp.bfloat16, fp8=cache == "fp8")
    given = empty.stored(Entries(pages), cfg.row)
    mesh = make_mesh(data, 2) if data > 1 else None

    def run(*kernels: str) -> Any:
        p, sight = aligned().layers[0], Sight(rope_angles(cfg, positions), (view,))
        on = mosaic_gpu(mesh, kernels=PRODUCTS.union(kernels), strict=True)

        def attended(p: Any) -> Any:
            stream, q, rows, cache = on.before_attention(p, cfg, x, sight, given)
            context, cache, _ = on.attend(p.attention, cfg, q, rows, cache, sight)
            (out,) = on.after_attention(p, cfg, stream, context, (view,)).added
            return summed(out).astype(jnp.float32), cache

        out, kept = jax.jit(attended)(p)
        return np.asarray(out), kept

    want, by_xla = run()
    assert not set(names) & set(calls)
    heads = calls.count("heads")
    got, by_kernel = run("mla_low_rank", "mla_absorb", "mla_decode", "mla_values")
    assert [calls.count(name) for name in names] == [1, 1, 0, 1, 1]
    assert calls.count("heads") == heads  # nothing is left to quantise
    handed_over, _ = run("mla_values")  # by XLA's attention
    assert calls.count("heads") == heads
    slots = [0, 1, 3]
    # Either side rounds ten results to bfloat16 one after the other.
    moved = np.sqrt(2 * 10) * roundoff(jnp.bfloat16)
    for out in (got, handed_over):
        assert np.linalg.norm(out[slots] - want[slots]) < moved * np.linalg.norm(want[slots])
    # The kernel drops rows of no position; XLA writes them to a device's last page.
    written = np.arange(12) % (12 // data) != 12 // data - 1
    ours, theirs, before = (jax.tree.leaves(jax.device_get(c)) for c in (by_kernel, by_xla, given))
    for a, b in zip(ours, theirs, strict=True):
        assert (a == b)[written].mean() > 0.99  # but for the last bit of some
    assert (ours[0] != before[0])[written].any(axis=-1).sum() == 6


@pytest.mark.parametrize("form", ["absorbed", pytest.param("naive", marks=pytest.mark.rest)])
def test_attention_by_the_kernel_is_given_what_xla_is_given(form, monkeypatch, rng):
    def reference(module: Any, name: str) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kw: real(*args, **kw | {"implementation": "xla"}))
        monkeypatch.setattr(module, "check", lambda *_: None)

    reference(by_kernels.mla_decode, "mla_decode")
    reference(by_kernels.mla_prefill, "mla_prefill")
    slots, window, heads, nope, rope, rank = 3, 2, 4, 8, 4, 16

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / math.sqrt(shape[-1]), jnp.float32)

    q = Queries(normal(slots, window, heads, nope), normal(slots, window, heads, rope))
    positions = jnp.array([[0, 1], [6, 7], [-1, -1]])
    table = jnp.array([[4, 0], [2, 5], [6, 6]])
    view = PagedView(table, positions, chain(positions[:, 0], jnp.array([2, 2, 0])), form)
    ups, rows = (normal(heads, nope, rank), normal(heads, 8, rank)), normal(slots, window, rank + rope)
    cache = xla().write_rows(LayerCache(normal(7, 4, rank + rope)), LayerCache(rows), table, positions)
    source = Paged(cache, view, RowFormat(rank + rope, (rank, rank + rope), rank, 128))
    want, got = (
        jax.jit(latent(on).attend, static_argnums=3)(q, Ups(*ups), source, 0.3)
        for on in (xla(), mosaic_gpu(strict=True))
    )
    # Keys or queries from the latents, scores, a sum over the rows, values from the latents.
    near(got, want, 2 * rank + nope + rope + 8)
    assert not np.asarray(got[2]).any()


def test_each_group_is_multiplied_with_its_own_fp8_weight(calls, rng):
    """Apart from the rounding of rows to e4m3, which has 3 bits of mantissa."""
    groups, outputs, inputs = 2, 128, 512
    values = jnp.asarray(rng.normal(size=(groups, outputs, inputs)).astype(jnp.float8_e4m3fn))
    w = Fp8(values, jnp.asarray(rng.uniform(0.5, 2, (groups, 1, inputs // 128)).astype(np.float32)))
    x = jnp.asarray(rng.normal(size=(2, 3, groups, inputs)).astype(jnp.bfloat16))
    got = np.asarray(jax.jit(HopperProducts().by_group)(x, w), np.float64)
    wide = np.asarray(values, np.float64) * np.repeat(np.asarray(w.scale, np.float64), 128, -1)
    want = np.einsum("bwgi,goi->bwgo", np.asarray(x, np.float64), wide)
    assert "grouped" in calls
    assert np.linalg.norm(got - want) < 2**-4 * np.linalg.norm(want)
