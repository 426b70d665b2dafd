"""A model in memory and the runner of its programs: ``LLM`` serves with them, a follower replays on them."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import jax

from mtp_jax import checkpoint
from mtp_jax.api.built import with_adopted
from mtp_jax.api.cache_size import CacheSize, sized
from mtp_jax.api.compile_cache import use_compile_cache
from mtp_jax.api.demo import DEMO, path_of
from mtp_jax.api.local import backend_of, decoding_of
from mtp_jax.api.model_folder import head_folder, model_folder
from mtp_jax.api.options import LLMOptions
from mtp_jax.api.progress import Reporter, Silent
from mtp_jax.api.sampling_defaults import sampling_defaults
from mtp_jax.checkpoint.digest import beside, folder_digest, folder_sizes
from mtp_jax.checkpoint.read import Loaded
from mtp_jax.decode.decoding import Decoding
from mtp_jax.decode.law import MARK
from mtp_jax.engine.config import EngineConfig
from mtp_jax.engine.defaults import Target, told, unasked
from mtp_jax.engine.pages import MOST_PAGES
from mtp_jax.errors import ConfigError
from mtp_jax.heads.outside import Outside, taken
from mtp_jax.hosts.hello import options_of, versions
from mtp_jax.json_object import JsonObject
from mtp_jax.model.config import ModelConfig
from mtp_jax.model.device import multiplies_bf16, platform
from mtp_jax.model.draft_rows import shares_table
from mtp_jax.model.draft_vocab import listed
from mtp_jax.model.expert_slots import with_slots
from mtp_jax.model.family import config_of_file
from mtp_jax.model.head import DraftFolder
from mtp_jax.model.params import Params
from mtp_jax.model.sharding import data_size, with_auto_axes
from mtp_jax.text.stand_in import stand_in
from mtp_jax.text.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class DescribedModel:
    """A model without its weights, and the folders that it is from.

    Attributes:
        sampling: the model's own options of sampling.
        size: the size of the cache.
    """

    config: ModelConfig
    engine: EngineConfig
    tokenizer: Tokenizer | None
    sampling: JsonObject
    folders: tuple[Path, ...]
    size: CacheSize = field(kw_only=True)


@dataclass(frozen=True)
class LoadedModel(DescribedModel):
    """A described model with its parameters on their devices.

    Attributes:
        kept: the folder of kept programs (``decode/kept.py``); None: every program is compiled.
        built: the folder of programs that `mtp-jax compile` made; None: there is none.
    """

    params: Params
    decoding: Decoding
    kept: Path | None
    built: Path | None


def describe_simulated(options: LLMOptions) -> DescribedModel:
    """A model to be simulated. Raises ConfigError."""
    directory = _located(options, options.reporter or Silent(), weights=False)[0]
    tokenizer = Tokenizer.from_dir(directory, options.chat_template)
    config = _with_eos(config_of_file(directory / "config.json"), tokenizer)
    sampling = sampling_defaults(directory, options.sampling_defaults)
    # A simulated cache takes no memory.
    engine, pages = unasked(options.engine(config, Target()), options, 1, lambda: MOST_PAGES)
    size = CacheSize(None, told(engine, options, config, pages))
    return DescribedModel(config, engine, tokenizer, sampling, (directory,), size=size)


def _located(options: LLMOptions, report: Reporter, *, weights: bool = True) -> tuple[Path, ...]:
    """The folders of the model, and of its head where one is named."""
    own = path_of(options.model if options.model is not None else DEMO)
    folder = model_folder(own, report, options.revision, weights=weights and not options.random_weights)
    draft = options.draft_model
    return (folder,) if draft is None else (folder, head_folder(Path(draft), report))


def _with_eos(config: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """The configuration with the tokenizer's end-of-sequence tokens, if it has none of its own."""
    if tokenizer and not config.eos_token_ids:
        return config.with_eos(list(tokenizer.eos_ids))
    return config


