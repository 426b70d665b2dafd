"""Checkpoints with rigged acceptance: any size, no real weights, drafts accepted at a given rate.

    trunk   greedy next token of t = chain[t]: blocks are quiet, the head's row chain[t] points along embed[t]
    NextN   eh_proj = [identity | 0] + noise, so it predicts the chain, with mistakes set by the noise; of
            several streams e_proj = identity + noise, h_proj = noise
    DSpark  the bias by the token before predicts the chain: following[chain[t]] = previous[t] + noise

Plain random weights accept nothing and would exercise none of the draft-and-verify loop.
"""

import argparse
import math
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.api.local import local_engine, local_runner
from mtp_jax.api.session import Session
from mtp_jax.checkpoint import save_checkpoint
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError, MtpJaxError
from mtp_jax.heads.blocks.declared import BlockHead, Markov
from mtp_jax.heads.stages.declared import StagesConfig
from mtp_jax.model.config import CompressedConfig, HyperConfig, ModelConfig
from mtp_jax.model.family import config_of_file
from mtp_jax.model.hf_config import read_json
from mtp_jax.model.params import NextN, Params, Spec, dtype_of, param_specs

# All blocks together add this much to the residual stream, relative to the embedding they start from.
_LOUDNESS = 0.4

# Beside the quiet tensors: gates and queries loud enough that attention and experts are not uniform. Ends of
# names without ".weight"; the second of each kind is DeepSeek-V4's.
_GAINS = {
    **dict.fromkeys(("gate_proj", "w1"), 1.25),
    **dict.fromkeys(("down_proj", "w2"), 1.5),
    **dict.fromkeys(("q_proj", "q_b_proj", "wq_b"), 1.5),
    "gate": 2.0,
    **dict.fromkeys(("e_score_correction_bias", "gate.bias"), 0.2),
}
_QUIET = ("o_proj", "wo_b", "down_proj", "w2")
_HEAD_NOISE, _HEAD_SIGNAL = 0.9, 6.0
_OUT_OF_REACH = 0.2
_CLOSE = 0.03  # distance to the target at which the search ends


PRESETS = "dense", "moe", "v4", "v4-dspark"


@dataclass(frozen=True)
class Preset:
    """A config and the noise that ``tune`` found for it with seed 0; ``about`` states its purpose."""

    about: str
    config: ModelConfig
    noise: float


def preset(name: str) -> Preset:
    """The preset "dense" or "moe", of about 200 million parameters in 24 layers, or one of DeepSeek-V4's.

    Raises ConfigError.

    A vocabulary of 4096 keeps the head's share of a step near the release's: 2 to 5 % of the weights a token
    touches (DeepSeek-V3: 2.5 %), so that a draft, which needs the head too, is as cheap as it is there.
    """
    if name == "dense":
        return Preset("24 dense layers, 0.8 GB in float32", _dense(), noise=5.125)
    if name == "moe":
        return Preset("2 dense and 22 MoE layers, 0.8 GB in float32", _moe(), noise=4.384)
    if name == "v4":
        return Preset("6 layers of DeepSeek-V4, 0.5 GB in float32", _v4(), noise=4.4925)
    if name == "v4-dspark":
        return Preset("the same with two DSpark stages in the place of MTP", _v4_dspark(), noise=1.8674)
    raise ConfigError(f"preset {name!r} is unknown; expected {' or '.join(map(repr, PRESETS))}")


def _dense() -> ModelConfig:
    return ModelConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=1792,
        num_hidden_layers=24,
        num_attention_heads=12,
        q_lora_rank=384,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        first_k_dense_replace=24,
        num_nextn_predict_layers=1,
        nextn_moe=(False,),
        dtype="float32",
    )


def _moe() -> ModelConfig:
    """The NextN layer has an MoE block too, as in the release."""
    return replace(
        _dense(),
        hidden_size=768,
        intermediate_size=2048,
        moe_intermediate_size=96,
        num_attention_heads=8,
        q_lora_rank=256,
        kv_lora_rank=192,
        n_routed_experts=32,
        n_shared_experts=1,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        first_k_dense_replace=2,
        nextn_moe=(True,),
    )


