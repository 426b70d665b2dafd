"""The parameters of draft heads as they are declared."""

from dataclasses import replace

from mtp_jax.model.config import HeadConfig, ModelConfig
from mtp_jax.model.head_config import BlockConfig, Eagle3Config, MedusaConfig, StagesConfig, head_of
from mtp_jax.model.layer_specs import Layer, Weight, block, norm, table
from mtp_jax.model.spec import Spec, parameters
from mtp_jax.model.v4_specs import HyperHead, hyper_head, v4_block, whole


@parameters
class Eagle3:
    """An EAGLE-3 head (arXiv 2503.01840, section 3.1) for a trunk of width D, itself of width d.

    ``embed`` and ``head`` are None where the trunk's serve, ``target_offset`` where head and trunk have one
    vocabulary.
    """

    tap_norms: tuple[Weight, ...]  # [D] of every tap, [taps * D] of all, or none
    fuse: Weight  # [d, taps * D], fc
    hidden_norm: Weight  # [d]
    layer: Layer  # its attention reads 2d values: the normed embedding, the normed hidden state
    norm: Weight  # [d]
    head: Weight  # [v, d], of the head's own vocabulary
    embed: Weight  # [V, d]
    target_offset: Weight  # [v] int32, d2t: token i of the head is token i + d2t[i] of the trunk

    @property
    def merging(self) -> tuple[Weight, ...]:
        """The norms beside the layer that a draft reads."""
        return self.hidden_norm, self.norm

    @property
    def entries(self) -> tuple[Weight, ...]:
        """Parameters that make entries of tokens: the fusion of taps, and latents or keys and values."""
        return *self.tap_norms, self.fuse, self.hidden_norm, *self.layer.entries


@parameters
class Convolution:
    """A grouped causal convolution before a sublayer and one behind it, over t rows of a block (DFlash2).

    The kernel of a row is the base and a part that the row's normed input gives, the same for g channels.
    """

    base: Weight  # [2, t, D]
    projection: Weight  # [2 t D / g, D]


@parameters
class BlockLayer:
    """A layer of a head that drafts blocks."""

    layer: Layer
    attention_conv: Convolution | None
    mlp_conv: Convolution | None


@parameters
class Markov:
    """The bias of a draft's logits by the token before it (DSpark): ``following previous[token]``."""

    previous: Weight  # [V, r], markov_w1
    following: Weight  # [V, r], markov_w2


@parameters
class Confidence:
    """The probability that a draft is accepted, as DSpark's head sees it."""

    weight: Weight  # [1, d] or [1, d + r]
    bias: Weight  # [1]; None in DeepSeek-V4's stages


@parameters
class Selector:
    """The score of a candidate after the token before it (DFlash2)."""

    previous: Weight  # [V, r], predecessor_codebook
    following: Weight  # [V, r], successor_codebook
    hidden: Weight  # [r, d], hidden_projection


@parameters
class BlockHead:
    """A head of width d that drafts a block in one pass, beside a trunk of width D: see ``BlockConfig``.

    ``embed`` is None where the trunk's serves, ``head`` likewise, ``target_offset`` where head and trunk have
    one vocabulary.
    """

    fuse: Weight  # [d, taps * D], fc
    context_norm: Weight  # [d], hidden_norm
    layers: tuple[BlockLayer, ...]
    norm: Weight  # [d]
    markov: Markov | None
    confidence: Confidence | None
    selector: Selector | None
    head: Weight  # [v, d]
    embed: Weight  # [V, d]
    target_offset: Weight  # [v] int32
    hyper_head: HyperHead | None = None  # where layers have several streams

    @property
    def merging(self) -> tuple[object, ...]:
        """The parameters beside the layers that a draft reads, without tables."""
        convolutions = [(each.attention_conv, each.mlp_conv) for each in self.layers]
        return self.norm, self.hyper_head, self.selector and self.selector.hidden, convolutions

    @property
    def entries(self) -> tuple[Weight, ...]:
        """Parameters that make entries of tokens: the fusion of taps, and keys and values of every layer."""
        each = (each.layer.attention.entries for each in self.layers)
        return self.fuse, self.context_norm, *each


@parameters
class MedusaBlock:
    """A residual block of a Medusa head: x + silu(linear(x) + bias). ``bias`` is None where there is none."""

    linear: Weight  # [D, D]
    bias: Weight  # [D]


@parameters
class Medusa:
    """Medusa heads beside a trunk of width D: see ``MedusaConfig``. Each has residual blocks and a table."""

    blocks: tuple[tuple[MedusaBlock, ...], ...]
    tables: tuple[Weight, ...]  # [V, D]

    @property
    def merging(self) -> tuple[MedusaBlock, ...]:
        """The parameters that one draft reads, without its table."""
        return self.blocks[0]

    @property
    def entries(self) -> tuple[Weight, ...]:
        """Nothing is cached."""
        return ()

    @property
    def head(self) -> Weight:
        """The table behind the logits of one draft."""
        return self.tables[0]


DraftHead = Eagle3 | BlockHead | Medusa

DRAFT_HEAD = "draft_head"
"""The prefix, in names here, of the tensors of a draft head."""


