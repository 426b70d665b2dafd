"""Logits to tokens: one set of transforms for plain sampling, for verification and for drafting.

    logits --adjust--> logits --distribution--> probabilities --sample--> tokens

Every parameter is an array with one entry per slot, so requests with different settings share one executable.
No function here sorts the vocabulary, copies to the host, or depends on the contents of other slots.
"""

import functools
from dataclasses import replace
from enum import IntEnum

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from mtp_jax.decode.arrays import SamplingState, TopLogprobs

NO_TOKEN = -1
"""The token of a row that has no distribution: its logits hold NaN or +inf, or every token is masked."""


# Declared without jax, which flax imports: not by `flax.struct`.
jax.tree_util.register_dataclass(SamplingState)
jax.tree_util.register_dataclass(TopLogprobs)


class Purpose(IntEnum):
    """Purposes of random numbers; see `row_keys`. DRAFT is last: draft i of a step uses DRAFT + i.

    SAMPLE: the token after a position, drawn by the target or by a drafter.
    """

    SAMPLE = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def neutral_state(slots: int, vocab: int) -> SamplingState:
    """The state that changes nothing: temperature 1, every transform off, no output yet."""
    return SamplingState(
        temperature=jnp.ones(slots, jnp.float32),
        top_k=jnp.zeros(slots, jnp.int32),
        top_p=jnp.ones(slots, jnp.float32),
        min_p=jnp.zeros(slots, jnp.float32),
        presence=jnp.zeros(slots, jnp.float32),
        frequency=jnp.zeros(slots, jnp.float32),
        repetition=jnp.ones(slots, jnp.float32),
        min_tokens=jnp.zeros(slots, jnp.int32),
        seed=jnp.zeros(slots, jnp.uint32),
        logit_bias=jnp.zeros((slots, vocab), jnp.float32),
        stop_mask=jnp.zeros((slots, vocab), bool),
        prompt_mask=jnp.zeros((slots, vocab), bool),
        counts=jnp.zeros((slots, vocab), jnp.int32),
    )


def count_tokens(s: SamplingState, tokens: Int[Array, "B W"]) -> SamplingState:
    """The state with the emitted tokens (-1: none) added to the output counts."""
    vocab = s.counts.shape[1]
    row = jnp.arange(tokens.shape[0])[:, None]
    counts = s.counts.at[row, jnp.where(tokens < 0, vocab, tokens)].add(1, mode="drop")
    return replace(s, counts=counts)


def window_counts(
    counts: Int[Array, "B V"],
    tokens: Int[Array, "B W"],
    position: Int[Array, " n"] | None = None,
    lineage: Int[Array, "B n"] | None = None,
) -> Int[Array, "B n V"]:
    """The output counts at these positions of a window, as without speculation; None: all positions.

    `counts` already holds tokens[:, 0], the slot's newest token; position i adds tokens[:, 1..i], the drafts
    it is conditioned on. Penalties therefore evolve inside the window exactly as they do token by token.
    lineage: n nodes of a tree, see ``tree.lineage``: a node adds the drafts on the way to it.
    """
    width = tokens.shape[1] if lineage is None else lineage.shape[1]
    position = (jnp.arange(width) if position is None else position)[:, None]
    ids = jnp.arange(counts.shape[1], dtype=tokens.dtype)
    seen = counts[:, None] + jnp.zeros_like(position)
    for i in range(1, tokens.shape[1]):  # elementwise, so that it fuses with its reader
        before = position >= i if lineage is None else (lineage[..., None] >> (i - 1) & 1).astype(bool)
        seen += (tokens[:, i, None, None] == ids) & before
    return seen