def load_model(
    options: LLMOptions, report: Reporter, *, abstract: bool = False, card: int | None = None
) -> LoadedModel:
    """Load the model of the options. Raises ConfigError, CheckpointError.

    abstract: the devices are absent: weights are shapes alone, as config.json announces them, and a folder
    without a tokenizer has the stand-in's programs. card: bytes of memory of such a device; None: unknown.
    """
    folder = use_compile_cache(options.compile_cache)
    options = with_adopted(replace(options, mesh=with_auto_axes(options.mesh)))
    folders = _located(options, report)
    directory = folders[0]
    if options.load_format == "dummy":
        checkpoint.check_no_weights(directory)
    # Everything that can be wrong with the options is found before the weights are read.
    described = config_of_file(directory / "config.json")
    on = backend_of(options, options.mesh)
    reach, unit = on.kind(described).reach(described), data_size(options.mesh) * options.micro_batches
    engine = options.engine(described, Target(platform() == "cpu", reach, unit))
    _check_dtype(engine)
    outside = _outside(options, engine)
    if engine.law:
        _LOG.warning("%s, whatever the model says: for benchmarks alone", engine.law)
    if options.random_weights:
        _LOG.warning("%s weights: random numbers of the types that %s says", MARK, directory / "config.json")
    num_nextn_layers = _nextn_layers(options, engine)
    tokenizer = Tokenizer.from_dir(directory, options.chat_template)
    if (options.random_weights or abstract) and tokenizer is None:
        tokenizer = stand_in(directory, described.vocab_size, options.chat_template)
    sampling = sampling_defaults(directory, options.sampling_defaults)
    engine = _with_draft_vocab(engine, options, folders, described.vocab_size, outside)
    compare_weights = _compare(options, folders, engine, num_nextn_layers)
    loaded = _weights(options, folders, engine.dtype, num_nextn_layers, report, abstract)
    with report.phase("place"):
        jax.block_until_ready(loaded.params)
        config, params = loaded.config, loaded.params
        _check_head(options, config, outside, directory)
        engine = _without_idle_list(engine, options, params)
        del loaded  # so that its weights are freed one by one
        params = on.laid_out(with_slots(params, engine.redundant_experts, options.mesh, consume=True))
    with report.phase("compare"):
        compare_weights()
    config = _with_eos(config, tokenizer)
    drafting = replace(config, drafter=outside) if outside else config
    if not (drafting.drafts or options.asks_for_drafts):
        _LOG.warning("%s has no NextN layers, so no tokens are drafted; a draft_model could", directory.name)
        engine = engine.without_drafts()
    decoding = decoding_of(drafting, engine, on)
    least = options.group.least if options.group else int
    with report.phase("size cache") if engine.memory_fraction is not None else nullcontext():
        engine, size = sized(decoding, params, engine, options, tokenizer is not None, least, card)
    _LOG.info("sizes: %s", size.why)
    kept = folder if _keeps_programs(options) else None
    built = None if options.programs is None else Path(options.programs)
    return LoadedModel(config, engine, tokenizer, sampling, folders, params, decoding, kept, built, size=size)


def _weights(
    options: LLMOptions,
    folders: Sequence[Path],
    dtype: str,
    nextn: int | None,
    report: Reporter,
    abstract: bool,
) -> Loaded:
    """The weights of the folders, or random numbers, or shapes. nextn: NextN layers to load, None: all."""
    directory, draft = folders[0], folders[1] if len(folders) > 1 else None
    if options.random_weights or abstract:
        with report.phase("make weights"):
            return checkpoint.make_random(
                directory,
                dtype=dtype,
                narrow="multiplied",
                mesh=options.mesh,
                num_nextn_layers=nextn,
                abstract=abstract,
            )
    with report.phase("read", "B") as update:
        return checkpoint.load(
            directory,
            DraftFolder.of(draft, options.draft_captures),
            dtype=dtype,
            narrow="multiplied",
            mesh=options.mesh,
            num_nextn_layers=nextn,
            progress=update,
        )


def _keeps_programs(options: LLMOptions) -> bool:
    """Whether programs are kept for later processes.

    Ranks must compile together. A program is loaded without XLA's options, which has been seen to be right on
    a CPU alone, and for the first device.
    """
    alone = options.group is None and jax.config.values["jax_default_device"] is None
    return alone and jax.default_backend() == "cpu"


def _nextn_layers(options: LLMOptions, engine: EngineConfig) -> int | None:
    """NextN layers to load, None: all."""
    if (
        engine.num_speculative_tokens
        or options.draft_model is not None
        or options.num_nextn_layers is not None
    ):
        return options.num_nextn_layers
    return 0  # the folder need not have the layers that its config.json declares


