"""The options that commands share: options of ``LLM`` and ``SamplingParams``, as these declare them.

The parsed arguments lack options that are not given, so that the Python API alone sets their defaults.
"""

import argparse
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mtp_jax.api.built import adopted
from mtp_jax.api.demo import demo_model
from mtp_jax.api.options import LLMOptions
from mtp_jax.api.progress import Reporter, Silent, Terminal
from mtp_jax.api.sampling_defaults import described, sampling_defaults
from mtp_jax.commands.check_model import check_model
from mtp_jax.commands.parser import (
    Parser,
    acceptance,
    add_model,
    biases,
    draft_vocab,
    integer,
    integers,
    mesh_shape,
    variables,
    words,
)
from mtp_jax.engine.config import MODEL, SPECULATION
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError, RequestError, amount
from mtp_jax.heads.outside import taken_kind
from mtp_jax.json_object import JsonObject
from mtp_jax.model.head import DraftFolder
from mtp_jax.model.hf_config import missing_folder, read_json
from mtp_jax.model.room import MEMORY_FRACTION
from mtp_jax.options import Clash, Described, Option, declared
from mtp_jax.text.grammar import StructuredOutput
from mtp_jax.text.wrong_regex import wrong_regex

if TYPE_CHECKING:
    from mtp_jax.api.llm import LLM
    from mtp_jax.hosts.group import Group

_T = TypeVar("_T")

# Parsers of options whose type does not determine the parser.
_READ = {
    "mesh": mesh_shape,
    "synthetic_acceptance": acceptance,
    "draft_vocab": draft_vocab,
    "logit_bias": biases,
    "stop_token_ids": integers,
    "allowed_token_ids": integers,
    "peers": words,
    "chat_template_kwargs": variables,
}
# The share of a GPU's memory that JAX takes; JAX reads it when it first uses a GPU.
_JAX_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_NOT_OF_CHATS = ("n", "logprobs", "prompt_logprobs", "stop_in_thoughts")
_MOST_SLOTS = 8
# The flag by which a group is joined.
_OTHER_FLAGS = {"group": "--hosts"}
_SWITCHED = re.compile(r"\b([a-z_]+) ?= ?(True|False)\b")
# Not in a path, a quotation or code, nor with a value that no flag has.
_NAME = re.compile(
    r"(?<![\w/.'\"`-])([a-z]+(?:_[a-z]+)+)(?![\w/'\"`(=-]|\.\w| = (?:None|True|False)\b)( = )?"
)


class _Adds(Protocol):
    """A parser, or an argument group of a parser."""

    def add_argument(self, *flags: str, **options: Any) -> argparse.Action:
        """Declare an argument."""
        ...

    def add_mutually_exclusive_group(self) -> "_Adds":
        """A group of which one argument may be given."""
        ...


def add_options(
    to: _Adds, cls: type, names: Iterable[str] | None = None, defaults: Mapping[str, str] | None = None
) -> None:
    """Declare the flags of the options of a dataclass.

    names: the options to add; None: all. defaults: the command's own defaults, for the help.
    """
    for name, about in declared(cls).items():
        if about.flag is not None and (names is None or name in names):
            shown = (defaults or {}).get(name, about.shown_default)
            both = about.off is not None and about.kind is not bool
            _add(to.add_mutually_exclusive_group() if both else to, name, about, shown)


def add_groups(
    parser: Parser,
    cls: type,
    subjects: Sequence[str],
    rest: str,
    defaults: Mapping[str, str] | None = None,
    without: Collection[str] = (),
) -> None:
    """Declare the options of a dataclass in groups by subject; options without a subject go into ``rest``."""
    for subject in (*subjects, ""):
        names = [n for n, about in declared(cls).items() if about.subject == subject and n not in without]
        add_options(parser.add_argument_group(subject or rest), cls, names, defaults)


def _add(to: _Adds, name: str, about: Option, default: str) -> None:
    absent = argparse.SUPPRESS
    if about.off is not None:
        flag, help = about.off
        value = False if about.kind is bool else None
        to.add_argument(flag, action="store_const", const=value, help=help, dest=name, default=absent)
        if about.kind is bool:
            return
    flag = flag_of(name, about)
    if about.kind is bool:
        to.add_argument(flag, action="store_true", help=about.help, dest=name, default=absent)
        return
    more: JsonObject = {"dest": name, "default": absent}
    if about.choices:
        more["choices"] = about.choices
    else:
        kind = integer if about.kind is int else about.kind
        more |= {"type": _READ.get(name, kind), "metavar": about.metavar}
    if about.repeated:
        more["action"] = "append"
    again = "; may be repeated" if about.repeated else ""
    # argparse treats % as a format.
    more["help"] = f"{about.help}{again} (default: {default})".replace("%", "%%")
    to.add_argument(flag, *(["-n"] if name == "n" else []), **more)