@jax.named_scope("sample")
def adjust(
    logits: Float[Array, "B W V"],
    s: SamplingState,
    counts: Int[Array, "B W V"],
    generated: Int[Array, "#B W"],
    allowed: UInt32[Array, "B W words"] | None = None,
) -> Float[Array, "B W V"]:
    """Logits as a request changes them, in vLLM's order: bias, stop tokens, repetition, frequency, presence.

    logits: float32. counts: see `window_counts`. generated: output tokens before the one predicted here;
    stop tokens are -inf where it is below min_tokens. Repetition divides positive logits and multiplies the
    rest, as in Hugging Face and vLLM. allowed: see `restrict`. Neutral parameters change no logit, and NaN
    stays NaN.
    """
    # Every transform is elementwise, and all fuse into one pass, so a lax.cond would cost more than it saves.
    bias, stop, prompt = s.logit_bias[:, None], s.stop_mask[:, None], s.prompt_mask[:, None]
    presence, frequency, repetition = (x[:, None, None] for x in (s.presence, s.frequency, s.repetition))
    early = (generated < s.min_tokens[:, None])[..., None]
    seen = counts > 0

    logits = jnp.where(stop & early, -jnp.inf, logits + bias)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen | prompt, repeated, logits)
    return restrict(logits - frequency * counts - presence * seen, allowed)


