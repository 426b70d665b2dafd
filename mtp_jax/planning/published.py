"""Published speeds of DeepSeek-V3 and R1 on clusters, and the deployments that they were measured on.

Where a source leaves something open, the assumption stands in ``open``. Sources:

EP96   lmsys.org, 2025-05-05, "Deploying DeepSeek with PD Disaggregation and Large-Scale Expert Parallelism"
GB1    lmsys.org, 2025-06-16, "Deploying DeepSeek on GB200 NVL72", part I
GB2    lmsys.org, 2025-09-25, the same, part II
MTP    lmsys.org, 2025-07-17, multi-token prediction in SGLang
ANT    lmsys.org, 2025-09-26, DeepSeek-R1 on H20 by Ant Group
TRT1   NVIDIA/TensorRT-LLM, docs/source/blogs/tech_blog/blog01, R1 at low latency on 8 B200
CI     sgl-project/sglang, the least speed that its tests ask for on 8 H200
VLLM   vllm.ai, 2026-02, DeepSeek on GB200
"""

from dataclasses import dataclass, replace

from mtp_jax.model.config import ModelConfig
from mtp_jax.planning.deployment import Deployment
from mtp_jax.planning.hardware import GPUS
from mtp_jax.planning.weights import BFLOAT16, FP8, NVFP4, Storage

# DeepSeek-V3's and R1's config.json.
DEEPSEEK_V3 = ModelConfig(
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=61,
    num_attention_heads=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    q_lora_rank=1536,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
    max_position_embeddings=163840,
    num_nextn_predict_layers=1,
    nextn_moe=(True,),
    fp8=True,
)

KNOWN = {"deepseek-v3": DEEPSEEK_V3, "deepseek-r1": DEEPSEEK_V3}
"""Configurations by name: of what the published speeds are."""


@dataclass(frozen=True)
class Point:
    """A published figure.

    Attributes:
        name: what was measured.
        source: an abbreviation of the module's docstring.
        deployment: on what.
        rate: tokens per second, of one user or of one GPU.
        per_user: which of them.
        open: what the source does not say, as it is assumed here.
    """

    name: str
    source: str
    deployment: Deployment
    rate: float
    per_user: bool = False
    open: str = ""