def _v4() -> ModelConfig:
    """Layers of all kinds, in the release's order. They are compiled one by one, so there are few."""
    return replace(
        _dense(),
        hidden_size=768,
        intermediate_size=192,
        moe_intermediate_size=192,
        num_hidden_layers=6,
        num_attention_heads=8,
        q_lora_rank=256,
        kv_lora_rank=0,
        qk_nope_head_dim=0,
        qk_rope_head_dim=0,
        v_head_dim=0,
        compressed=CompressedConfig(
            head_dim=128,
            rope=32,
            groups=4,
            group_rank=128,
            window=128,
            theta=160000.0,
            index_heads=8,
            index_dim=64,
            topk=64,
            ratios=(0, 0, 4, 128, 4, 128),
        ),
        hyper=HyperConfig(streams=4, iterations=20, eps=1e-6),
        scoring_func="sqrtsoftplus",
        swiglu_limit=10.0,
        num_hash_layers=3,
        n_routed_experts=32,
        n_shared_experts=1,
        num_experts_per_tok=4,
        routed_scaling_factor=1.5,
        first_k_dense_replace=0,
        nextn_moe=(True,),
        family="deepseek_v4",
    )


def _v4_dspark() -> ModelConfig:
    """Blocks of five drafts, as the releases have; Markov's rank is a fourth of theirs, as the widths are."""
    trunk = _v4().with_nextn(())
    said = {
        "dspark_block_size": 5,
        "dspark_markov_rank": 64,
        "dspark_noise_token_id": trunk.vocab_size - 1,
        "dspark_target_layer_ids": [3, 4, 5],
    }
    return replace(trunk, drafter=StagesConfig.of(said, trunk, 2))


def chain(cfg: ModelConfig, seed: int = 0) -> np.ndarray:
    """int32 [V]: the token that follows each token.

    One cycle through all ordinary tokens, so that a run repeats no token before the whole vocabulary; bos and
    eos lead into the cycle and are not part of it.
    """
    special = {cfg.bos_token_id, *cfg.eos_token_ids}
    ordinary = np.array([t for t in range(cfg.vocab_size) if t not in special], np.int32)
    order = _generator(seed, "chain").permutation(ordinary)
    following = np.full(cfg.vocab_size, order[0], np.int32)
    following[order] = np.roll(order, -1)
    return following


def rigged_params(cfg: ModelConfig, noise: float, seed: int = 0, dtype: str = "float32") -> Params:
    """Parameters whose greedy text is ``chain`` and whose NextN layers predict it, less well with more noise.

    Every array has its own random stream, named by its tensor: the same seed gives the same bytes.
    Raises ConfigError for a model with a tied head or without a NextN layer, which cannot be rigged.
    """
    stages = cfg.drafter is not None and cfg.drafter.inside
    if cfg.tie_word_embeddings or not (cfg.num_nextn_predict_layers or stages):
        raise ConfigError(
            "a rigged model needs a head of its own and a NextN layer; set tie_word_embeddings = false "
            "and num_nextn_predict_layers >= 1"
        )
    leaves, tree = jax.tree.flatten(param_specs(cfg))
    params: Params = tree.unflatten([jnp.asarray(_array(s, cfg, seed), dtype_of(s, dtype)) for s in leaves])
    embed = np.asarray(params.embed, np.float32)
    head = jnp.asarray(_head(embed, chain(cfg, seed), seed), params.embed.dtype)
    return with_noise(cfg, replace(params, head=head), noise, seed)