def flag_of(name: str, about: Option) -> str:
    """The flag of the command line that changes an option."""
    if about.off is not None and about.kind is bool:
        return about.off[0]
    return about.flag or f"--{name.replace('_', '-')}"


def in_flags(error: Exception, actions: Sequence[argparse.Action]) -> str:
    """The message of an error in the words of the command line. actions: of the parser, for options."""
    told = [a for a in actions if a.default is argparse.SUPPRESS and a.option_strings]
    clash = error.args[0] if error.args else ""
    if isinstance(clash, Clash):
        return clash.told(partial(_said, told))
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    switches = {(a.dest, str(a.const)): _flag(a) for a in told if a.nargs == 0}
    return with_flags(str(error), {a.dest: _flag(a) for a in told if a.nargs != 0}, switches)


def _said(actions: Sequence[argparse.Action], name: str, value: object) -> str | None:
    """The flag that sets an option to a value; None: there is none."""
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    for a in (a for a in actions if a.dest == name):
        if a.nargs != 0 and plain:
            return _flag(a) if isinstance(value, Described) else f"{_flag(a)} {value}"
        if a.nargs == 0 and a.const == value:
            return _flag(a)
    off = next((a for a in actions if a.dest == name), None) if value is None or value is False else None
    return f"no {_flag(off)}" if off else _OTHER_FLAGS.get(name)


def _flag(action: argparse.Action) -> str:
    return next(f for f in action.option_strings if f.startswith("--"))


def with_flags(
    message: str, flags: Mapping[str, str], switches: Mapping[tuple[str, str], str] = MappingProxyType({})
) -> str:
    """A message in the words of the command line: flags for ``page_size = 0`` and ``num_pages``.

    A name of one word stands for an option only where a value follows it. flags: flags of the options that
    have values, by name. switches: flags of the other options, by name and value.
    """

    def flag(match: re.Match[str]) -> str:
        known = flags.get(match[1])
        return match[0] if known is None or match[2] == "None" else f"{known} {match[2]}".rstrip()

    def named(match: re.Match[str]) -> str:
        known = flags.get(match[1])
        return match[0] if known is None else known + (" " if match[2] else "")

    message = re.sub(r"\b([a-z_]+)=(\w*)", flag, message)
    told = re.sub(r"\b([a-z_]+) = (\S+)(?=; expected )", flag, message)
    told = told if told == message else told.replace(" or None", "")
    told = _SWITCHED.sub(lambda match: switches.get((match[1], match[2]), match[0]), told)
    return _NAME.sub(named, told)


def given(args: argparse.Namespace, cls: type) -> JsonObject:
    """The options of a dataclass that the command line has."""
    names = (name for name, about in declared(cls).items() if about.flag is not None and name in args)
    values = ((name, getattr(args, name)) for name in names)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values}


def model_options(args: argparse.Namespace) -> LLMOptions:
    """The options of ``LLM`` without a number of slots. Raises ConfigError."""
    return LLMOptions(**_adaptive(given(args, LLMOptions)))


def _adaptive(found: JsonObject) -> JsonObject:
    """The depth is adaptive unless it is fixed: a forced acceptance length is that of one depth."""
    return {"adaptive_depth": "synthetic_acceptance" not in found, **found}


def chosen(args: argparse.Namespace, cls: type[_T], without: Collection[str] = (), **own: Any) -> _T:
    """Options of a dataclass: from the command line (except ``without``), else ``own``, else defaults."""
    return cls(**own | {name: value for name, value in given(args, cls).items() if name not in without})


def add_head(parser: Parser, help: str) -> None:
    """The options of a draft head, for a command that makes no ``LLM``."""
    parser.add_argument("--draft-model", type=Path, metavar="DIR", help=help)
    add_options(parser, LLMOptions, {"draft_captures", "drafter"})


def draft_folder(args: argparse.Namespace) -> DraftFolder | None:
    """The folder of the options that ``add_head`` declares. Takes the kind of ``--drafter``, if it is given.

    Raises ConfigError.
    """
    found = given(args, LLMOptions)
    taken_kind(found.get("drafter"))
    return DraftFolder.of(args.draft_model, found.get("draft_captures"))


