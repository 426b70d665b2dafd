"""Tiny models in memory whose NextN layer really predicts the trunk, a plain reference loop, engine helpers.

Random weights accept no drafts, so they test nothing of speculation. Here the next token is mostly a fixed
permutation of the current one: the head's row of token next(t) points along the embedding of t, and NextN's
merge passes the token's embedding through, with noise that decides how often it is right. Blocks add enough
on top that the text depends on the whole history, so a cache that is wrong anywhere shows.
"""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from mtp_jax.api.local import backend_of, decoding_of, make_runner
from mtp_jax.decode.arrays import MaskMaker
from mtp_jax.decode.launches import Launch, Pending, Runner, StepLaunch
from mtp_jax.decode.programs import Programs
from mtp_jax.decode.runner import LocalRunner
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.validate import check_config
from mtp_jax.heads.blocks.declared import BlockHead
from mtp_jax.model import nextn, trunk
from mtp_jax.model.attention_config import OF_MLA
from mtp_jax.model.config import GqaConfig, ModelConfig
from mtp_jax.model.expert_slots import with_slots
from mtp_jax.model.params import Layer, Mlp, Moe, Params, Spec, param_specs
from mtp_jax.model.sharding import data_size, param_sharding
from mtp_jax.text.grammar import Grammars

# Heads, vocabulary, experts and widths divide by eight, so that every mesh of eight devices fits.
TINY = ModelConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=8,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.5,
    first_k_dense_replace=1,
    max_position_embeddings=1024,
    num_nextn_predict_layers=1,
    nextn_moe=(False,),
    eos_token_ids=(41,),
    dtype="float32",
)
# How often the first, second and third draft of a simulated model are right.
RATES = (0.8, 0.6, 0.5)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)


def gqa(cfg: ModelConfig = TINY, kv_heads: int = 4, **changes: Any) -> ModelConfig:
    """The same model with grouped-query attention, its heads half rotated, normed and biased."""
    given = GqaConfig(kv_heads, head_dim=8, rotary=0.5, qk_norm=True, bias=True)
    no_mla: dict[str, Any] = {**dict.fromkeys(OF_MLA, 0), "q_lora_rank": None, "rope_interleave": False}
    return replace(cfg, **no_mla, gqa=replace(given, **changes), family="glm4_moe")


# One layer, of the kind that compiles fastest, for programs that are about something else than the model.
SMALL = gqa(
    replace(TINY, vocab_size=128, num_hidden_layers=1, n_routed_experts=0, eos_token_ids=(1,)),
    qk_norm=False,
    bias=False,
)


def rigged(
    cfg: ModelConfig = TINY, seed: int = 1, *, noise: float = 0.6, loud: float = 1.5, contrast: float = 6.0
) -> Params:
    """Float32 parameters. noise: of the drafter; loud: of the blocks; contrast: of the head."""
    rng = np.random.default_rng(seed)

    def draw(spec: Spec) -> np.ndarray:
        if spec.ids and len(spec.shape) == 2:  # experts by token
            return rng.integers(0, cfg.n_routed_experts, spec.shape)
        if spec.ids:  # a draft head's vocabulary is the end of the trunk's
            return np.full(spec.shape, cfg.vocab_size - spec.size)
        x = rng.normal(size=spec.shape)
        if spec.init == "ones":
            return 1 + 0.05 * x
        if spec.init == "zeros":
            return 0.2 * x
        return x if spec.init == "embedding" else x / np.sqrt(spec.tensor_shape[-1])

    def quiet(layer: Layer) -> Layer:
        def scale(mlp: Mlp | Moe) -> Any:
            shared = scale(mlp.shared) if isinstance(mlp, Moe) and mlp.shared else None
            return replace(mlp, down=loud * mlp.down, **({"shared": shared} if shared else {}))

        attention = replace(layer.attention, o=loud * layer.attention.o)
        return replace(layer, attention=attention, mlp=scale(layer.mlp))

    raw: Params = jax.tree.map(draw, param_specs(cfg))
    rng = np.random.default_rng(seed + 1)  # the same text however many NextN layers there are
    follower = rng.permutation(cfg.vocab_size)
    head = rng.normal(size=raw.embed.shape) / np.sqrt(cfg.hidden_size)
    head[follower] += contrast * raw.embed / np.linalg.norm(raw.embed, axis=1, keepdims=True)
    through = np.eye(cfg.hidden_size, 2 * cfg.hidden_size)
    if cfg.hyper:  # one product for the token, another for each stream
        through = np.eye(cfg.hidden_size)
    merges = [replace(m, layer=quiet(m.layer), merge=through + noise * m.merge) for m in raw.nextn]
    drafter: Any = raw.drafter
    layers = tuple(quiet(layer) for layer in raw.layers)
    if tables := getattr(drafter, "tables", None):  # one for each draft
        drafter = replace(drafter, tables=(head,) * len(tables))
    if isinstance(drafter, BlockHead) and drafter.hyper_head and (markov := drafter.markov):
        following = np.zeros_like(markov.following)  # the token before outweighs the rows of masks
        following[follower] = 12 * contrast * markov.previous
        drafter = replace(drafter, markov=replace(markov, following=following))
    params = replace(raw, layers=layers, head=head, nextn=tuple(merges), drafter=drafter)
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32 if a.dtype == float else jnp.int32), params)


