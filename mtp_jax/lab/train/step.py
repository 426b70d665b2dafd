"""One optimiser step: summed micro-batch gradients, the update, and load balancing of the routers."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from mtp_jax.lab.train.loss import LossFigures, loss
from mtp_jax.lab.train.recipe import Recipe, Stage
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.params import Layer, Params


class TrainState(NamedTuple):
    """The training state that a step changes; `opt_state` is optax's."""

    params: Params
    opt_state: Any


class Trained(NamedTuple):
    """The new state and the metrics: mean losses and accuracies [1 + depth], loads, gradient norm."""

    state: TrainState
    aux: LossFigures
    grad_norm: jax.Array


def make_step(
    recipe: Recipe, stage: Stage, cfg: ModelConfig, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, jax.Array], Trained]:
    """A compiled step(state, tokens [micro_batches, batch, seq_len + 1 + depth]) whose state is donated."""

    def step(state: TrainState, tokens: jax.Array) -> Trained:
        def micro(total: Params, micro_tokens: jax.Array) -> tuple[Params, LossFigures]:
            grads, aux = jax.grad(loss, has_aux=True)(
                state.params,
                cfg,
                micro_tokens,
                recipe.mtp_weight,
                stage.mtp_depth,
                stage.mtp_targets,
                recipe.products,
            )
            return jax.tree.map(lambda a, b: a + b / stage.micro_batches, total, grads), aux

        grads, auxes = jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, state.params), tokens)
        as_tree: Any = state.params  # optax's type for trees knows no dataclasses
        updates, opt_state = optimizer.update(cast(Any, grads), state.opt_state, as_tree)
        loads = tuple(load.sum(0) for load in auxes.loads)
        params = balance(cast(Params, optax.apply_updates(as_tree, updates)), loads, recipe.balance_rate)
        aux = LossFigures(auxes.losses.mean(0), auxes.accuracy.mean(0), loads)
        return Trained(TrainState(params, opt_state), aux, optax.tree.norm(cast(Any, grads)))

    return jax.jit(step, donate_argnums=0)


def balance(params: Params, loads: tuple[jax.Array, ...], rate: float) -> Params:
    """Move each router's selection bias by +-rate towards even loads (DeepSeek-V3 report, section 2.1.2).

    `loads` lists the MoE blocks that ran: the trunk's in order, then the NextN layers'.
    """
    remaining = list(loads)

    def adjusted(layer: Layer) -> Layer:
        if not (moe := layer.moe) or not remaining:
            return layer
        load = remaining.pop(0)
        bias = moe.bias + rate * jnp.sign(load.mean() - load)
        return dataclasses.replace(layer, mlp=dataclasses.replace(moe, bias=bias))

    layers = tuple(adjusted(layer) for layer in params.layers)
    nextn = tuple(dataclasses.replace(p, layer=adjusted(p.layer)) for p in params.nextn)
    return dataclasses.replace(params, layers=layers, nextn=nextn)
