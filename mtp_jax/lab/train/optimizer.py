"""The optimiser: Muon for weight matrices, AdamW for the rest, one warm-up / stable / decay schedule."""

import jax
import optax
import optax.contrib
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from mtp_jax.lab.train.recipe import Descent

# Not maps from activations to activations: Muon's update with equal singular values does not suit them.
_ADAM = ("embed", "head", "router", "base", "previous", "following")
_HEADS_OUT = ("q_b", "k_up", "v_up", "q", "k", "v")  # [N, out, in]


def schedule(recipe: Descent, total: int, peak: float) -> optax.Schedule:
    """Linear warm-up, constant, then linear decay over the last `decay_fraction` of `total` steps."""
    warmup = min(recipe.warmup_steps, total // 4)
    decay = max(1, round(total * recipe.decay_fraction))
    stable = max(0, total - warmup - decay)
    return optax.join_schedules(
        [
            optax.linear_schedule(peak / max(1, warmup), peak, max(1, warmup)),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, peak * recipe.final_lr_fraction, total - warmup - stable),
        ],
        [warmup, warmup + stable],
    )


def make_optimizer(recipe: Descent, steps: int) -> optax.GradientTransformation:
    """Gradient clipping, then Muon (arXiv 2502.16982, update scaled to AdamW's size) or plain AdamW."""
    rate = schedule(recipe, steps, recipe.learning_rate)
    if recipe.optimizer == "adamw":
        inner = optax.adamw(rate, b2=recipe.beta2, weight_decay=recipe.weight_decay, mask=_decays)
    else:
        inner = optax.contrib.muon(
            rate,
            ns_steps=recipe.muon_ns_steps,
            weight_decay=recipe.weight_decay,
            adam_b2=recipe.beta2,
            adam_learning_rate=schedule(recipe, steps, recipe.adam_learning_rate),
            muon_weight_dimension_numbers=_matrices,
            consistent_rms=0.2,
        )
    return optax.chain(optax.clip_by_global_norm(recipe.grad_clip), inner)


def _leaf_name(path: KeyPath) -> str:
    """The last attribute name on a tree path."""
    names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    return names[-1] if names else ""


def _is_matrix(path: KeyPath, leaf: jax.Array) -> bool:
    return leaf.ndim >= 2 and _leaf_name(path) not in _ADAM


def _decays(params: PyTree) -> PyTree:
    return jax.tree_util.tree_map_with_path(_is_matrix, params)


def _matrices(params: PyTree) -> PyTree:
    """The axes of a weight's inputs and outputs; the remaining axes (experts, gate/up) count matrices."""

    def numbers(path: KeyPath, leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        if not _is_matrix(path, leaf):
            return None
        name, last = _leaf_name(path), leaf.ndim - 1
        if name in _HEADS_OUT and leaf.ndim == 3:
            return optax.contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=(0, 1))
        if name == "o":
            return optax.contrib.MuonDimensionNumbers(reduction_axis=(1, 2), output_axis=0)
        return optax.contrib.MuonDimensionNumbers(reduction_axis=last, output_axis=last - 1)

    return jax.tree_util.tree_map_with_path(numbers, params)