def add_sampling(parser: Parser, max_tokens: int, several: bool) -> None:
    """Declare options of SamplingParams; ``several``: also options for many completions and scores."""
    parser.set_defaults(default_max_tokens=max_tokens)
    names = [name for name in declared(SamplingParams) if several or name not in _NOT_OF_CHATS]
    own = {"max_tokens": f"{max_tokens}", "temperature": "0"}
    add_options(parser.add_argument_group("sampling"), SamplingParams, names, own)
    group = parser.add_argument_group("structured output", "one of these at most")
    shape = group.add_mutually_exclusive_group().add_argument
    shape("--json-schema", metavar="SCHEMA", help="answer with JSON of this JSON Schema: its text, or @FILE")
    shape("--json-object", action="store_true", help="answer with any JSON object")
    shape("--regex", metavar="REGEX", help="answer with text that this expression matches as a whole")
    shape("--choice", action="append", metavar="TEXT", help="answer with one of these texts; repeat it")


def add_engine(
    parser: Parser,
    quiet: str = "print nothing but the result",
    serves: bool = True,
    without: Collection[str] = (),
) -> None:
    """Declare the model and the options of LLM.

    quiet: the help of --quiet. serves: whether completions are not counted before the start. without: options
    that the command does not have.
    """
    add_model(parser, "directory with config.json and weights, or a GGUF file (default: the demo model)")
    parser.add_config()
    usual = declared(LLMOptions)["max_num_seqs"].shown_default
    own = {} if serves else {"max_num_seqs": f"the number asked for, if below {_MOST_SLOTS}; else {usual}"}
    add_groups(parser, LLMOptions, (MODEL, SPECULATION), "engine", own, without)
    parser.add_argument("-q", "--quiet", action="store_true", help=quiet)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Sampling parameters from the options. Raises RequestError for bad values and options without effect."""
    own = {"temperature": 0.0, "max_tokens": args.default_max_tokens, "structured": _structured(args)}
    source = getattr(args, "sampling_defaults", LLMOptions.sampling_defaults)
    of_model = sampling_defaults(args.model or demo_model(), source)
    params = SamplingParams(**own | of_model | given(args, SamplingParams))
    _refuse_idle(args, params)
    return params


def reporter(args: argparse.Namespace) -> Reporter:
    """The reporter that shows start-up, of a command that may be told to be quiet, or not."""
    return Silent() if getattr(args, "quiet", False) else Terminal()


def open_llm(
    args: argparse.Namespace, report: Reporter, completions: int, group: "Group | None" = None
) -> "LLM":
    """Load the model with slots for ``completions`` completions. Raises ConfigError or CheckpointError.

    group: the processes that run it together.
    """
    options = llm_options(args, report, completions)
    from mtp_jax.api.llm import LLM

    return LLM(args.model, group=group, **options)


def llm_options(args: argparse.Namespace, report: Reporter, completions: int) -> JsonObject:
    """The options of ``LLM`` without the model. Imports jax. Raises ConfigError."""
    found = checked_options(args, completions)
    if found.get("compile_cache", "") is None:
        forget_compile_cache()
    # A processor does not read it. Pages of a folder of programs were counted for that share.
    if found.get("num_pages") is None or "programs" in found:
        os.environ.setdefault(_JAX_SHARE, f"{found.get('memory_fraction') or MEMORY_FRACTION:g}")
    with report.phase("import jax"):
        import mtp_jax.api.llm  # noqa: F401
        from mtp_jax.model.sharding import make_mesh

    if "mesh" in found:
        found["mesh"] = make_mesh(*found["mesh"])
    return {**found, "reporter": report}


def checked_options(args: argparse.Namespace, completions: int) -> JsonObject:
    """The same as ``engine_options``, once they fit the model. Raises ConfigError."""
    found = engine_options(args, completions)
    check_model(model_dir(args), found, getattr(args, "hosts", 1))
    return found


def engine_options(args: argparse.Namespace, completions: int) -> JsonObject:
    """The options of ``LLM`` without jax: the mesh is given by its shape. Raises ConfigError.

    The depth is adaptive unless it is fixed: without options no command is slower for its drafts.
    """
    found = adopted(given(args, LLMOptions))  # the options of a folder of programs, if one is named
    found, (data, _) = _adaptive(found), found.get("mesh", (1, 1))
    if completions < _MOST_SLOTS:  # else the device decides
        found.setdefault("max_num_seqs", -(-completions // data) * data)
    if "simulate" in args:  # of `serve` alone: its answers say that they are simulated
        found |= {"simulate": args.simulate, "simulated_step": args.simulated_step}
    # A seed's tokens depend on whether the verifier is coupled even where it has no drafts.
    busy = ("verifier",) if found.get("verifier") == "coupled" else ()
    _refuse_idle(args, LLMOptions(**found), busy)  # refuses values out of range before jax is imported
    return found


def forget_compile_cache() -> None:
    """Hide the environment's compile cache from JAX; call it before JAX is imported."""
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)