@functools.cache
def tiny_params(cfg: ModelConfig = TINY) -> Params:
    """The rigged parameters most tests share."""
    return rigged(cfg)


def apart(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Cases of a parametrised test, of which `make test` keeps these; `make test-all` runs the others."""

    def rest(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.rest)

    return [case if case in kept else rest(case) for case in cases]


def on_mesh(params: Params, mesh: Mesh, cfg: ModelConfig = TINY) -> Params:
    """The parameters, split over the devices of a mesh."""
    return jax.device_put(params, jax.tree.map(lambda s: param_sharding(s, mesh), param_specs(cfg)))


def prompts(count: int, shortest: int = 3, seed: int = 6, vocab: int = TINY.vocab_size) -> list[list[int]]:
    """Random prompts of ``shortest``, ``shortest + 4``, ... tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, vocab, shortest + 4 * i).tolist() for i in range(count)]


@dataclass(frozen=True)
class Told:
    """The plain loop's tokens, accepted drafts per step, and smallest gap between the two best logits."""

    ids: list[int]
    accepted: list[int]
    margin: float


@functools.partial(jax.jit, static_argnames="cfg")
def _run_trunk(params: Params, cfg: ModelConfig, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden = trunk.forward(params, cfg, tokens)
    return hidden[0], trunk.logits(params, hidden[0])


@functools.partial(jax.jit, static_argnames=("cfg", "k"))
def _run_nextn(
    params: Params, cfg: ModelConfig, k: int, tokens: jax.Array, hidden: jax.Array
) -> tuple[jax.Array, jax.Array]:
    z = nextn.teacher_forced(params, cfg, k, tokens, hidden[None])[0]
    return z, nextn.logits(params, k, z)


class Reference:
    """Greedy decoding and speculation in the plainest way: no cache, all recomputed for every token."""

    def __init__(self, params: Params, cfg: ModelConfig = TINY, longest: int = 96) -> None:
        self.params, self.cfg, self.longest = params, cfg, longest
        # Several depths and tests compute the same text, and so the same beginnings.
        self._begun = functools.lru_cache(maxsize=256)(self._run_trunk)
        self._told = functools.cache(self._speculate)

    def _run_trunk(self, ids: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        return _run_trunk(self.params, self.cfg, self._padded(ids))

    def _trunk(self, ids: Sequence[int]) -> tuple[jax.Array, jax.Array]:
        return self._begun(tuple(ids))

    def _padded(self, ids: Sequence[int]) -> np.ndarray:
        row = np.zeros((1, self.longest), np.int32)
        row[0, : len(ids)] = ids
        return row

    def hidden(self, ids: Sequence[int]) -> np.ndarray:
        """The trunk's hidden states [T, D]."""
        return np.asarray(self._trunk(ids)[0])[: len(ids)]

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """[T, V]; row i predicts token i + 1."""
        return np.asarray(self._trunk(ids)[1])[: len(ids)]

    def logprobs(self, ids: Sequence[int]) -> np.ndarray:
        """Log-probability [T, V] after each token."""
        x = self.logits(ids).astype(np.float64)
        x -= x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    def drafts(self, ids: Sequence[int], depth: int) -> tuple[list[int], np.ndarray]:
        """Greedy drafts after ``ids``, whose last token is the newest: (ids, logits [K, V]).

        One layer is reused; several run one after the other, each over every row of the one before.
        """
        rows = np.array(self._trunk(ids)[0])
        drafts: list[int] = []
        logits, layers = [], len(self.params.nextn)
        for k in range(depth):
            layer = k % layers
            assert layers == 1 or k < layers, "the reference reuses only a single layer"
            last = len(ids) - 2
            if layers == 1:
                tokens = [*ids[1:], *drafts]
                last += k
            else:
                tokens = [*ids, *drafts][k + 1 :]
            z, out = _run_nextn(self.params, self.cfg, layer, self._padded(tokens), rows)
            logits.append(np.asarray(out[last]))
            drafts.append(int(logits[-1].argmax()))
            if layers == 1:
                rows[last + 1] = z[last]
            else:
                rows = np.array(z)
        return drafts, np.stack(logits) if logits else np.zeros((0, self.cfg.vocab_size))

    def speculate(self, prompt: Sequence[int], tokens: int, depth: int = 0) -> Told:
        """``tokens`` greedy tokens after a prompt, drafting ``depth`` of them at a time."""
        return self._told(tuple(prompt), tokens, depth)

    def _speculate(self, prompt: tuple[int, ...], tokens: int, depth: int) -> Told:
        ids, accepted, margins = list(prompt), [], []

        def best(row: np.ndarray) -> int:
            low, high = np.sort(row)[-2:]
            margins.append(float(high - low))
            return int(row.argmax())

        ids.append(best(self.logits(ids)[-1]))
        while len(ids) < len(prompt) + tokens:
            drafts = self.drafts(ids, depth)[0]
            after = self.logits([*ids, *drafts])[len(ids) - 1 :]
            count = 0
            while count < depth and best(after[count]) == drafts[count]:
                count += 1
            ids += [*drafts[:count], best(after[count])]
            accepted.append(count)
        return Told(ids[len(prompt) : len(prompt) + tokens], accepted, min(margins))


_PROGRAMS: dict[Any, Programs] = {}


def _shared(programs: Programs) -> Programs:
    """The programs of the first engine whose programs were made of the same."""
    leaves, tree = jax.tree.flatten((programs.lowering.params, programs.lowering.state))
    made_of = programs.lowering.decoding, tree, tuple(leaves)
    return _PROGRAMS.setdefault(made_of, programs)


@contextmanager
def sharing_programs() -> Iterator[None]:
    """Have engines of this process with equal shapes share their programs, however they are made."""
    init = LocalRunner.__init__

    def sharing(self: LocalRunner, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        self.programs = _shared(self.programs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalRunner, "__init__", sharing)
        yield


def forget_programs() -> None:
    """Drop the compiled programs that engines share."""
    _PROGRAMS.clear()


def engine_config(**config: Any) -> EngineConfig:
    """Small sizes, unless others are given."""
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 64, "page_size": 16, "prefill_chunk": 16}
    return EngineConfig(**sizes | config)


def runner_of(
    cfg: ModelConfig, params: Params, config: EngineConfig, mesh: Mesh | None = None
) -> LocalRunner:
    """A new runner."""
    params = with_slots(params, config.redundant_experts, mesh)
    return make_runner(decoding_of(cfg, config, backend_of(config, mesh)), params, config)


def make_engine(
    params: Params | None = None,
    cfg: ModelConfig = TINY,
    mesh: Mesh | None = None,
    grammars: Grammars | None = None,
    **config: Any,
) -> Engine:
    """A new engine. Engines of one shape share their compiled programs: compiling is what tests wait for.

    Few pages change what the engine hands out, and not the shape of the cache: the others are never used.
    """
    params = tiny_params(cfg) if params is None else params
    sizes = engine_config(**config)
    check_config(cfg, sizes, data_size(mesh))
    enough = replace(sizes, num_pages=None)
    roomy = enough.pages_per_shard(data_size(mesh)) > sizes.pages_per_shard(data_size(mesh))
    runner = runner_of(cfg, params, enough if roomy else sizes, mesh)
    runner.programs = _shared(runner.programs)
    return Engine(runner.decoding.model.cfg, sizes, runner, grammars)


def watch(monkeypatch: pytest.MonkeyPatch, runner: Runner, seen: Callable[[StepLaunch], object]) -> None:
    """Have ``seen`` called with every step before it is launched."""
    do = runner.do

    def watched(launch: Launch[Any], masks: MaskMaker | None = None) -> Pending[Any]:
        if isinstance(launch, StepLaunch):
            seen(launch)
        return do(launch, masks)

    monkeypatch.setattr(runner, "do", watched)


Job = tuple[Sequence[int], SamplingParams]


def prepare(engine: Engine, requests: Sequence[Request]) -> None:
    """Compile for a full batch, so that few requests need no programs of their own."""
    engine.prepare([*requests, *[requests[0]] * engine.config.max_num_seqs])


def serve(
    engine: Engine, jobs: Sequence[Job], *, exactly: bool = False, compiled: bool = False
) -> list[Request]:
    """Run these requests together to their end.

    exactly: compile for their number, not for a full batch. compiled: what there is covers them.
    """
    requests = [engine.make_request(prompt, params) for prompt, params in jobs]
    if exactly:
        engine.prepare(requests)
    elif not compiled:
        prepare(engine, requests)
    for request in requests:
        engine.submit(request)
    finish(engine)
    return requests


def finish(engine: Engine) -> None:
    """Step until nothing is left to do."""
    for _ in range(10_000):
        if not engine.busy:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


@contextmanager
def slowed(engine: Engine, seconds: float = 0.02) -> Iterator[None]:
    """Steps that take long enough to do something in the midst of an answer."""
    step = engine.step

    def slow() -> Any:
        time.sleep(seconds)
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", slow)
        yield


def accepted(request: Request) -> list[int]:
    """Accepted drafts of every step."""
    return request.progress.speculation.accepted_per_step


def chosen_logprobs(request: Request) -> np.ndarray:
    """The log-probability of every emitted token."""
    pairs = zip(request.progress.logprobs, request.progress.output, strict=True)
    return np.array([each[token].logprob for each, token in pairs])