def with_noise(cfg: ModelConfig, params: Params, noise: float, seed: int = 0) -> Params:
    """``params`` with eh_proj = [identity | 0] + noise * N(0, 1 / D) in every NextN layer.

    Where there are several streams, e_proj and h_proj are the halves of eh_proj. The bias of DSpark stages is
    twice as loud as the head, which knows the token of row 0 alone, and its noise is relative to that.
    """
    if isinstance(params.drafter, BlockHead) and params.drafter.markov is not None:
        markov = params.drafter.markov
        previous = _generator(seed, "previous").standard_normal(markov.previous.shape, np.float32)
        previous /= np.linalg.norm(previous, axis=1, keepdims=True)
        random = _generator(seed, "noise markov").standard_normal(previous.shape, np.float32)
        random *= np.float32(noise / math.sqrt(previous.shape[1]))
        np.add.at(random, chain(cfg, seed), previous)
        random *= np.float32(2 * _HEAD_SIGNAL * math.sqrt(cfg.hidden_size))
        kinds = markov.previous.dtype, markov.following.dtype
        own = Markov(jnp.asarray(previous, kinds[0]), jnp.asarray(random, kinds[1]))
        return replace(params, drafter=replace(params.drafter, markov=own))

    def rig(k: int, p: NextN) -> NextN:
        hidden = p.merge.shape[0]
        random = _generator(seed, f"noise {k}").standard_normal((hidden, 2 * hidden), np.float32)
        random *= np.float32(noise / math.sqrt(hidden))
        random[:, :hidden] += np.eye(hidden, dtype=np.float32)
        merge = jnp.asarray(random, p.merge.dtype)
        if p.stream_merge is None:
            return replace(p, merge=merge)
        return replace(p, merge=merge[:, :hidden], stream_merge=merge[:, hidden:])

    return replace(params, nextn=tuple(rig(k, p) for k, p in enumerate(params.nextn)))


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _array(spec: Spec, cfg: ModelConfig, seed: int) -> np.ndarray:
    first = spec.names
    while not isinstance(first, str):
        first = first[0]
    value = _generator(seed, f"{first} {spec.rows}").standard_normal(spec.shape, np.float32)
    if spec.ids:  # different experts for each token
        random = _generator(seed, first).random((spec.shape[0], cfg.n_routed_experts))
        return random.argsort(axis=1)[:, : spec.shape[1]]
    if spec.init == "ones":
        return 1 + 0.02 * value
    if spec.init == "embedding":
        return value
    name = first.removesuffix(".weight")
    gain = next((g for end, g in _GAINS.items() if name.endswith(f".{end}")), 1.0)
    gain *= _LOUDNESS / math.sqrt(cfg.num_hidden_layers) if name.endswith(_QUIET) else 1.0
    value *= np.float32(gain if spec.init == "zeros" else gain / math.sqrt(spec.tensor_shape[-1]))
    return value


def _head(embed: np.ndarray, following: np.ndarray, seed: int) -> np.ndarray:
    head = _generator(seed, "head").standard_normal(embed.shape, np.float32)
    head *= np.float32(_HEAD_NOISE / math.sqrt(embed.shape[1]))
    unit = embed / np.linalg.norm(embed, axis=1, keepdims=True)
    np.add.at(head, following, _HEAD_SIGNAL * unit)
    return head


def complete(
    engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float = 0.0
) -> list[Request]:
    """Completions of ``max_tokens`` tokens each, end-of-text ignored, seed 0; leaves the engine idle."""
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=0)
    requests = [engine.make_request(p, params) for p in prompts]
    engine.prepare(requests)
    for _ in Session(engine).run(requests):
        pass
    return requests


