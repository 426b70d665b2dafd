"""A head that drafts blocks as it is declared: its folder, its sizes, its parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from mtp_jax.errors import ConfigError
from mtp_jax.heads.reading import HeadFile, LayeredHead, flag, said_kinds, taps_of, whole
from mtp_jax.heads.tables import OUT, own_embedding, target_offset
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.head import DRAFT_HEAD, Captures, StoredTensor, plain
from mtp_jax.model.layer_specs import Layer, Weight, block, norm, table
from mtp_jax.model.spec import Spec, parameters
from mtp_jax.model.v4_specs import HyperHead

# Every step computes a block whole, however few drafts are wanted: 16 times DFlash's block of 16.
MOST_ROWS = 256
# Factors that some block drafters have, and the values at which they change nothing.
_NEUTRAL = {"output_multiplier": 1, "input_embedding_scale": 1, "final_logit_softcapping": None}


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
    """DSpark's estimate that a draft is accepted. Nothing here computes it; written heads keep it."""

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
    def blocks(self) -> tuple[Layer, ...]:
        """Its layers."""
        return tuple(each.layer for each in self.layers)

    @property
    def merging(self) -> tuple[object, ...]:
        """The parameters beside the layers that a draft reads, without tables."""
        convolutions = tuple((each.attention_conv, each.mlp_conv) for each in self.layers)
        return self.norm, self.hyper_head, self.selector and self.selector.hidden, convolutions

    @property
    def entries(self) -> tuple[Weight, ...]:
        """Parameters that make entries of tokens: the fusion of taps, and keys and values of every layer."""
        each = (layer.attention.entries for layer in self.blocks)
        return self.fuse, self.context_norm, *each


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LayeredHead):
    """A head that drafts a whole block in one pass: DFlash, DFlash2 or DSpark.

    Attributes:
        layers: sizes of the head's layers; the layers' vocabulary holds the tokens that the head drafts.
        block: number of rows of a block: the newest token, then masks.
        mask: the token id of a mask.
        anchored: ``sample_from_anchor``: row i is draft i + 1, so that there are as many drafts as rows; else
            row 0 is no draft.
        convolution: (taps, channels that share a kernel) of the convolutions around sublayers of DFlash2.
        selector: (rank, candidates) of DFlash2's choice among the best tokens of each row.
        markov: rank of DSpark's bias by the token before; 0: none.
        confidence: whether there is a confidence head. markov_confidence: whether it reads the embedding of
            the token before, too.
        heads: whether it has an output table of its own.
    """

    form = "blocks"
    drafts = "mtp_jax.heads.blocks.drafts:drafter"

    layers: ModelConfig
    block: int
    mask: int
    anchored: bool = False
    convolution: tuple[int, int] | None = None
    selector: tuple[int, int] | None = None
    markov: int = 0
    confidence: bool = False
    markov_confidence: bool = False
    heads: bool = False

    @property
    def name(self) -> str:
        """Its kind."""
        return "DFlash2" if self.selector else "DSpark" if self.markov else "DFlash"

    @property
    def sizes(self) -> ModelConfig:
        """Its layers."""
        return self.layers

    @property
    def most_drafts(self) -> int:
        """Rows that are drafts."""
        return self.block if self.anchored else self.block - 1

    @property
    def rows(self) -> int:
        """All rows of a block."""
        return self.block

    @classmethod
    def read(
        cls,
        raw: JsonObject,
        trunk: ModelConfig,
        tensors: Mapping[str, StoredTensor],
        captures: Captures | None,
    ) -> Self:
        """See ``DraftHead``. captures: None: outputs."""
        file = HeadFile(raw, trunk, tensors)
        layers, said = file.layers(blocks=True), file.said
        for key, neutral in _NEUTRAL.items():
            if said.get(key, neutral) != neutral:
                raise ConfigError(f"{key} = {said[key]!r:.80} of a head is not supported; expected {neutral}")
        kind = said.get("markov_head_type", "vanilla")
        if kind != "vanilla":
            raise ConfigError(f"markov_head_type = {kind!r:.80} is not supported; expected 'vanilla'")
        # A DSpark head drafts from its anchor unless it says otherwise, a DFlash head does not.
        anchored = flag(said, "sample_from_anchor", any("dspark" in kind for kind in said_kinds(said)))
        convolution = selector = None
        if "conv_kernel_size" in said:
            convolution = whole(said, "conv_kernel_size"), whole(said, "conv_group_size")
            if layers.hidden_size % convolution[1]:
                raise ConfigError(
                    f"conv_group_size = {convolution[1]} does not divide {layers.hidden_size} channels"
                )
        if "selector_rank" in said:
            selector = whole(said, "selector_rank"), whole(said, "selector_top_k", 1, layers.vocab_size)
        key = "target_layer_ids" if "target_layer_ids" in said else "aux_hidden_state_layer_ids"
        return cls(
            layers=layers,
            taps=taps_of(said, key, trunk.num_hidden_layers, captures or "outputs"),
            maps=file.maps,
            embeds=file.embeds,
            heads=file.heads,
            block=whole(said, "block_size", 1 if anchored else 2, MOST_ROWS),
            mask=whole(said, "mask_token_id", 0, trunk.vocab_size - 1),  # a token of the model
            anchored=anchored,
            convolution=convolution,
            selector=selector,
            markov=whole(said, "markov_rank", 0) if "markov_rank" in said else 0,
            confidence=flag(said, "enable_confidence_head"),
            markov_confidence=flag(said, "confidence_head_with_markov"),
        )

    def specs(self, trunk: ModelConfig) -> BlockHead:
        """Its parameters."""
        s, width, vocabulary = self.layers, len(self.taps) * trunk.hidden_size, trunk.vocab_size
        d, p, v, r = s.hidden_size, f"{DRAFT_HEAD}.layers", s.vocab_size, self.markov

        def convolution(name: str) -> Convolution | None:
            if self.convolution is None:
                return None
            taps, group = self.convolution
            rows = 2 * taps * (d // group)
            base, projection = (f"{name}.{part}" for part in ("base_kernel", "kernel_projection.weight"))
            return Convolution(plain(base, 2, taps, d), plain(projection, rows, d))

        def layer(i: int) -> BlockLayer:
            own = block(s, f"{p}.{i}", moe=False, indexes=False, inputs=d)
            convolutions = (convolution(f"layers.{i}.{name}_conv") for name in ("attention", "mlp"))
            return BlockLayer(own, *convolutions)

        def markov(name: str, rows: int) -> Spec:
            return plain(f"markov_head.{name}.weight", rows, r)

        confidence = Confidence(
            plain("confidence_head.proj.weight", 1, d + r * self.markov_confidence),
            replace(plain("confidence_head.proj.bias", 1), init="zeros"),
        )
        return BlockHead(
            fuse=plain("fc.weight", d, width),
            context_norm=norm(f"{DRAFT_HEAD}.hidden_norm.weight", d),
            layers=tuple(layer(i) for i in range(s.num_hidden_layers)),
            norm=norm(f"{DRAFT_HEAD}.norm.weight", d),
            markov=Markov(markov("markov_w1", vocabulary), markov("markov_w2", v)) if r else None,
            confidence=confidence if self.confidence else None,
            selector=_selector(self.selector[0], vocabulary, v, d) if self.selector else None,
            head=table(OUT, s) if self.heads else None,
            embed=own_embedding(trunk, self, s),
            target_offset=target_offset(self, s),
        )


def _selector(rank: int, previous: int, following: int, width: int) -> Selector:
    p = "candidate_selector"
    return Selector(
        plain(f"{p}.predecessor_codebook", previous, rank),
        plain(f"{p}.successor_codebook", following, rank),
        plain(f"{p}.hidden_projection.weight", rank, width),
    )
