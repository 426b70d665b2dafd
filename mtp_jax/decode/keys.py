"""The host's view of the device: the keys of programs, and the layout of a packed result. No jax here."""

import json
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

from mtp_jax.errors import ConfigError

Drafting = Literal["greedy", "sampled"]
Verifier = Literal["rejection", "block", "coupled"]

# A window has at most 32 tokens: kernels_pallas.mla_decode.visible packs a bit per draft into a word.
MAX_DRAFTS = 31
_TREE = re.compile(r"([0-9]{1,4})x([0-9]{1,4})x([0-9]{1,4})")


NodePath = tuple[int, ...]
"""The way to a node of a tree: its draft is the token of this rank, 0 the likeliest, at each step."""


@dataclass(frozen=True)
class TreeShape:
    """Sizes of the trees that a drafter grows (``drafter/grow.py``), or of the one tree that is given.

    Attributes:
        topk: number of children of a node, and nodes of a step that get children in the next one.
        steps: most drafts on the way to a node.
        nodes: number of drafts of a tree, the best of all that were found.
        ways: the nodes of the tree that is given, parents first; none of trees that grow. topk is the number
            of ranks then.
    """

    topk: int
    steps: int
    nodes: int
    ways: tuple[NodePath, ...] = ()

    @classmethod
    def of(cls, text: str) -> "TreeShape":
        """The sizes in a text like "4x3x12", or the tree in "[[0], [1], [0, 0]]". Raises ConfigError."""
        if str(text).startswith("["):
            return cls._given(text)
        match = _TREE.fullmatch(str(text))
        if match is None:
            raise ConfigError(
                f"tree = {text!r:.80}; expected TOPKxSTEPSxNODES, such as '4x3x12', or lists of ranks, such "
                "as '[[0], [1], [0, 0]]'"
            )
        topk, steps, nodes = map(int, match.groups())
        shape = cls(topk, steps, nodes)
        if shape.topk < 2:
            raise ConfigError(f"tree = {text!r}: one child per node is a chain; use num_speculative_tokens")
        if shape.topk > MAX_DRAFTS:
            raise ConfigError(
                f"tree = {text!r} has {shape.topk} children per node; expected at most {MAX_DRAFTS}, as many "
                "as a window holds"
            )
        if not 0 < shape.rows <= MAX_DRAFTS and shape.steps != 1:
            raise ConfigError(
                f"tree = {text!r} runs the draft layer over {shape.topk} nodes in each of {shape.steps - 1} "
                f"steps; expected 1 step or more, and {MAX_DRAFTS} such nodes at most"
            )
        most = min(MAX_DRAFTS, shape.topk + shape.rows * shape.topk)
        if not shape.steps < shape.nodes <= most:
            raise ConfigError(
                f"tree = {text!r}; expected {shape.steps + 1} to {most} nodes: more than a chain has in "
                f"{shape.steps} steps, and no more than are found or than a window holds"
            )
        return shape

    @classmethod
    def _given(cls, text: str) -> "TreeShape":
        """The tree of a list in JSON, which has the ranks on each node's way, parents first."""
        try:
            ways = [tuple(map(operator.index, way)) for way in json.loads(text)]
        except (ValueError, TypeError, RecursionError) as e:
            raise ConfigError(f"tree = {text!r:.80}; expected lists of ranks in JSON: {e}") from e
        known: set[NodePath] = {()}
        for way in ways:
            if way in known or way[:-1] not in known or not 0 <= min(way) <= max(way) < MAX_DRAFTS:
                raise ConfigError(
                    f"tree = {text!r:.80} has {list(way)}; expected every node once, behind its parent, in "
                    f"ranks from 0 to {MAX_DRAFTS - 1}"
                )
            known.add(way)
        steps = max(map(len, ways), default=0)
        if not steps < len(ways) <= MAX_DRAFTS:
            raise ConfigError(
                f"tree = {text!r:.80} has {len(ways)} nodes; expected {steps + 1} to {MAX_DRAFTS}: more than "
                f"a chain has in {steps} steps, and no more than a window holds"
            )
        return cls(1 + max(map(max, ways)), steps, len(ways), tuple(ways))

    @property
    def kind(self) -> Literal["grown", "given"]:
        """Whether a drafter finds the nodes."""
        return "given" if self.ways else "grown"

    @property
    def rows(self) -> int:
        """Nodes that the drafter itself runs over, behind the newest token."""
        return 0 if self.ways else (self.steps - 1) * self.topk


@dataclass(frozen=True)
class SamplingMode:
    """Static choices of a step. ``drafting`` None: every row is greedy and unadjusted, so argmax decides.

    ``structured``: the step is two programs and takes the masks of grammars.
    """

    drafting: Drafting | None = None
    verifier: Verifier = "rejection"
    logprobs: int | None = None
    structured: bool = False