def restrict(
    logits: Float[Array, "B W V"], allowed: UInt32[Array, "B W words"] | None
) -> Float[Array, "B W V"]:
    """-inf where a grammar forbids token t: where bit t % 32 of word t // 32 is clear. None: no change."""
    if allowed is None:
        return logits
    bits = allowed[..., None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    bits = bits.reshape(*allowed.shape[:-1], -1)[..., : logits.shape[-1]]
    return logits + jnp.where(bits == 1, 0, -jnp.inf)  # a sum, so that NaN stays NaN


def permits(allowed: UInt32[Array, "B W words"] | None, tokens: Int[Array, "B K"]) -> Bool[Array, " B"]:
    """Whether a grammar allows all K tokens of a row, at the first K positions (see ``restrict``).

    Negative numbers are no tokens, and allowed.
    """
    if allowed is None:
        return jnp.ones(tokens.shape[0], bool)
    words = jnp.take_along_axis(allowed[:, : tokens.shape[1]], (tokens // 32)[..., None], axis=2)[..., 0]
    return ((words >> (tokens % 32).astype(jnp.uint32) & 1 == 1) | (tokens < 0)).all(axis=1)


@jax.named_scope("sample")
def argmax(logits: Float[Array, "*b V"]) -> Int[Array, "*b"]:
    """The lowest id at the largest logit, int32; some id for a row of NaN.

    Not jnp.argmax: two plain reductions are several times faster on a CPU.
    """
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    at_top = jnp.where(logits == jnp.max(logits, -1, keepdims=True), ids, logits.shape[-1] - 1)
    return jnp.min(at_top, -1)


def all_finite(logits: Float[Array, "*b V"]) -> Bool[Array, "*b"]:
    """Whether rows hold neither NaN nor an infinity: by one sum of x - x, which is 0 for finite x alone.

    A maximum does not serve, as on a CPU it may ignore NaN.
    """
    return jnp.sum(logits - logits, -1) == 0


@jax.named_scope("sample")
def likeliest(logits: Float[Array, "*b V"]) -> Int[Array, "*b"]:
    """``argmax``; NO_TOKEN for a row without a distribution."""
    # NaN or +inf makes the sum NaN; the largest logit is -inf where every token is masked.
    off = jnp.sum(jnp.where(logits == -jnp.inf, 0, logits - logits), -1)
    return jnp.where((off == 0) & (jnp.max(logits, -1) > -jnp.inf), argmax(logits), NO_TOKEN)


def draws(s: SamplingState) -> Bool[Array, ""]:
    """Whether any row samples. Where none does, ``likeliest`` is the whole result."""
    return jnp.any(s.temperature > 0)


@jax.named_scope("sample")
def point_mass(logits: Float[Array, "B W V"]) -> Float[Array, "B W V"]:
    """``distribution`` at temperature 0, under any options of the rows."""
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    token = likeliest(logits)[..., None]
    return jnp.where(token == NO_TOKEN, jnp.nan, (ids == token).astype(logits.dtype))


@jax.named_scope("sample")
def distribution(logits: Float[Array, "B W V"], s: SamplingState) -> Float[Array, "B W V"]:
    """The probabilities tokens are drawn from: temperature, then min_p, then top_k, then top_p, as vLLM does.

    logits: float32, adjusted; -inf masks a token. Temperature 0 gives a one-hot at the largest logit, the
    lowest id among equals. A token survives top_k while fewer than top_k tokens lie strictly above it, and
    top_p while such tokens hold less than top_p of the mass; so ties at the boundary are all kept, under any
    ids. A row that holds NaN or +inf, or nothing but -inf, comes back as NaN throughout.
    """
    top = jnp.max(logits, -1, keepdims=True)
    sampled = (s.temperature > 0)[:, None, None]
    # The largest logit becomes 0 before the division: no temperature can overflow it.
    scaled = (logits - top) / jnp.where(sampled, s.temperature[:, None, None], 1)
    # NaN is not less than the limit, so it stays, and the sum is NaN: a broken row must stay visibly broken.
    weights = jnp.where(scaled < _least(scaled, s), 0, jnp.exp(scaled))
    total = jnp.sum(weights, -1, keepdims=True)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    one_hot = (ids == argmax(logits)[..., None]).astype(logits.dtype)
    return jnp.where(jnp.isnan(total), jnp.nan, jnp.where(sampled, weights / total, one_hot))


def _least(scaled: Float[Array, "B W V"], s: SamplingState) -> Float[Array, "B W one"]:
    """The least logit that survives min_p, top_k and top_p; the largest logit is 0.

    One number per row: a branch that runs only if some row asks for it returns no copy of the vocabulary. One
    loop, so that there are kernels for one search: round 0 truncates by top_k, round 1 by top_p.
    """
    sampled = s.temperature > 0
    by_k, by_p = sampled & (s.top_k > 0), sampled & (s.top_p < 1)
    # Rows without truncation keep every token, as their limit is infinite.
    most = jnp.where(by_k, s.top_k, jnp.inf).astype(scaled.dtype)[:, None, None]
    share = jnp.where(by_p, s.top_p, jnp.inf)[:, None, None]

    def truncated(i: Array, least: Array) -> Array:
        weights = jnp.where(i == 0, 1, jnp.where(scaled >= least, jnp.exp(scaled), 0))
        mass = share * jnp.sum(weights, -1, keepdims=True)
        # The limit is positive, so the most likely token always stays.
        limit = jnp.where(i == 0, most, jnp.maximum(mass, jnp.finfo(scaled.dtype).tiny))
        return jnp.maximum(least, _boundary(scaled, weights, limit))

    least = jnp.broadcast_to(jnp.log(s.min_p)[:, None, None], (*scaled.shape[:-1], 1))
    first, end = jnp.where(jnp.any(by_k), 0, 1), jnp.where(jnp.any(by_p), 2, 1)
    return lax.fori_loop(first, end, truncated, least)


def _boundary(
    x: Float[Array, "B W V"], weights: Float[Array, "B W V"], limit: Float[Array, "B W one"]
) -> Float[Array, "B W one"]:
    """The smallest element of x with less than `limit` of `weights` strictly above it; -inf: every element.

    The bits of its key are fixed one by one from the highest: exact, without sorting, in 32 passes of compare
    and sum.
    """
    keys = _sortable(x)

    def fix_bit(i: Array, t: Array) -> Array:
        bit = jnp.uint32(1) << (31 - i).astype(jnp.uint32)
        trial = t | (bit - 1)  # the largest threshold with this bit clear
        above = jnp.sum(jnp.where(keys > trial, weights, 0), -1, keepdims=True)
        return jnp.where(above < limit, t, t | bit)

    key = lax.fori_loop(0, 32, fix_bit, jnp.zeros((*x.shape[:-1], 1), jnp.uint32))
    return _unsortable(jnp.maximum(key, _sortable(jnp.float32(-jnp.inf))))


def _sortable(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Integers in the order of the float32 values: all bits of negatives flipped, else only the sign bit."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0.0 and 0.0 are one value
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _unsortable(keys: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """The inverse of ``_sortable``."""
    bits = jnp.where(keys >> 31 == 1, keys ^ jnp.uint32(1 << 31), ~keys)
    return lax.bitcast_convert_type(bits, jnp.float32)


def row_keys(
    seed: UInt32[Array, " B"], position: Int[Array, " B"], purpose: Int[Array, ""] | int
) -> Key[Array, " B"]:
    """One key per row that depends on (seed, position, purpose) only, never on slot, batch or depth.

    position: the slot's committed length when its drafting starts. All random numbers of a step share this
    position, and purpose DRAFT + i distinguishes draft i. If drafts had keys by their own position, the next
    step would draw the same numbers again, and block verification has conditioned on them by then: the output
    would be biased. Coupled verification alone uses each token's own position, as it conditions on nothing.
    """

    def key(row_seed: Array, row_position: Array) -> Array:
        # Named, because the default can be set to a generator whose rows are not independent under vmap.
        root = jax.random.key(row_seed, impl="threefry2x32")
        return jax.random.fold_in(jax.random.fold_in(root, row_position), purpose)

    return jax.vmap(key)(seed, position)


@jax.named_scope("sample")
def sample(keys: Key[Array, " B"], probs: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Draw one token per row by inverting the cumulative distribution; probs need not be normalised.

    Never returns a token of probability 0. A row with NaN, or without any mass, returns NO_TOKEN.
    """
    rows, vocab = probs.shape
    width = 1 << (vocab.bit_length() + 1) // 2
    # First a block of about sqrt(V) tokens, then a token inside: short cumulative sums round less, two
    # numbers resolve smaller probabilities than one, and the vocabulary is read once.
    blocks = jnp.pad(probs, ((0, 0), (0, -vocab % width))).reshape(rows, -1, width)
    mass = jnp.sum(blocks, -1)
    u = jax.vmap(functools.partial(jax.random.uniform, shape=(2,)))(keys)
    block = _invert(u[:, 0], mass)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token = block * width + _invert(u[:, 1], inside)
    return jnp.where(jnp.sum(mass, -1) > 0, token, NO_TOKEN).astype(jnp.int32)


@jax.named_scope("sample")
def gumbel_sample(keys: Key[Array, "*b"], probs: Float[Array, "*b V"]) -> Int[Array, "*b"]:
    """Draw one token per row as the argmax of log p + Gumbel noise that depends on the key and the id alone.

    Draws from two distributions with one key agree with at least the probability (1 - d) / (1 + d) (see
    ``coupled``). Never a token of probability 0. A row with NaN, or without any mass, returns NO_TOKEN.
    It costs more than ``sample``: a random number per token of the vocabulary.
    """
    scores = perturbed(keys, probs)
    return jnp.where(jnp.max(scores, -1) > -jnp.inf, argmax(scores), NO_TOKEN)


def perturbed(keys: Key[Array, "*b"], probs: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
    """Log p + Gumbel noise: the largest is the token that ``gumbel_sample`` draws."""
    shape = (probs.shape[-1],)

    def noise(key: Array) -> Array:
        # "high": the largest of many draws decides, where a single word resolves too little.
        return jax.random.gumbel(key, shape, probs.dtype, mode="high")

    return jnp.log(probs) + jax.vmap(noise)(keys.reshape(-1)).reshape(probs.shape)


def _invert(u: Float[Array, " B"], weights: Float[Array, "B n"]) -> Int[Array, " B"]:
    cumulative = jnp.cumsum(weights, -1)
    # A parallel prefix sum may rise by a rounding error where the weight is 0, hence the second condition.
    hit = (cumulative > u[:, None] * cumulative[:, -1:]) & (weights > 0)
    first = jnp.min(jnp.where(hit, lax.broadcasted_iota(jnp.int32, hit.shape, 1), hit.shape[1]), -1)
    return jnp.where(first < hit.shape[1], first, argmax(weights))


@jax.named_scope("logprobs")
def top_logprobs(logits: Float[Array, "B W V"], chosen: Int[Array, "B W"], n: int) -> TopLogprobs:
    """The model's own log-probabilities: pass the logits from before `adjust`, like vLLM's raw_logprobs.

    n: static; a smaller vocabulary gives all its tokens. Results where `chosen` is negative have no meaning.
    """
    log_total = jax.nn.logsumexp(logits, -1, keepdims=True)
    values, ids = lax.top_k(logits, min(n, logits.shape[-1]))
    at = jnp.take_along_axis(logits, jnp.maximum(chosen, 0)[..., None], axis=-1)
    rank = jnp.sum(logits >= at, -1, dtype=jnp.int32)
    return TopLogprobs((at - log_total)[..., 0], rank, ids.astype(jnp.int32), values - log_total)
