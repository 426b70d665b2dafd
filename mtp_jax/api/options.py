"""The options of ``LLM``: the model to load, and the engine's. No jax here: the command line reads them."""

import secrets
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from mtp_jax.api.progress import Reporter
from mtp_jax.engine.config import MODEL, UNDRAFTED, UNSIMULATED, EngineConfig, EngineOptions
from mtp_jax.engine.defaults import Target
from mtp_jax.errors import ConfigError
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.head import Captures
from mtp_jax.model.room import MEMORY_FRACTION
from mtp_jax.options import option

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from mtp_jax.hosts.group import Group

SamplingDefaults = Literal["model", "none"]
LoadFormat = Literal["auto", "dummy", "dummy-instead"]
_SEED_BITS = 63  # bits of the largest seed that the option takes


@dataclass(frozen=True)
class LLMOptions(EngineOptions):
    """Raises ConfigError for a value out of range."""

    model: str | Path | None = option(
        None,
        "directory with config.json and weights, as released or as convert wrote it, the name of a hub's "
        "model, org/name, a GGUF file, or demo, the demo model",
        kind=Path,
        unset="the demo model",
        flag=None,
    )
    _: KW_ONLY
    revision: str | None = option(
        None,
        "branch, tag or commit of a hub's model; every command that takes a model has --revision",
        kind=str,
        unset="main",
        flag=None,
    )
    draft_model: str | Path | None = option(
        None,
        "directory, or the name on a hub, of an EAGLE-3, DFlash, DFlash2 or DSpark head, of a head of "
        "drafter's kind, or of NextN layers exported by themselves",
        kind=Path,
        unset="the model's own",
        metavar="DIR",
        subject=MODEL,
        excludes=UNSIMULATED,
        idle=UNDRAFTED,
    )
    draft_captures: Captures | None = option(
        None,
        "whether the list of layers that a head reads counts their outputs or their inputs",
        choices=get_args(Captures),
        unset="as the kind of head counts",
        subject=MODEL,
        excludes=UNSIMULATED,
        idle=UNDRAFTED,
    )
    drafter: Callable[..., Any] | str | None = option(
        None,
        "the class of a drafter in the place of the model's own, or of a kind of head that draft_model has",
        kind=str,
        unset="the model's own",
        metavar="PACKAGE:CLASS",
        subject=MODEL,
        excludes=UNSIMULATED,
        needs={"num_speculative_tokens": (1, "a step without drafts verifies none")},
    )
    num_nextn_layers: int | None = option(
        None,
        "NextN layers to load",
        kind=int,
        low=0,
        unset="all there are, or none without speculation",
        metavar="N",
        subject=MODEL,
        idle=UNDRAFTED,
    )
    load_format: LoadFormat = option(
        "auto",
        "the checkpoint's weights, or dummy: random weights of the sizes and types that config.json says, "
        "made on the devices, for measurements without a checkpoint, which are marked SYNTHETIC; "
        "dummy-instead: also where the model's folder has weights",
        choices=get_args(LoadFormat),
        subject=MODEL,
        excludes={
            "draft_model": "a head's sizes are in its weights' file",
            **UNSIMULATED,
        },
    )
    mesh: "Mesh | None" = option(
        None,
        "devices: a mesh of make_mesh, such as 1x8",
        kind=object,
        unset="one device",
        metavar="DATAxMODEL",
        subject=MODEL,
        excludes=UNSIMULATED,
    )
    compile_cache: str | Path | None = option(
        "~/.cache/mtp-jax/xla",
        "folder of compiled programs, in place of JAX_COMPILATION_CACHE_DIR; they are trusted, so below a "
        "folder that others may write to they lie in mtp-jax-UID, which is yours alone",
        kind=Path,
        unset="no cache",
        metavar="DIR",
        off=("--no-compile-cache", "compile everything again"),
        subject=MODEL,
    )
    programs: str | Path | None = option(
        None,
        "folder of programs that mtp-jax compile made for these options: nothing is compiled at the start, "
        "options that are not given are taken from there, and another value is refused; the folder is "
        "trusted as a program is: it must be this user's or root's, and not everybody's to write to",
        kind=Path,
        unset="programs are compiled, or found in compile_cache",
        metavar="DIR",
        subject=MODEL,
        excludes={"group": "ranks compile together", **UNSIMULATED},
    )
    chat_template: str | Path | None = option(
        None,
        "file of a chat template in Jinja, in the place of the model's own",
        kind=Path,
        unset="the model's own",
        metavar="FILE",
    )
    sampling_defaults: SamplingDefaults = option(
        "model",
        "temperature, top_p, top_k, min_p, repetition_penalty and most tokens of a chat unless a request "
        "names them: the model's generation_config.json, or none of it",
        choices=get_args(SamplingDefaults),
    )
    group: "Group | None" = option(
        None,
        "the processes that run the engine together: the result of join(Hosts(...))",
        kind=object,
        unset="this process alone",
        flag=None,
        excludes=UNSIMULATED,
    )
    simulate: tuple[float, ...] | None = option(
        None,
        "say words of a hash instead of the model's, with its tokenizer and without its weights: of each "
        "draft the probability that it is kept, given that all earlier drafts were; the last one holds for "
        "all further drafts",
        kind=object,
        unset="the model",
        flag=None,
    )
    simulated_step: float = option(
        0.02, "seconds that a step of a simulated model takes", low=0, high=3600, metavar="S", flag=None
    )
    reporter: Reporter | None = option(
        None, "shows the phases of the start", kind=object, unset="nothing is shown", flag=None
    )

    @property
    def random_weights(self) -> bool:
        """Whether no weights are read: they are random numbers."""
        return self.load_format != "auto"

    def engine(self, model: ModelConfig, on: Target) -> EngineConfig:
        """The engine's options for a model: without "auto", with a seed, with sizes that ``on`` derives.

        Sizes that depend on memory follow once the weights are there (``cache_size``). Raises ConfigError for
        a length beyond the model's positions.
        """
        limit, length = model.max_position_embeddings, self.max_model_len
        if length is not None and length > limit:
            raise ConfigError(f"max_model_len = {length}; the model's positions end at {limit}")
        given: JsonObject = {f.name: getattr(self, f.name) for f in fields(EngineOptions)}
        if length is None:
            given["max_model_len"] = on.length(model)
        if self.max_num_seqs is None:
            given["max_num_seqs"] = on.slots
        if self.prefill_chunk is None:
            given["prefill_chunk"] = on.chunk(model)
        if self.memory_fraction is None and self.num_pages is None and not on.cpu:
            given["memory_fraction"] = MEMORY_FRACTION
        given["num_speculative_tokens"] = self.drafts
        if self.page_size is None:
            given["page_size"] = model.usual_page
        given["draft_vocab"] = None  # its list is a file beside the weights (``api/load.py``)
        given["verifier"] = self.verifier or ("coupled" if self.tree else "block")
        if self.dtype == "auto":
            given["dtype"] = "float32" if on.cpu else model.dtype
        if self.seed is None:
            given["seed"] = secrets.randbits(_SEED_BITS)
        return EngineConfig(**given)
