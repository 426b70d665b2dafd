"""Sizes and choices of an engine."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from mtp_jax.decode.keys import MAX_DRAFTS, Drafting, TreeShape
from mtp_jax.decode.law import Acceptance, Law
from mtp_jax.errors import ConfigError
from mtp_jax.model.choices import ExchangeChoice, KernelChoice
from mtp_jax.model.config import DEFAULT_PAGE
from mtp_jax.options import check, documented, narrowed, option
from mtp_jax.store.file_tier import FilesOf

# The other one of ``decode.keys.Verifier`` accepts fewer drafts than "block" and is the oracle of the tests.
VerifierChoice = Literal["block", "coupled"]
CacheType = Literal["auto", "fp8"]
# ``num_speculative_tokens`` where it is not given.
DEFAULT_DRAFTS = 3
DtypeChoice = Literal["auto", "float32", "bfloat16"]
Dtype = Literal["float32", "bfloat16"]
MODEL, SPECULATION = "model", "speculation"
"""Subjects of options."""
UNDRAFTED = {"num_speculative_tokens": 0}
"""Company in which options of drafts are idle."""
UNSIMULATED = {"simulate": "a simulated model has no weights and no devices"}
"""Company that options of weights and devices exclude."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine. Raises ConfigError."""

    num_speculative_tokens: int | None = option(
        None,
        "most drafts per step; 0 turns speculation off",
        kind=int,
        low=0,
        high=MAX_DRAFTS,
        unset="3, the nodes of a tree, or 0 where the model has nothing to draft with",
        metavar="K",
        subject=SPECULATION,
    )
    max_num_seqs: int | None = option(
        None,
        "slots: completions at a time",
        kind=int,
        low=1,
        high=4096,
        unset="8, or on a GPU the number for which its memory has room",
        metavar="N",
    )
    max_model_len: int | None = option(
        None,
        "most tokens of prompt and output together",
        kind=int,
        low=2,
        high=2**24,
        unset="the model's own, as far as memory and attention allow",
        metavar="N",
    )
    page_size: int | None = option(
        None,
        "tokens per page of the cache; a multiple of 128 for DeepSeek-V4",
        kind=int,
        low=1,
        high=4096,
        unset="64, or 128 for DeepSeek-V4",
        metavar="N",
    )
    num_pages: int | None = option(
        None,
        "pages of the cache per data shard",
        kind=int,
        low=1,
        high=2**22,
        unset="enough for every slot at max_model_len, if that is given, or on a GPU as memory_fraction says",
        metavar="N",
    )
    memory_fraction: float | None = option(
        None,
        "share of the device's memory that may be taken: the cache gets the part that weights and programs "
        "leave",
        kind=float,
        low=0,
        above=True,
        high=1,
        unset="on a GPU 0.94, unless num_pages is given; else num_pages decides",
        metavar="F",
        excludes={"num_pages": "both say how large the cache is", **UNSIMULATED},
    )
    prefill_chunk: int | None = option(
        None,
        "most prompt tokens that a step takes along",
        kind=int,
        low=1,
        high=2**16,
        unset="256, or on a GPU the number that hides the reading of experts",
        metavar="N",
    )
    prefix_cache: bool = option(
        True,
        "keep the cache pages of past requests for prompts that begin the same",
        off=("--no-prefix-cache", "do not keep the cache pages of past prompts"),
    )
    host_cache_gib: float = option(
        0.0,
        "GiB of the host's memory for pages that the prefix cache has no room for; 0: they are forgotten",
        low=0,
        high=2**20,
        metavar="GIB",
        needs={"prefix_cache": (True, "without prefixes no pages are kept")},
    )
    return_routed_experts: bool = option(
        False,
        "keep the experts that every token chose beside its cache, for requests that ask for them "
        "(routed_experts)",
    )
    file_cache: str | Path | None = option(
        None,
        "folder of files of pages that came to the host's memory, kept over restarts, which servers of one "
        "model may share; a user who may write to it can change answers",
        kind=Path,
        unset="no files",
        metavar="DIR",
        needs={
            "host_cache_gib": (True, "pages pass through the host's memory"),
            "file_cache_gib": (True, "files take room"),
        },
    )
    file_cache_gib: float | None = option(
        None,
        "GiB of all files in file_cache together; the oldest are deleted for new files",
        kind=float,
        low=0,
        above=True,
        high=2**20,
        unset="no files",
        metavar="GIB",
        needs={"file_cache": (True, "it is the size of that folder")},
    )
    file_cache_seconds: float = option(
        10.0,
        "most that a prompt waits for its pages from file_cache; pages that have not come are computed",
        low=0,
        high=600,
        metavar="S",
        needs={"file_cache": (True, "without files nothing is waited for")},
    )
    adaptive_depth: bool = option(
        False,
        "choose the depth of each step by measured speed; num_speculative_tokens is the most",
        off=("--fixed-depth", "always draft K tokens (default: adaptive, the fastest measured depth)"),
        subject=SPECULATION,
        idle=UNDRAFTED,
    )
    adaptive_verification: bool = option(
        False,
        "with adaptive depth: a step may verify, of all rows' drafts, the drafts that are likeliest to be "
        "accepted, as the margins of their logits tell; this takes further programs",
        subject=SPECULATION,
        excludes={"synthetic_acceptance": "a law keeps drafts of one depth"},
        needs={
            "adaptive_depth": (True, "a step of fixed depth verifies all drafts"),
            "num_speculative_tokens": (2, "a step chooses among several drafts of a row"),
            "max_num_seqs": (2, "a step chooses among the drafts of several rows"),
        },
        idle=UNDRAFTED,
    )
    drafting: Drafting = option(
        "sampled",
        "how drafts are chosen when sampling: drawn from the draft distribution or its argmax, both lossless",
        choices=get_args(Drafting),
        subject=SPECULATION,
        idle={"temperature": 0, **UNDRAFTED},
    )
    suffix_drafts: bool = option(
        False,
        "where the last 4 tokens of a request, or more, occurred earlier in its prompt or output, draft the"
        " tokens that followed then, in place of the NextN layers' drafts; for requests that sample, only "
        "where they ask for it or there are no NextN layers",
        subject=SPECULATION,
        excludes=UNSIMULATED,
        needs={"num_speculative_tokens": (1, "a step without drafts verifies none")},
    )
    suffix_store: int = option(
        0,
        "tokens of earlier requests' outputs in which suffix_drafts look for a match, too: of the same "
        "cache_salt alone, of an equal prompt first, then the newest; 0: a request's own text alone",
        low=0,
        high=2**20,
        metavar="N",
        subject=SPECULATION,
        needs={"suffix_drafts": (True, "it is where these find further matches")},
    )
    draft_vocab: int | str | Path | tuple[int, ...] | None = option(
        None,
        "drafts choose among the N commonest tokens, of the list draft_vocab.json in the folder of the NextN "
        "layers or of the model, or among all tokens of another such list; 0: among the whole vocabulary; "
        "verification has every token, so no text changes",
        kind=object,
        unset="the whole list, or the vocabulary where there is none",
        metavar="N|FILE",
        subject=SPECULATION,
        excludes=UNSIMULATED,
        idle=UNDRAFTED,
    )
    verifier: VerifierChoice | None = option(
        None,
        "how drafts are verified when sampling, both lossless: block (arXiv 2403.10444), or coupled "
        "(arXiv 2408.07978), which accepts fewer, and a seed gives one text at every depth",
        kind=str,
        choices=get_args(VerifierChoice),
        unset="block, or coupled for a tree",
        subject=SPECULATION,
        idle={"temperature": 0, **UNDRAFTED},
    )
    tree: str | None = option(
        None,
        "draft trees, from NextN layers or an EAGLE-3 head: TOPK children of a node, STEPS drafts on a way, "
        "the best NODES of all that are found, 31 at most (SGLang's num-draft-tokens is one more); for a "
        "head that takes them: for every node the ranks on its way, as in '[[0], [1], [0, 0]]'",
        kind=str,
        unset="chains",
        metavar="TOPKxSTEPSxNODES|RANKS",
        subject=SPECULATION,
        excludes={
            "synthetic_acceptance": "a law keeps drafts of chains",
            "adaptive_verification": "a ranked step has drafts of chains",
            **UNSIMULATED,
        },
        needs={"verifier": ("coupled", "only coupled verifies trees")},
        idle=UNDRAFTED,
    )
    synthetic_acceptance: Acceptance | None = option(
        None,
        "how many drafts are kept, in the place of the model's verdict, for benchmarks, which are marked "
        "SYNTHETIC: a mean of tokens per step (2.99), the share of steps that keeps each draft "
        "(0.8,0.6,0.4), or a golden length by name (glm-5.2)",
        kind=object,
        unset="the model decides",
        metavar="LENGTH|SHARES|NAME",
        subject=SPECULATION,
        excludes={"suffix_drafts": "a row without a match has no drafts to keep", **UNSIMULATED},
        idle=UNDRAFTED,
    )
    kernels: KernelChoice = option(
        "auto",
        "GPU kernels: where a measured one takes the device and the shapes (auto), none (xla), or nothing "
        "else, which may be an error (mosaic_gpu)",
        choices=get_args(KernelChoice),
        subject=MODEL,
    )
    expert_exchange: ExchangeChoice = option(
        "auto",
        "how rows reach the experts of other data shards: every shard gathers all rows, each row goes to the "
        "shards that have its experts, or auto: that between hosts, and a gather within each",
        choices=get_args(ExchangeChoice),
    )
    expert_room: float = option(
        1.5,
        "rows that such an all-to-all has room for, over the mean of evenly chosen experts; where it has too "
        "little, rows are gathered",
        low=0,
        above=True,
        high=1024,
        metavar="TIMES",
    )
    micro_batches: int = option(
        1,
        "batches that the slots of a step are cut into; with 2 the rows of one travel to their experts while "
        "the other is computed",
        low=1,
        high=2,
        metavar="N",
    )
    redundant_experts: int = option(
        0,
        "copies of the most chosen experts in each MoE layer, to spread their rows over devices",
        low=0,
        high=2**16,
        metavar="N",
        excludes=UNSIMULATED,
    )
    expert_rebalance: int = option(
        1000,
        "launches after which experts are placed anew by how often they were chosen, while serving; 0: never",
        low=0,
        high=2**31,
        metavar="N",
    )
    dtype: DtypeChoice = option(
        "auto",
        "of weights and cache; auto: float32 on a CPU, the checkpoint's elsewhere",
        choices=get_args(DtypeChoice),
        subject=MODEL,
    )
    kv_cache_dtype: CacheType = option(
        "auto",
        "of the cache alone: auto, as dtype says; fp8, latents in e4m3 with a scale per 128 of them, or keys "
        "and values with one per head, about half of bfloat16's bytes",
        choices=get_args(CacheType),
        subject=MODEL,
    )
    seed: int | None = option(
        None,
        "from which requests without a seed get theirs",
        kind=int,
        low=0,
        high=2**63 - 1,
        unset="fresh at every start",
        flag=None,
    )

    def __post_init__(self) -> None:
        check(self, ConfigError)
        _ = self.law  # raises its error
        if self.files:
            self.files.check()
        trees, drafts = self.trees, self.num_speculative_tokens
        if trees and drafts not in (None, trees.nodes):
            raise ConfigError(
                f"num_speculative_tokens = {drafts}, but tree = {self.tree!r} has {trees.nodes} drafts; "
                "leave one of them out"
            )

    @property
    def law(self) -> Law | None:
        """The law of ``synthetic_acceptance``. Raises ConfigError."""
        asked = self.synthetic_acceptance
        return None if asked is None else Law.of(asked, self.drafts)

    @property
    def trees(self) -> TreeShape | None:
        """The sizes of ``tree``. Raises ConfigError."""
        return None if self.tree is None else TreeShape.of(self.tree)

    @property
    def drafts(self) -> int:
        """``num_speculative_tokens``, or its default."""
        default = self.trees.nodes if self.trees else DEFAULT_DRAFTS
        return default if self.num_speculative_tokens is None else self.num_speculative_tokens

    @property
    def files(self) -> FilesOf | None:
        """The tier of files; None: there is none."""
        if self.file_cache is None or self.file_cache_gib is None:
            return None
        folder = Path(self.file_cache).expanduser()
        return FilesOf(folder, int(self.file_cache_gib * 2**30), self.file_cache_seconds)

    @property
    def asks_for_drafts(self) -> bool:
        """Whether an option numbers the drafts, or has no meaning without drafts."""
        asked = self.num_speculative_tokens, self.tree, self.synthetic_acceptance
        return self.suffix_drafts or self.adaptive_verification or asked != (None, None, None)