def _eagle3(cfg: ModelConfig, e: Eagle3Config) -> Eagle3:
    d, width = e.layer.hidden_size, len(e.taps) * cfg.hidden_size
    one, p = [f"{DRAFT_HEAD}.input_norm.weight"], f"{DRAFT_HEAD}.layers.0"
    each = [f"{DRAFT_HEAD}.fc_norm.{i}.weight" for i in range(e.tap_norms)]
    names, size = (one, width) if e.tap_norms == 1 else (each, cfg.hidden_size)
    return Eagle3(
        tap_norms=tuple(norm(name, size) for name in names if e.tap_norms),
        fuse=_plain("fc.weight", d, width),
        hidden_norm=norm(f"{p}.hidden_norm.weight", d),
        layer=block(e.layer, p, moe=False, indexes=False, inputs=2 * d),
        norm=norm(f"{DRAFT_HEAD}.norm.weight", d),
        head=table(f"{DRAFT_HEAD}.lm_head.weight", e.layer) if e.heads else None,
        embed=_own_embedding(cfg, e, e.layer),
        target_offset=_target_offset(e, e.layer),
    )


def _plain(name: str, *shape: int) -> Spec:
    """A tensor of a head as it is, whole on every device."""
    return whole(f"{DRAFT_HEAD}.{name}", *shape)


def _own_embedding(cfg: ModelConfig, head: HeadConfig, sizes: ModelConfig) -> Spec | None:
    return table(f"{DRAFT_HEAD}.embed_tokens.weight", sizes, cfg.vocab_size) if head.embeds else None


def _target_offset(head: HeadConfig, sizes: ModelConfig) -> Spec | None:
    v = sizes.vocab_size
    return Spec((v,), (None,), f"{DRAFT_HEAD}.d2t", (v,), "zeros", ids=True) if head.maps else None


def _block_head(cfg: ModelConfig, b: BlockConfig) -> BlockHead:
    s, width, vocabulary = b.layers, len(b.taps) * cfg.hidden_size, cfg.vocab_size
    d, p, v, r = s.hidden_size, f"{DRAFT_HEAD}.layers", s.vocab_size, b.markov

    def convolution(name: str) -> Convolution | None:
        if b.convolution is None:
            return None
        taps, group = b.convolution
        rows = 2 * taps * (d // group)
        base, projection = (f"{name}.{part}" for part in ("base_kernel", "kernel_projection.weight"))
        return Convolution(_plain(base, 2, taps, d), _plain(projection, rows, d))

    def layer(i: int) -> BlockLayer:
        own = block(s, f"{p}.{i}", moe=False, indexes=False, inputs=d)
        return BlockLayer(own, convolution(f"layers.{i}.attention_conv"), convolution(f"layers.{i}.mlp_conv"))

    def markov(name: str, rows: int) -> Spec:
        return _plain(f"markov_head.{name}.weight", rows, r)

    confidence = Confidence(
        _plain("confidence_head.proj.weight", 1, d + r * b.markov_confidence),
        replace(_plain("confidence_head.proj.bias", 1), init="zeros"),
    )
    return BlockHead(
        fuse=_plain("fc.weight", d, width),
        context_norm=norm(f"{DRAFT_HEAD}.hidden_norm.weight", d),
        layers=tuple(layer(i) for i in range(s.num_hidden_layers)),
        norm=norm(f"{DRAFT_HEAD}.norm.weight", d),
        markov=Markov(markov("markov_w1", vocabulary), markov("markov_w2", v)) if r else None,
        confidence=confidence if b.confidence else None,
        selector=_selector(b.selector[0], vocabulary, v, d) if b.selector else None,
        head=table(f"{DRAFT_HEAD}.lm_head.weight", s) if b.heads else None,
        embed=_own_embedding(cfg, b, s),
        target_offset=_target_offset(b, s),
    )


def _stages(cfg: ModelConfig, s: StagesConfig) -> BlockHead:
    d, v, r, count = cfg.hidden_size, cfg.vocab_size, s.markov, s.layers.num_hidden_layers
    blocks, last = (v4_block(s.layers, f"mtp.{k}", k) for k in range(count)), f"mtp.{count - 1}"
    markov = (whole(f"{last}.markov_head.{name}.weight", v, r) for name in ("markov_w1", "markov_w2"))
    return BlockHead(
        fuse=whole("mtp.0.main_proj.weight", d, len(s.taps) * d),
        context_norm=norm("mtp.0.main_norm.weight", d),
        layers=tuple(BlockLayer(each, None, None) for each in blocks),
        norm=norm(f"{last}.norm.weight", d),
        markov=Markov(*markov),
        confidence=Confidence(whole(f"{last}.confidence_head.proj.weight", 1, d + r), None),
        selector=None,
        head=None,
        embed=None,
        target_offset=None,
        hyper_head=hyper_head(s.layers, f"{last}."),
    )


def _selector(rank: int, previous: int, following: int, width: int) -> Selector:
    p = "candidate_selector"
    return Selector(
        _plain(f"{p}.predecessor_codebook", previous, rank),
        _plain(f"{p}.successor_codebook", following, rank),
        _plain(f"{p}.hidden_projection.weight", rank, width),
    )


def _medusa(cfg: ModelConfig, m: MedusaConfig) -> Medusa:
    d = cfg.hidden_size

    def block_of(name: str) -> MedusaBlock:
        bias = replace(_plain(f"{name}.bias", d), init="zeros")
        return MedusaBlock(_plain(f"{name}.weight", d, d), bias if m.bias else None)

    heads = range(m.heads)
    blocks = (tuple(block_of(f"blocks.{i}.layers.{j}") for j in range(m.layers)) for i in heads)
    return Medusa(tuple(blocks), tuple(table(f"{DRAFT_HEAD}.lm_heads.{i}.weight", cfg) for i in heads))


def head_specs(cfg: ModelConfig) -> DraftHead | None:
    """The parameters of the head beside a model; None without."""
    head = head_of(cfg)
    if head is None or isinstance(head, Eagle3Config):
        return head and _eagle3(cfg, head)
    if isinstance(head, StagesConfig):
        return _stages(cfg, head)
    return _block_head(cfg, head) if isinstance(head, BlockConfig) else _medusa(cfg, head)
