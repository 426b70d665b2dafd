"""The options that commands share: one per field of SamplingParams and per argument of LLM.

Every default is None, "not given", so that the Python API alone decides what an option left out means.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_jax.api.progress import Reporter, Silent, Terminal
from mtp_jax.checkpoint.demo import demo_model
from mtp_jax.commands.parser import Parser, biases, integers, mesh_shape
from mtp_jax.engine.request import SamplingParams
from mtp_jax.errors import ConfigError, RequestError
from mtp_jax.text.grammar import StructuredOutput

if TYPE_CHECKING:
    from mtp_jax.api.llm import LLM

SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "structured",
)
ENGINE = (
    "draft_model",
    "num_speculative_tokens",
    "dtype",
    "max_num_seqs",
    "max_model_len",
    "num_nextn_layers",
    "page_size",
    "num_pages",
    "prefill_chunk",
    "drafting",
    "verifier",
    "prefix_cache",
    "adaptive_depth",
    "kernels",
    "kv_cache_dtype",
    "compile_cache",
)
_NEED_TEMPERATURE = ("top_p", "top_k", "min_p", "seed", "drafting", "verifier")
_NEED_DRAFTS = ("draft_model", "num_nextn_layers", "drafting", "fixed_depth")
_MOST_SLOTS = 8


def add_sampling(parser: Parser, max_tokens: int, several: bool) -> None:
    """Options of SamplingParams; ``several``: those for many completions and for scores, too."""
    parser.set_defaults(default_max_tokens=max_tokens)
    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, metavar="N", help=f"most tokens to generate (default: {max_tokens})")
    add("--temperature", type=float, metavar="T", help="0 takes the most likely token (default: 0)")
    add("--top-p", type=float, metavar="P", help="sample from the likeliest tokens of this total probability")
    add("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    add("--min-p", type=float, metavar="P", help="leave out tokens below this fraction of the likeliest")
    add("--seed", type=int, help="makes sampling reproducible")
    add("--min-tokens", type=int, metavar="N", help="no end of text before this many tokens")
    add("--ignore-eos", action="store_true", default=None, help="go on after the end of the text")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    add("--stop-token-ids", type=integers, metavar="IDS", help="end after one of these tokens: 1,2,3")
    add(
        "--include-stop-str-in-output",
        action="store_true",
        default=None,
        help="show the stop text, too",
    )
    add("--presence-penalty", type=float, metavar="X", help="subtracted for tokens already generated")
    add("--frequency-penalty", type=float, metavar="X", help="subtracted for each time they were generated")
    add(
        "--repetition-penalty", type=float, metavar="X", help="divides logits of tokens seen, prompt included"
    )
    add("--logit-bias", type=biases, metavar="ID:BIAS,...", help="added to the logits of these tokens")
    add(
        "--no-skip-special-tokens",
        dest="skip_special_tokens",
        action="store_false",
        default=None,
        help="show special tokens in the text",
    )
    group = parser.add_argument_group("structured output", "one of these at most")
    shape = group.add_mutually_exclusive_group().add_argument
    shape("--json-schema", metavar="SCHEMA", help="answer with JSON of this JSON Schema: its text, or @FILE")
    shape("--json-object", action="store_true", help="answer with any JSON object")
    shape("--regex", metavar="REGEX", help="answer with text that this expression matches as a whole")
    shape("--choice", action="append", metavar="TEXT", help="answer with one of these texts; repeat it")
    if several:
        add("-n", "--n", type=int, metavar="N", help="completions per prompt (default: 1)")
        add("--logprobs", type=int, metavar="N", help="print log-probabilities, of N alternatives as well")
        add("--prompt-logprobs", type=int, metavar="N", help="the same for the tokens of the prompt")


def add_engine(parser: Parser) -> None:
    """The model and the options of LLM."""
    parser.add_argument(
        "model",
        nargs="?",
        type=Path,
        metavar="MODEL",
        help="directory with config.json and weights (default: the demo model)",
    )
    add = parser.add_argument_group("model and engine").add_argument
    add("--draft-model", type=Path, metavar="DIR", help="NextN layers exported to a directory of their own")
    add("--num-nextn-layers", type=int, metavar="N", help="NextN layers to load (default: all)")
    add("--num-speculative-tokens", type=int, metavar="K", help="most drafts per step (default: 3; 0: off)")
    add(
        "--fixed-depth",
        dest="adaptive_depth",
        action="store_false",
        default=None,
        help="draft as many in every step (default: as many as is fastest, by measurement)",
    )
    add("--drafting", choices=("sampled", "greedy"), help="how drafts are chosen (default: sampled)")
    add(
        "--verifier",
        choices=("block", "rejection", "coupled"),
        help="how drafts are verified (default: block)",
    )
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="of weights and cache (default: auto: float32 on a CPU, the checkpoint's elsewhere)",
    )
    add(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        help="of the cache alone: auto, as --dtype says; fp8, about half of bfloat16's bytes (default: auto)",
    )
    add(
        "--kernels",
        choices=("auto", "xla", "mosaic_gpu"),
        help="GPU kernels: where they fit, none, or nothing else (default: auto)",
    )
    add("--mesh", type=mesh_shape, metavar="DATAxMODEL", help="devices, for example 1x8 (default: one)")
    add("--max-model-len", type=int, metavar="N", help="most tokens of prompt and output")
    add(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="completions at a time (default: as many as asked for, up to 8)",
    )
    add("--page-size", type=int, metavar="N", help="tokens per page of the cache (default: 64)")
    add("--num-pages", type=int, metavar="N", help="pages of the cache (default: enough)")
    add("--prefill-chunk", type=int, metavar="N", help="most prompt tokens at a time (default: 256)")
    add(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        default=None,
        help="do not keep the cache of past prompts",
    )
    cache = parser.add_mutually_exclusive_group()
    cache.add_argument(
        "--compile-cache",
        type=Path,
        metavar="DIR",
        help="keep compiled programs here, whatever JAX_COMPILATION_CACHE_DIR says; nobody else may write "
        "to it (default: ~/.cache/mtp-jax/xla)",
    )
    cache.add_argument("--no-compile-cache", action="store_true", help="compile everything again")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but the result")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the options ask for. Raises RequestError for bad values and for options without effect."""
    args.structured = _structured(args)
    given = {name: value for name in SAMPLING if (value := getattr(args, name, None)) is not None}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": args.default_max_tokens} | given)
    if params.temperature == 0:
        _without_effect(args, _NEED_TEMPERATURE, "at temperature 0; add --temperature 1")
    if params.include_stop_str_in_output and not params.stop_strings:
        _without_effect(args, ("include_stop_str_in_output",), "without --stop; add one")
    return params