def random_prompts(cfg: ModelConfig, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """``count`` prompts of ``length`` random ordinary tokens."""
    return _generator(seed, "prompts").choice(np.unique(chain(cfg)), (count, length)).tolist()


@dataclass(frozen=True)
class Tuned:
    """The noise found, and the acceptance length measured with it."""

    noise: float
    acceptance: float


def tune(
    cfg: ModelConfig,
    target: float,
    depth: int = 3,
    seed: int = 0,
    *,
    prompts: int = 16,
    max_tokens: int = 48,
) -> Tuned:
    """Bisect the noise until greedy decoding at ``depth`` emits ``target`` tokens per step.

    One executable serves every trial: only eh_proj changes. Raises ConfigError for a target out of reach,
    also where no noise comes within 0.2 of it.
    """
    if not 1 < target <= depth + 1:
        raise ConfigError(
            f"target acceptance {target} at depth {depth}; expected above 1, at most {depth + 1}"
        )
    params = rigged_params(cfg, 0.0, seed)
    sizes = EngineConfig(
        num_speculative_tokens=depth,
        max_num_seqs=min(8, prompts),
        max_model_len=max_tokens + 16,
        page_size=cfg.usual_page,
        seed=seed,
    )
    engine = local_engine(cfg, params, sizes)
    given = random_prompts(cfg, prompts, 8, seed)

    def acceptance(noise: float) -> float:
        local_runner(engine).take(with_noise(cfg, params, noise, seed))
        runs = [r.progress.speculation for r in complete(engine, given, max_tokens)]
        return sum(s.accepted for s in runs) / sum(s.steps for s in runs) + 1

    low, high = 0.0, math.sqrt(cfg.hidden_size)
    best = Tuned(0.0, acceptance(0.0))
    for _ in range(12):
        if abs(best.acceptance - target) <= _CLOSE:
            break
        noise = (low + high) / 2
        got = acceptance(noise)
        low, high = (noise, high) if got > target else (low, noise)
        if abs(got - target) < abs(best.acceptance - target):
            best = Tuned(noise, got)
    if abs(best.acceptance - target) > _OUT_OF_REACH:
        raise ConfigError(
            f"acceptance length {target} at depth {depth} is out of reach for this model: the nearest is "
            f"{best.acceptance:.3f}, with noise {best.noise:.4f}; ask for that, or give the noise"
        )
    return best


def main(argv: Sequence[str] | None = None) -> int:
    """Write a synthetic checkpoint; 0 on success, 1 with a message on an error the user can fix."""
    args = _parser().parse_args(argv)
    try:
        _check(args)
        made = preset(args.preset) if args.preset else None
        cfg = made.config if made else config_of_file(args.config)
        noise = args.noise if args.noise is not None else made and made.noise
        if args.tune is not None:
            depth = 3 if args.depth is None else args.depth
            tuned = tune(cfg, args.tune, depth, args.seed)
            noise = tuned.noise
            print(f"noise {tuned.noise:.4f}: acceptance length {tuned.acceptance:.3f} at depth {depth}")
        if noise is None:
            raise ConfigError("--config needs --noise or --tune: how often should drafts come true?")
        params = rigged_params(cfg, noise, args.seed, cfg.dtype)
        save_checkpoint(args.out, cfg, params, cfg.dtype)
    except (MtpJaxError, OSError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 1
    count = sum(a.size for a in jax.tree.leaves(params))
    print(f"{args.out}: {count / 1e6:.0f} million parameters, {cfg.dtype}, noise {noise}, seed {args.seed}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mtp_jax.lab.bench.synthetic", description="Write a checkpoint with rigged acceptance."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--preset", choices=PRESETS, help="a model of 100 to 200 million parameters")
    what.add_argument("--config", help="any config.json")
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    noisy = parser.add_mutually_exclusive_group()
    noisy.add_argument("--noise", type=float, help="of eh_proj; default: the preset's")
    noisy.add_argument(
        "--tune", type=float, metavar="LENGTH", help="find the noise for this acceptance length"
    )
    parser.add_argument("--depth", type=int, help="drafts per step while tuning (default: 3)")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for arguments that say nothing, or cannot be."""
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed}; expected 0 or more")
    if args.noise is not None and not (math.isfinite(args.noise) and args.noise >= 0):
        raise ConfigError(f"--noise {args.noise}; expected a finite number of 0 or more")
    if args.depth is not None and args.tune is None:
        raise ConfigError("--depth has no effect without --tune; add that, or leave it out")
    if args.config and any(key.startswith("dspark_") for key in read_json(args.config)):
        raise ConfigError(
            f"{args.config} declares DSpark stages, which --config does not make; leave the dspark_ keys "
            "out, or take --preset v4-dspark"
        )


if __name__ == "__main__":
    sys.exit(main())