class Finish(IntEnum):
    """Why a slot switched itself off, in the last column of ``StepResult.packed``."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    NAN = 3


class Origin(IntEnum):
    """The source of a row's drafts: the model's own drafter, a suffix match in the request's text, a drafter
    from outside, or a suffix match in another request's output.
    """

    NEXTN = 0
    SUFFIX = 1
    OTHER = 2
    STORE = 3


# Columns of StepResult.packed after the W tokens.
COUNT, ACCEPTED, DRAFTED, FINISH, SOURCE = range(5)
EXTRA_COLUMNS = 5


@dataclass(frozen=True)
class StepKey:
    """One executable and its number of drafts: windows of slots, a chunk of prompts, or both.

    Attributes:
        slots: number of slots; 0: no windows.
        depth: number of drafts of each slot.
        pages: number of page-table columns.
        mode: static sampling choices.
        tokens: number of tokens of each prompt; 0: no chunk.
        prompts: number of prompts per data shard.
        prompt_logprobs: number of log-probabilities per token of a prompt, besides its own; None: none.
        window: number of drafts that the executable's windows have room for; None: ``depth``.
        kept: number of drafts per slot that are verified, on average over all slots: the likeliest of all
            (see ``ranking``); None: every draft.
    """

    slots: int
    depth: int
    pages: int
    mode: SamplingMode
    tokens: int = 0
    prompts: int = 0
    prompt_logprobs: int | None = None
    window: int | None = None
    kept: int | None = None

    @property
    def room(self) -> int:
        """Drafts that the executable's windows have room for."""
        return self.depth if self.window is None else self.window

    @property
    def program(self) -> "StepKey":
        """The executable's own key: the same for every number of drafts."""
        return self if self.window is None else replace(self, depth=self.window, window=None)

    def at(self, depth: int) -> "StepKey":
        """The key of this executable with ``depth`` drafts, which must be its room at most."""
        return self.program if depth == self.room else replace(self, depth=depth, window=self.room)

    @property
    def bucket(self) -> "StepKey":
        """The key that all ways to do the same work share; the controller keeps costs by it."""
        return replace(self, depth=0, window=None, kept=None)

    @property
    def way(self) -> tuple[int, int]:
        """Drafts made and drafts verified per slot: the two choices that a bucket leaves open."""
        return self.depth, self.depth if self.kept is None else self.kept

    @property
    def plain(self) -> "StepKey":
        """The key of the same step without a chunk."""
        return replace(self, tokens=0, prompts=0, prompt_logprobs=None)

    def covers(self, need: "StepKey") -> bool:
        """Whether this executable can do the work of ``need``.

        A sampling step also serves greedy rows, and a structured step also serves rows without a grammar.

        A step with a chunk does not replace one without: it computes many times the operations.
        """
        own, wanted = self.mode, need.mode
        greedy = wanted.drafting is None
        return (
            self.slots >= need.slots
            and self.tokens >= need.tokens
            and self.prompts >= need.prompts
            and bool(self.tokens) == bool(need.tokens)
            and _width(self.prompt_logprobs) >= _width(need.prompt_logprobs)
            and self.kept == need.kept
            and (self.room >= need.depth if self.kept is None else self.depth == need.depth)
            and self.pages >= need.pages
            and (greedy or (own.drafting, own.verifier) == (wanted.drafting, wanted.verifier))
            and own.structured >= wanted.structured
            and _width(own.logprobs) >= _width(wanted.logprobs)
        )

    @property
    def cost(self) -> tuple[int, ...]:
        """Orders executables that can do the same work."""
        rows = self.slots * ((self.room if self.kept is None else self.kept) + 1) + self.prompts * self.tokens
        scores = _width(self.mode.logprobs), _width(self.prompt_logprobs)
        # Between its two programs a structured step waits for the host.
        return (self.mode.structured, rows, self.pages, self.mode.drafting is not None, *scores)


def cheapest(keys: Iterable["Key"], need: StepKey) -> StepKey | None:
    """The cheapest of these executables that covers ``need``, at its depth; None if there is none."""
    able = (key for key in keys if isinstance(key, StepKey) and key.covers(need))
    found = min(able, key=lambda key: key.cost, default=None)
    return found and found.at(need.depth)


def _width(logprobs: int | None) -> int:
    """The number of log-probabilities that a program gives per token, for sorting; None comes first."""
    return -1 if logprobs is None else logprobs


@dataclass(frozen=True)
class DraftKey:
    """An executable that only drafts, for ``LLM.draft``: depth and page-table columns."""

    depth: int
    pages: int


@dataclass(frozen=True)
class PageKey:
    """Two executables that read and write the contents of ``pages`` pages: ``ReadPages``, ``WritePages``."""

    pages: int


@dataclass(frozen=True)
class ScoreKey:
    """An executable that passes ``sequences`` sequences of ``tokens`` tokens through the model (``Score``).

    Attributes:
        taps: numbers of the residual streams that it returns beside the hidden states.
        logits: whether it also returns logits, and the NextN layers' states and logits.
    """

    sequences: int
    tokens: int
    taps: tuple[int, ...] = ()
    logits: bool = False


Key = StepKey | DraftKey | PageKey | ScoreKey


def name_of(key: Key) -> str:
    """The program's name in HLO and in traces, another for every key: step_b8_k3_t64x4_p16_sampled."""
    if isinstance(key, DraftKey):
        return f"draft_k{key.depth}_p{key.pages}"
    if isinstance(key, PageKey):
        return f"pages_p{key.pages}"
    if isinstance(key, ScoreKey):
        taps = "".join(f"_h{tap}" for tap in key.taps)
        return f"score_b{key.sequences}_t{key.tokens}{taps}{'_logits' * key.logits}"
    windows = f"_b{key.slots}_k{key.room}" if key.slots else ""
    chunk = f"_t{key.tokens}x{key.prompts}" if key.tokens else ""
    windows += "" if key.kept is None else f"_v{key.kept}"
    kind = ("_sampled" if key.mode.drafting else "") + ("_structured" if key.mode.structured else "")
    scores = "" if key.mode.logprobs is None else f"_logprobs{key.mode.logprobs}"
    scores += "" if key.prompt_logprobs is None else f"_prompt{key.prompt_logprobs}"
    return f"{'step' if key.slots else 'prefill'}{windows}{chunk}_p{key.pages}{kind}{scores}"


def buckets(largest: int, smallest: int, factor: int) -> Sequence[int]:
    """``smallest, smallest * factor, ...``, ending at ``largest``."""
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)
