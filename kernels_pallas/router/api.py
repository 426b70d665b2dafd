"""The function that a model calls."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.grouped_matmul.layout import Groups, OwnGroups, few, group_all
from kernels_pallas.mosaic import WGMMA_ROWS, Interpreter
from kernels_pallas.needs import Implementation
from kernels_pallas.router import mosaic_gpu, reference
from kernels_pallas.router.reference import ROWS
from kernels_pallas.router.rule import Rule

# Most experts that the kernel is compiled for: two registers hold 32 of them.
_MAX_EXPERTS = 512


@struct.dataclass
class ChosenExperts:
    """Experts of each token.

    Attributes:
        ids: int32 ids of the experts, by falling score, the router's bias added; E, which is no expert, for
            tokens that do not count.
        weights: float32.
        counts: int32; choices of each expert by each 4 tokens, for whole blocks of 64; rows past the tokens
            are undefined. None with ``groups``.
        groups: the layout of few tokens' rows by a device's experts.
    """

    ids: Int[Array, "T k"]
    weights: Float[Array, "T k"]
    counts: Int[Array, "b E"] | None
    groups: Groups | None = None


def choose(
    logits: Float[Array, "T E"],
    bias: Float[Array, " E"],
    rule: Rule,
    counted: Bool[Array, " T"] | None = None,
    own: OwnGroups | None = None,
    *,
    implementation: Implementation,
    interpret: Interpreter | None = None,
) -> ChosenExperts:
    """Choose experts by scores of their logits with a bias, from the best groups; the lower id among equals.

    Args:
        logits: float32.
        bias: float32; selects, but does not weigh.
        rule: sizes of the choice.
        counted: whether each token chooses; None: all tokens choose.
        own: a device's experts. The rows of 8 tokens or fewer are laid out by them, for tiles of 64 rows.
        implementation: "mosaic_gpu" needs a Hopper GPU; "xla" is plain jnp.
        interpret: parameters of Pallas' interpreter; None compiles.

    Raises:
        ValueError: inputs that the kernel cannot take.
    """
    tokens, experts = logits.shape
    own = own if few(tokens) else None
    if implementation == "xla":
        ids, weights = reference.choose(logits, bias, rule, counted)
        if own is not None:
            return ChosenExperts(ids, weights, None, group_all(ids - own.first, own.count, WGMMA_ROWS))
        return ChosenExperts(ids, weights, reference.count(ids, experts))
    check(experts, rule)
    mask = jnp.ones(tokens, jnp.int32) if counted is None else counted.astype(jnp.int32)
    if own is None:
        rest = (0, -tokens % ROWS)
        logits, mask = jnp.pad(logits, (rest, (0, 0))), jnp.pad(mask, rest)
    ids, weights, out = mosaic_gpu.choose(logits, bias, mask, own, rule=rule, interpret=interpret)
    counts, groups = (None, out) if isinstance(out, Groups) else (out, None)
    return ChosenExperts(ids.T[:tokens], weights.T[:tokens], counts, groups)


def check(experts: int, rule: Rule) -> None:
    """Refuse inputs that the kernel cannot take, with a ValueError that says so."""
    if experts > _MAX_EXPERTS:
        raise ValueError(f"router on mosaic_gpu: {experts} experts, at most {_MAX_EXPERTS}; use 'xla'")
    if experts // rule.groups % 8:
        raise ValueError(
            f"router on mosaic_gpu: {experts // rule.groups} experts in each group, "
            "must be a multiple of 8; use 'xla'"
        )
