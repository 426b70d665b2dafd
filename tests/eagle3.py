"""EAGLE-3 heads in the plainest way: no cache, all recomputed for every draft."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax.checkpoint import Loaded, load
from mtp_jax.checkpoint.folder import open_folder
from mtp_jax.checkpoint.safetensors_file import Tensor
from mtp_jax.heads.blocks.declared import BlockHead
from mtp_jax.heads.eagle3.declared import Eagle3
from mtp_jax.heads.eagle3.drafts import Eagle3Head
from mtp_jax.model import draft_module, trunk
from mtp_jax.model.backend import xla
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Params
from tests.golden import model_dir

ON = xla(experts="dense")
DRAFTS = 5


@cache
def loaded(variant: str) -> Loaded:
    return load(model_dir(variant), model_dir(variant, "draft"), dtype="float32")


def forward(params: Params, cfg: ModelConfig, ids: np.ndarray, following: np.ndarray) -> dict[str, Any]:
    """What the head makes of a text, with the token that follows each of its tokens."""
    module = Eagle3Head(cfg)

    @jax.jit
    def run(params: Params) -> dict[str, Any]:
        traced = trunk.forward_traced(params, cfg, jnp.asarray(ids)[None], ON, module.features)
        taps = [traced.taps[k] for k in module.features]
        fused = module.fuse(params, ON, taps)
        tokens, rows = jnp.asarray(following)[None], fused
        drafts, logits = [], []
        for _ in range(DRAFTS):
            z = draft_module.teacher_forced(module, params, ON, 0, tokens, rows)
            logits.append(module.logits(params, 0, z, ON))
            drafts.append(jnp.argmax(logits[-1][:, -1], axis=-1))
            tokens = jnp.concatenate([tokens, drafts[-1][:, None]], axis=1)
            rows = jnp.concatenate([rows, z[:, -1:]], axis=1)
        forced = draft_module.teacher_forced(module, params, ON, 0, jnp.asarray(following)[None], fused)
        return {
            "aux": jnp.concatenate(taps, axis=-1)[0],
            "fc": fused[0],
            "fed_back": forced[0],
            "logits": logits[0][0],
            "draft_ids": jnp.stack(drafts)[:, 0],
            "draft_logits": jnp.stack([row[0, -1] for row in logits]),
        }

    return run(params)


def of_head(params: Params, logits: Any) -> np.ndarray:
    """The columns of the head's vocabulary; the others are -inf."""
    assert isinstance(params.drafter, Eagle3 | BlockHead)
    offset = np.asarray(params.drafter.target_offset)
    ids, found = np.arange(len(offset)) + offset, np.asarray(logits)
    assert np.isneginf(np.delete(found, ids, axis=-1)).all()
    return found[:, ids]


def tensors(variant: str) -> dict[str, Tensor]:
    """The head's tensors as its file has them."""
    return open_folder(model_dir(variant, "draft")).tensors