@documented
@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineOptions):
    """The options of an engine whose model is known. Raises ConfigError."""

    num_speculative_tokens: int = narrowed(EngineOptions, "num_speculative_tokens", DEFAULT_DRAFTS, unset="")
    max_num_seqs: int = narrowed(EngineOptions, "max_num_seqs", 8, unset="")
    max_model_len: int = narrowed(EngineOptions, "max_model_len", 2048, unset="")
    page_size: int = narrowed(EngineOptions, "page_size", DEFAULT_PAGE, unset="")
    prefill_chunk: int = narrowed(EngineOptions, "prefill_chunk", 256, unset="")
    draft_vocab: tuple[int, ...] | None = narrowed(
        EngineOptions,
        "draft_vocab",
        None,
        help="ids of the tokens that drafts choose among, where they share the model's output table",
        unset="all",
    )
    verifier: VerifierChoice = narrowed(EngineOptions, "verifier", "block", unset="")
    dtype: Dtype = narrowed(
        EngineOptions, "dtype", "float32", help="of weights and cache", choices=get_args(Dtype)
    )
    seed: int = narrowed(EngineOptions, "seed", 0, unset="")

    def without_drafts(self) -> "EngineConfig":
        """The same options for an engine that never drafts."""
        return replace(
            self,
            num_speculative_tokens=0,
            suffix_drafts=False,
            suffix_store=0,
            adaptive_verification=False,
            synthetic_acceptance=None,
            tree=None,
            draft_vocab=None,
        )

    @property
    def margins(self) -> bool:
        """Whether results have the margins of drafts, by which a step may rank them."""
        return self.adaptive_verification

    @property
    def columns(self) -> int:
        """Columns of the page table: the pages of the longest request."""
        return self.pages_for(self.max_model_len)

    @property
    def host_cache_bytes(self) -> int:
        """``host_cache_gib`` in bytes."""
        return int(self.host_cache_gib * 2**30)

    @property
    def longest(self) -> int:
        """Most tokens of prompt and output together: max_model_len, or the tokens that the pages hold."""
        if self.num_pages is None:
            return self.max_model_len
        return min(self.max_model_len, self.held(self.num_pages))

    def held(self, pages: int) -> int:
        """Tokens of a request that ``pages`` pages hold, the drafts past its end beside them."""
        return max(pages * self.page_size - self.rows_of(self.num_speculative_tokens), 0)

    def pages_per_shard(self, shards: int) -> int:
        """Cache pages of a data shard: num_pages, or enough for every slot at max_model_len."""
        return self.num_pages or self.max_num_seqs // shards * self.columns

    def pages_for(self, tokens: int) -> int:
        """Pages that a sequence of this many tokens needs, the drafts past its end included."""
        return -(-(tokens + self.rows_of(self.num_speculative_tokens)) // self.page_size)

    def pages_for_step(self, rows: int, depth: int, capacity: int) -> int:
        """Pages that a step of ``depth`` drafts after ``rows`` tokens needs; ``capacity``: all tokens."""
        return min(-(-(rows + self.rows_of(depth)) // self.page_size), self.pages_for(capacity))

    def rows_of(self, depth: int) -> int:
        """Rows of the cache behind a newest token that a step of ``depth`` drafts writes."""
        return max(depth, self.trees.rows) if self.trees and depth > self.trees.steps else depth