def _on(gpu: str, gpus: int, each: int, **rest: object) -> Deployment:
    """``each`` requests per GPU, experts over all GPUs, rows exchanged as DeepEP's low-latency kernels do."""
    kind = GPUS[gpu]
    rest = {"exchange": "per-expert", "imbalance": 1.15, "hosts": -(-gpus // kind.domain), **rest}
    fp8 = Storage(FP8, FP8)
    return Deployment(DEEPSEEK_V3, fp8, kind, gpus, requests=each * gpus, **rest)  # type: ignore[arg-type]


_EP72 = _on("h100", 72, 256, context=2050, redundant=32, micro_batches=2)
_GB200 = _on("gb200", 48, 768, context=2050, redundant=32)
_FP4 = replace(_GB200, storage=Storage(NVFP4, FP8), cache="fp8", attention="fp8")
_B200 = Deployment(DEEPSEEK_V3, Storage(NVFP4, BFLOAT16), GPUS["b200"], 1, 8, context=2000, imbalance=1.15)
_CI = Deployment(
    DEEPSEEK_V3,
    Storage(FP8, FP8),
    GPUS["h200"],
    1,
    8,
    context=1000,
    depth=3,
    tokens_per_step=2.8,
    imbalance=1.15,
)
_LONG = _on("h200", 16, 2, context=67600)


def _drafting(d: Deployment, depth: int, tokens: float, **rest: object) -> Deployment:
    return replace(d, depth=depth, tokens_per_step=tokens, **rest)  # type: ignore[arg-type]


def _h800(gpus: int, tokens: float, **rest: object) -> Deployment:
    more = {"micro_batches": 2, "depth": 1, "tokens_per_step": tokens, **rest}
    return _on("h800", gpus, 128, **more)


FITTED = (
    Point("72 H100, 256 per GPU, 2k", "EP96", _EP72, 22282 / 8),
    Point(
        "the same in one batch (25.5 % slower)", "EP96", replace(_EP72, micro_batches=1), 22282 / 1.255 / 8
    ),
    Point(
        "72 H100, MTP simulated, 128 per GPU, 4k",
        "EP96",
        _drafting(_EP72, 1, 1.6, requests=128 * 72, context=4000),
        17373 / 8,
    ),
    Point(
        "128 H800, DeepSeek's profile, 128 per GPU, 4k",
        "EP96",
        _h800(128, 1.6, context=4096, imbalance=1.0),
        18598 / 8,
    ),
    Point(
        "144 H800, DeepSeek's production, a day's mean",
        "EP96",
        _h800(144, 1.8, context=4989, redundant=32),
        14800 / 8,
        open="128 requests per GPU, 1.8 tokens per step",
    ),
    Point("48 GB200, 2k, June 2025", "GB1", _GB200, 7583, open="768 requests per GPU"),
    Point("48 GB200, 2k, September 2025", "GB2", _GB200, 9087, open="768 requests per GPU"),
    Point(
        "48 GB200, experts in FP4, FP8 attention, 1408 per GPU",
        "GB2",
        replace(_FP4, requests=1408 * 48),
        13386,
    ),
    Point("the same, 768 per GPU (a tenth less)", "GB2", _FP4, 13386 * 0.9),
    Point("8 B200, one request, no drafts", "TRT1", _B200, 111, True),
    Point("8 B200, one request, depth 1", "TRT1", _drafting(_B200, 1, 1.92), 198, True),
    Point("8 B200, one request, depth 3", "TRT1", _drafting(_B200, 3, 2.82), 253, True),
    Point("the same, later kernels", "TRT1", _drafting(_B200, 3, 2.82), 340, True),
    Point("8 B200, one request, depth 5", "TRT1", _drafting(_B200, 5, 3.01), 239, True),
    Point(
        "8 H200, one request, depth 3",
        "CI",
        _CI,
        130,
        True,
        open="a floor; 2.8 tokens per step, 1k of context",
    ),
    Point("16 H200, 2 per GPU, 64k + 4k", "MTP", _LONG, 60.4),
    Point("16 H200, 2 per GPU, 64k + 4k, depth 3", "MTP", _drafting(_LONG, 3, 2.44), 82.0),
)


def _h20(gpus: int, each: int, depth: int = 1, tokens: float = 1.85) -> Deployment:
    """Prompts of 4,096 tokens, the middle of 1,536 generated ones."""
    d = _on("h20", gpus, each, context=4096 + 768, cache="fp8", attention="fp8", imbalance=1.3)
    return _drafting(d, depth, tokens)


# Looked up after the fit, which never saw them.
HELD_OUT = (
    Point("16 H20, 1 per GPU, depth 1", "ANT", _h20(16, 1), 43),
    Point("16 H20, 8 per GPU, depth 1", "ANT", _h20(16, 8), 278),
    Point("32 H20, 8 per GPU, depth 1", "ANT", _h20(32, 8), 293),
    Point("16 H20, 12 per GPU, depth 2", "ANT", _h20(16, 12, 2, 2.55), 423),
    Point("16 H20, 32 per GPU, depth 1", "ANT", _h20(16, 32), 675),
    Point("32 H20, 32 per GPU, depth 1", "ANT", _h20(32, 32), 585),
    Point("16 H20, 32 per GPU, depth 3", "ANT", _h20(16, 32, 3, 3.1), 554),
    Point("16 H20, 48 per GPU, depth 1", "ANT", _h20(16, 48), 714),
    Point(
        "8 GB200, experts in FP4, FP8 cache, 2k + 2k",
        "VLLM",
        replace(_FP4, data=8, redundant=0, requests=512 * 8, context=3000),
        10100,
        open="512 requests per GPU",
    ),
)

# Which of two held-out points is faster per GPU: pairs of names, the faster first.
ORDERED = (
    ("32 H20, 8 per GPU, depth 1", "16 H20, 8 per GPU, depth 1"),
    ("16 H20, 32 per GPU, depth 1", "32 H20, 32 per GPU, depth 1"),
    ("16 H20, 32 per GPU, depth 1", "16 H20, 32 per GPU, depth 3"),
    ("16 H20, 48 per GPU, depth 1", "16 H20, 32 per GPU, depth 1"),
)