def _check_head(options: LLMOptions, config: ModelConfig, outside: Outside | None, directory: Path) -> None:
    """Raise ConfigError for a kind of head of which the model has none."""
    if options.drafter is not None and outside is None and config.drafter is None:
        raise ConfigError(
            f"drafter = {options.drafter!r:.200} is a kind of head, and {directory} has none; name the "
            "head's folder, draft_model"
        )


def _with_draft_vocab(
    engine: EngineConfig,
    options: LLMOptions,
    folders: tuple[Path, ...],
    vocab: int,
    outside: Outside | None,
) -> EngineConfig:
    """The options with the tokens that drafts choose among. Raises ConfigError for a damaged list.

    outside: a drafter that chooses among all tokens.
    """
    if outside or not engine.num_speculative_tokens:
        return engine
    return replace(engine, draft_vocab=listed(options.draft_vocab, folders, vocab))


def _without_idle_list(engine: EngineConfig, options: LLMOptions, params: Params) -> EngineConfig:
    """Drop the folder's list of tokens where drafts have a table of their own, unless it is asked for."""
    idle = options.draft_vocab is None and not shares_table(params)
    return replace(engine, draft_vocab=None) if idle else engine


def _outside(options: LLMOptions, engine: EngineConfig) -> Outside | None:
    """The drafter from outside; None where ``drafter`` is a kind of head. Raises ConfigError."""
    found = taken(options.drafter)
    if found is not None and options.draft_model is not None:
        raise ConfigError(
            f"draft_model = {options.draft_model} beside drafter = {found.name}, which has no folder; leave "
            "one of them out, or make drafter a kind of head (docs/research.md)"
        )
    if found is not None and options.draft_vocab:
        raise ConfigError(
            f"draft_vocab = {options.draft_vocab!r:.80} beside drafter = {found.name}, which has its own "
            "logits; leave one of them out"
        )
    if found is not None and engine.adaptive_verification:
        raise ConfigError(
            f"adaptive_verification = True beside drafter = {found.name}: drafts are ranked by margins, "
            "which heads and NextN layers alone have; leave one of them out"
        )
    return found


def _check_dtype(engine: EngineConfig) -> None:
    """Raises ConfigError where arithmetic in bfloat16 would take about ten times as long as in float32."""
    if engine.dtype == "bfloat16" and platform() == "cpu" and not multiplies_bf16():
        raise ConfigError(
            "dtype = 'bfloat16': this processor has no matrix instructions for bfloat16 (AMX), and products "
            "would take about ten times as long as in float32; set it to 'auto', which keeps bfloat16 "
            "weights as they are in memory and computes with them in float32"
        )


def _compare(
    options: LLMOptions, folders: tuple[Path, ...], engine: EngineConfig, nextn: int | None
) -> Callable[[], None]:
    """Over several hosts: check that every rank is about to load and compile the same.

    Returns a function that compares every byte of the folders; they are read meanwhile, beside the load. Both
    raise ConfigError, the function CheckpointError, too.
    """
    group = options.group
    if group is None:
        if jax.process_count() > 1:
            raise ConfigError("JAX runs over several processes; give the group that join() made")
        return lambda: None
    mesh, every = options.mesh, jax.devices()
    if mesh is None or mesh.devices.size != len(every):
        shape = None if mesh is None else "x".join(str(n) for n in mesh.devices.shape)
        raise ConfigError(
            f"mesh = {shape}; {group.hosts.hosts} hosts have {len(every)} devices together: give a "
            "mesh of all of them"
        )
    names = ("the checkpoint", "draft_model")[: len(folders)]
    group.compare(
        {
            **versions(),
            "devices": f"{every[0].device_kind}, {len(every)}, {jax.local_device_count()} on each host",
            "mesh": " ".join(f"{name}={n}" for name, n in mesh.shape.items()),
            "options": options_of(asdict(engine)),
            "NextN layers": str(nextn),
            "draft_captures": str(options.draft_captures),
            "drafter": str(options.drafter),
            **{name: folder_sizes(folder) for name, folder in zip(names, folders, strict=True)},
        }
    )
    found = [beside(partial(folder_digest, folder)) for folder in folders]

    def compare_weights() -> None:
        group.compare({f"the bytes of {name}": f.result() for name, f in zip(names, found, strict=True)})

    return compare_weights