def reporter(args: argparse.Namespace) -> Reporter:
    """Where start-up is shown."""
    return Silent() if args.quiet else Terminal()


def open_llm(args: argparse.Namespace, report: Reporter, completions: int) -> "LLM":
    """Load the model with slots for this many completions. Raises ConfigError or CheckpointError.

    The depth is adaptive unless it is fixed: nobody who starts a command should be slower for its drafts.
    """
    if args.num_speculative_tokens == 0:
        # What a seed gives depends on whether the verifier is coupled even where it has no drafts.
        names = _NEED_DRAFTS if args.verifier == "coupled" else (*_NEED_DRAFTS, "verifier")
        _without_effect(args, names, "with --num-speculative-tokens 0; raise that")
    if args.no_compile_cache:
        forget_compile_cache()
    with report.phase("import jax"):
        from mtp_jax.api.llm import LLM
        from mtp_jax.model.sharding import make_mesh

    given: dict[str, Any] = {name: v for name in ENGINE if (v := getattr(args, name)) is not None}
    given.setdefault("adaptive_depth", True)
    data, _ = args.mesh or (1, 1)
    if args.mesh:
        given["mesh"] = make_mesh(*args.mesh)
    if args.no_compile_cache:
        given["compile_cache"] = None
    if args.max_num_seqs is None:
        given["max_num_seqs"] = -(-min(completions, _MOST_SLOTS) // data) * data
    return LLM(args.model, reporter=report, **given)


def forget_compile_cache() -> None:
    """Before JAX is imported, which would use the folder that the environment names."""
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)


def ready(report: Reporter, llm: "LLM") -> None:
    """Say that start-up is over, and what came of it."""
    if not isinstance(report, Terminal):
        return
    engine, c = llm.engine.config, llm.config
    layers = f"{c.num_nextn_predict_layers} NextN layer{'s' if c.num_nextn_predict_layers != 1 else ''}"
    pages = llm.engine.pages * llm.engine.shards
    cache = "FP8 cache" if engine.kv_cache_dtype == "fp8" else "cache"
    report.ready(
        f"{c.num_hidden_layers} layers and {layers} in {engine.dtype}, "
        f"{depth(llm)}, {cache} for {pages * engine.page_size:,} tokens, "
        f"{engine.max_num_seqs} at a time"
    )


def depth(llm: "LLM") -> str:
    """How many drafts a step has: "depth 3" or "depth 0 to 3"."""
    most, adaptive = llm.engine.config.num_speculative_tokens, llm.engine.config.adaptive_depth
    return f"depth 0 to {most}" if adaptive and most else f"depth {most}"


def _structured(args: argparse.Namespace) -> StructuredOutput | None:
    """What the output must be. Raises RequestError."""
    schema = args.json_schema
    if schema is not None and schema.startswith("@"):
        try:
            schema = Path(schema[1:]).read_text()
        except (OSError, UnicodeDecodeError) as e:
            raise RequestError(f"--json-schema {schema}: {e}") from e
    if schema is None and not args.json_object and args.regex is None and args.choice is None:
        return None
    return StructuredOutput(schema, args.json_object, args.regex, args.choice)


def model_dir(args: argparse.Namespace) -> Path:
    """The model's directory. Raises ConfigError if there is none."""
    if args.model is not None and not args.model.is_dir():
        raise ConfigError(f"{args.model} is not a directory; name one with config.json and safetensors")
    return args.model or demo_model()


def _without_effect(args: argparse.Namespace, names: tuple[str, ...], when: str) -> None:
    given = vars(args) | {"fixed_depth": None if args.adaptive_depth is None else True}
    for name in names:
        if given[name] is not None:
            raise RequestError(f"--{name.replace('_', '-')} has no effect {when}, or leave it out")
