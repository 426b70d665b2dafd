"""Verifiers of drafts: greedy comparison, rejection sampling, block verification and coupled sampling.

Row b's window holds its newest token and K drafts. `target[b, i]` is the target model's distribution after i
drafts, `draft[b, i]` the full distribution that drafts[b, i] was drawn from (a one-hot for a greedy draft). A
verdict keeps the first `accepted` drafts and adds one token. The emitted tokens have exactly the target's
distribution, however good or bad the drafts.

A row verifies num_drafts[b] <= K drafts. At that depth the draft distribution counts as zero, so the residual
is the target itself and the added token the usual bonus. A broken row ends earlier: before the first draft
whose distribution is NaN or whose id is not a token (a broken drafter costs speed, never the request), and at
the first target distribution that is NaN, from which the token is NO_TOKEN (an error that the host reports).
All of this is known from the tokens before the end, so the guarantee holds.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Key

from mtp_jax.decode.sampling import gumbel_sample, sample
from mtp_jax.decode.tree import along, depths, lineage


class Verdict(struct.PyTreeNode):
    """The outcome of one window per row: the row emits drafts[:accepted] and then `token`."""

    accepted: Int[Array, " B"]  # 0..num_drafts
    token: Int[Array, " B"]  # the correction or the bonus; NO_TOKEN if the target's distribution was NaN
    # Node 0 and the nodes of the accepted drafts in order, then anything; None: a chain's, the first nodes.
    path: Int[Array, "B W"] | None = None


def greedy(
    target_ids: Int[Array, "B W"],
    drafts: Int[Array, "B K"],
    num_drafts: Int[Array, " B"],
    parents: Int[Array, "B K"] | None = None,
) -> Verdict:
    """Keep drafts while they equal target_ids, the target's tokens at their position.

    parents: of a tree, down which this is a ``walk``.
    """
    if parents is not None:
        return walk(target_ids, drafts, num_drafts, parents)
    index = jnp.arange(drafts.shape[1])
    # A draft that is NO_TOKEN never matches, not even a target that is NO_TOKEN too.
    hit = (drafts == target_ids[:, :-1]) & (drafts >= 0) & (index < num_drafts[:, None])
    accepted = _leading(hit)
    return Verdict(accepted, jnp.take_along_axis(target_ids, accepted[:, None], axis=1)[:, 0])


def walk(
    target_ids: Int[Array, "B W"],
    drafts: Int[Array, "B K"],
    num_drafts: Int[Array, " B"],
    parents: Int[Array, "B K"],
) -> Verdict:
    """Walk down a tree (``tree``), from the newest token to the child that is the target's token at its node.

    The walk ends at a node without such a child, with the target's token there. The first of several
    equal children is taken. The emitted tokens are the target's at every node, under any tree.
    """
    bits, index = lineage(parents), jnp.arange(drafts.shape[1])
    hit = (drafts == along(parents, target_ids)) & (drafts >= 0) & (index < num_drafts[:, None])
    first = hit[:, None] & (parents[:, None] == parents[..., None]) & (index < index[:, None])
    hit &= ~first.any(axis=2)
    missed = jnp.sum(jnp.where(hit, 0, 1 << index), axis=1)
    reached, nodes = bits & missed[:, None] == 0, jnp.arange(bits.shape[1])
    here = reached[:, None] & (depths(bits)[:, None] == nodes[:, None])
    path, accepted = jnp.sum(jnp.where(here, nodes, 0), axis=2), jnp.sum(reached, axis=1) - 1
    last = along(accepted[:, None], path)
    return Verdict(accepted, along(last, target_ids)[:, 0], path)


def coupled(
    keys: Key[Array, "B W"],
    target: Float[Array, "B W V"],
    drafts: Int[Array, "B K"],
    num_drafts: Int[Array, " B"],
    parents: Int[Array, "B K"] | None = None,
) -> Verdict:
    """Keep drafts while they equal the target's draws at their position (Gumbel coupling, arXiv 2408.07978).

    keys: keys of the position that each token follows. The emitted tokens are the target's draws with them,
    under any drafts, their number, their law and their tree: a seed gives one text at every depth, 0
    included. Drafts drawn with the same keys (``gumbel_sample``) equal the target's draw with probability
    (1 - d) / (1 + d) or more, d the total variation distance of the two distributions; rejection sampling
    keeps 1 - d of them.
    """
    return greedy(gumbel_sample(keys, target), drafts, num_drafts, parents)


def rejection(
    keys_accept: Key[Array, " B"],
    keys_residual: Key[Array, " B"],
    target: Float[Array, "B W V"],
    draft: Float[Array, "B K V"],
    drafts: Int[Array, "B K"],
    num_drafts: Int[Array, " B"],
) -> Verdict:
    """Token-by-token rejection sampling: arXiv 2211.17192, Algorithm 1.

    Draft x is kept with probability min(1, p(x) / q(x)); after the first refusal the token comes from the
    normalised residual max(p - q, 0).
    """
    depth = _depth(target, draft, drafts, num_drafts)
    p, q = _at(target[:, :-1], drafts), _at(draft, drafts)
    # u q < p rather than u < p / q: no division by zero, and p = 0 is refused for any u.
    hit = (_uniforms(keys_accept, drafts.shape[1]) * q < p) & _before(drafts, depth)
    accepted = _leading(hit)
    one = jnp.ones(accepted.shape, target.dtype)
    return Verdict(accepted, _residual(keys_residual, target, draft, accepted, depth, one))


def block(
    keys_accept: Key[Array, " B"],
    keys_residual: Key[Array, " B"],
    target: Float[Array, "B W V"],
    draft: Float[Array, "B K V"],
    drafts: Int[Array, "B K"],
    num_drafts: Int[Array, " B"],
) -> Verdict:
    """Block verification: arXiv 2403.10444, Algorithm 2. Keeps the longest prefix that passes its test.

    With target M_b, draft M_s, drafts X_1, X_2, ... and p_0 = 1:

        p_i = min(p_{i-1} M_b(X_i) / M_s(X_i), 1)                                      (Algorithm 2, line 4)
        h_i = R_i / (R_i + 1 - p_i),  R_i = sum_x max(p_i M_b(x | X^i) - M_s(x | X^i), 0)       (equation 5)

    The last i with u_i < h_i is accepted, and the token drawn from max(p_i M_b - M_s, 0) (equation 4). A test
    that fails ends nothing. At the row's depth M_s is zero, hence R = p and h = p, the paper's last step.
    Lossless (its Theorem 1), and no valid verifier accepts more on average (Theorem 2), provided no random
    number of the step is ever drawn again: see `row_keys`.
    """
    depth = _depth(target, draft, drafts, num_drafts)
    count = drafts.shape[1]
    p, q = _at(target[:, :-1], drafts), _at(draft, drafts)
    reach = [jnp.ones(drafts.shape[0], target.dtype)]  # p_0 .. p_K
    for i in range(count):
        joint = reach[-1] * p[:, i]
        reach.append(jnp.where(joint > 0, jnp.minimum(joint / q[:, i], 1), 0))
    scale = jnp.stack(reach, 1)
    here = scale[:, 1:]

    excess = jnp.maximum(here[:, :-1, None] * target[:, 1:-1] - draft[:, 1:], 0)
    residual = jnp.pad(jnp.sum(excess, -1), ((0, 0), (0, min(count, 1))))  # unused at i = K
    room = residual + 1 - here
    # room = 0 means p_i = 1 and equal distributions: the next draft has p = 1 too, and passes.
    inner = jnp.where(room > 0, residual / jnp.where(room > 0, room, 1), 1)
    length = jnp.arange(1, count + 1)
    threshold = jnp.where(length < depth[:, None], inner, here)
    passed = (_uniforms(keys_accept, count) < threshold) & _before(drafts, depth)
    accepted = jnp.max(jnp.where(passed, length, 0), axis=1, initial=0)
    scale = jnp.take_along_axis(scale, accepted[:, None], axis=1)[:, 0]
    return Verdict(accepted, _residual(keys_residual, target, draft, accepted, depth, scale))


def _depth(
    target: Float[Array, "B W V"],
    draft: Float[Array, "B K V"],
    drafts: Int[Array, "B K"],
    num_drafts: Int[Array, " B"],
) -> Int[Array, " B"]:
    """Number of drafts that a row can verify: num_drafts, or fewer if a draft or a distribution is broken."""
    # A row of `distribution` is NaN throughout or not at all, so its first entry shows it.
    usable = (drafts >= 0) & ~jnp.isnan(draft[..., 0]) & ~jnp.isnan(target[:, :-1, 0])
    return _leading(usable & _before(drafts, num_drafts))


def _residual(
    keys: Key[Array, " B"],
    target: Float[Array, "B W V"],
    draft: Float[Array, "B K V"],
    accepted: Int[Array, " B"],
    depth: Int[Array, " B"],
    scale: Float[Array, " B"],
) -> Int[Array, " B"]:
    """Draw from max(scale p - q, 0) after the accepted drafts, with q = 0 at the row's depth."""
    p = _row(target, accepted)
    if draft.shape[1] == 0:
        return sample(keys, p)
    q = _row(draft, jnp.minimum(accepted, draft.shape[1] - 1))
    q = jnp.where((accepted < depth)[:, None], q, 0)
    weights = jnp.maximum(scale[:, None] * p - q, 0)
    # Exact arithmetic always leaves some mass here. Rounding can leave none, where p and q all but agree.
    empty = jnp.sum(weights, -1, keepdims=True) == 0
    return sample(keys, jnp.where(empty, p, weights))


def _uniforms(keys: Key[Array, " B"], count: int) -> Float[Array, "B K"]:
    """Numbers in [0, 1). Entry i depends on the key and i alone: the width of the window does not matter."""

    def draw(key: Array, i: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, i))

    return jax.vmap(jax.vmap(draw, (None, 0)), (0, None))(keys, jnp.arange(count))


def _before(drafts: Int[Array, "B K"], depth: Int[Array, " B"]) -> Array:
    return jnp.arange(drafts.shape[1]) < depth[:, None]


def _leading(flags: Array) -> Int[Array, " B"]:
    """How many flags are true before the first false one."""
    count = flags.shape[1]
    return jnp.min(jnp.where(flags, count, jnp.arange(count)), axis=1, initial=count)


def _at(probs: Float[Array, "B K V"], ids: Int[Array, "B K"]) -> Float[Array, "B K"]:
    return jnp.take_along_axis(probs, jnp.maximum(ids, 0)[..., None], axis=-1)[..., 0]


def _row(x: Float[Array, "B n V"], index: Int[Array, " B"]) -> Float[Array, "B V"]:
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]