def ready(report: Reporter, llm: "LLM", args: argparse.Namespace) -> None:
    """Report that start-up is over, with its figures, and the model's sampling as far as none was given."""
    if not isinstance(report, Terminal):
        return
    engine, c = llm.engine.config, llm.config
    pages = llm.engine.pages * llm.engine.shards
    defaults = {name: value for name, value in llm.sampling_defaults.items() if name not in args}
    cache = "FP8 cache" if engine.kv_cache_dtype == "fp8" else "cache"
    report.ready(
        f"{amount(c.num_hidden_layers, 'layer')} and {drafter(llm)} in {engine.dtype}{of_weights(llm)}, "
        f"{depth(llm)}, {cache} for {pages * engine.page_size:,} tokens, "
        f"{engine.max_num_seqs} at a time{f' ({llm.size.room})' if llm.size.room else ''}"
        + (f"; {described(defaults)}" if defaults else "")
    )


def drafter(llm: "LLM") -> str:
    """The drafter of a model, for people: "1 NextN layer", "a DFlash head"."""
    return (llm.engine.cfg if llm.engine.cfg.drafter else llm.config).drafter_title


def random_weights(args: argparse.Namespace) -> bool:
    """Whether no weights are read: they are random numbers."""
    return getattr(args, "load_format", LLMOptions.load_format) != LLMOptions.load_format


def of_weights(llm: "LLM") -> str:
    """A remark about weights that are no model's; empty otherwise."""
    return " of SYNTHETIC weights" if llm.random_weights else ""


def depth(llm: "LLM") -> str:
    """How many drafts a step has, "depth 3" or "depth 0 to 3", and the law by which they are kept, if any."""
    c = llm.engine.config
    most = c.num_speculative_tokens
    drafts = f"depth 0 to {most}" if c.adaptive_depth and most else f"depth {most}"
    drafts += f" in trees of {c.tree}" if c.tree else ""
    return f"{drafts}, {c.law}" if c.law else drafts


def _structured(args: argparse.Namespace) -> StructuredOutput | None:
    """The structure that the output must have. Raises RequestError."""
    schema = args.json_schema
    if schema is not None and schema.startswith("@"):
        try:
            schema = Path(schema[1:]).read_text()
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
            raise RequestError(f"--json-schema {schema} cannot be read: {reason}; name a JSON file") from e
    if schema is None and not args.json_object and args.regex is None and args.choice is None:
        return None
    if args.regex is not None and (wrong := wrong_regex(args.regex)):
        raise RequestError(f"--regex {args.regex!r}: {wrong}; expected an expression in Rust's syntax")
    return StructuredOutput(schema, args.json_object, args.regex, args.choice)


def served_name(args: argparse.Namespace) -> str:
    """The name of the model for clients: the hub's, or that of its directory. See ``model_dir``."""
    return getattr(args, "hub_name", None) or model_dir(args).resolve().name


def model_dir(args: argparse.Namespace) -> Path:
    """The model's directory. Raises ConfigError if there is none, or no model in it."""
    if args.model is not None and not args.model.is_dir():
        known = ". Only `mtp-jax plan` knows models by name" if len(args.model.parts) == 1 else ""
        raise ConfigError(missing_folder(args.model) + known)
    if args.model is not None:
        read_json(args.model / "config.json")
    return args.model or demo_model()


def _refuse_idle(
    args: argparse.Namespace, values: LLMOptions | SamplingParams, busy: Collection[str] = ()
) -> None:
    """Raises RequestError for a flag that has no effect beside an option of ``values``."""
    known = declared(type(values))
    for name, about in {**declared(LLMOptions), **declared(SamplingParams)}.items():
        for other, off in about.idle.items() if name in args and name not in busy else ():
            if other not in known or getattr(values, other) != off:
                continue
            flag = flag_of(other, known[other])
            beside = f"with {flag} {off}; raise that" if off == 0 else f"without {flag}; add that"
            raise RequestError(f"{flag_of(name, about)} has no effect {beside}, or leave it out")
