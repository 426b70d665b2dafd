"""`mtp-jax generate`: prompts in, text out."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_jax.api.progress import Reporter
from mtp_jax.commands import show
from mtp_jax.commands.hosts import add_hosts, on_hosts
from mtp_jax.commands.options import (
    add_engine,
    add_sampling,
    model_dir,
    open_llm,
    random_weights,
    ready,
    reporter,
    sampling_params,
)
from mtp_jax.commands.parser import Subparsers, integers, positive
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import ConfigError, RequestError
from mtp_jax.model.hf_config import missing_folder
from mtp_jax.text.tokenizer import FILES as TOKENIZER_FILES

if TYPE_CHECKING:
    from mtp_jax.api.completions import Prompt
    from mtp_jax.api.llm import LLM
    from mtp_jax.api.outputs import RequestOutput
    from mtp_jax.hosts.group import Group

_DESCRIPTION = """\
Complete a prompt, given by -p, -f or standard input. Text goes to standard output as it is generated, numbers
to standard error. A final line end of a file or of standard input is not part of the prompt."""
_USAGE = "%(prog)s [MODEL] [-p TEXT | -f FILE | --token-ids IDS] [options]"


def register(subparsers: Subparsers) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "generate", help="complete prompts", description=_DESCRIPTION, usage=_USAGE
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt")
    source.add_argument("-f", "--file", type=Path, help="read the prompt from a file; - is standard input")
    source.add_argument("--token-ids", type=integers, metavar="IDS", help="the prompt as token ids: 1,2,3")
    parser.add_argument("--lines", action="store_true", help="every line of the input is a prompt of its own")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt instead of text"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="measure the same without speculation beside it: speed and tokens",
    )
    parser.add_argument(
        "--runs",
        type=positive,
        metavar="N",
        help="runs of each side to compare (default: 6, or 15 where they differ in the winner)",
    )
    add_engine(parser, serves=False)
    add_hosts(parser)
    add_sampling(parser, max_tokens=128, several=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate and print. Returns the exit status."""
    if args.model is not None and not args.model.exists() and args.prompt is None:
        raise ConfigError(
            f"{missing_folder(args.model)}; a prompt goes behind -p, as in -p {str(args.model)!r}"
        )
    params = sampling_params(args)
    _check(args, params)
    directory = model_dir(args)
    # Random weights have a stand-in.
    has_tokenizer = random_weights(args) or any((directory / name).exists() for name in TOKENIZER_FILES)
    if not has_tokenizer and (args.token_ids is None or params.stop_strings):
        raise RequestError(
            f"{directory} has no {' or '.join(TOKENIZER_FILES)}; give --token-ids, and no --stop"
        )
    prompts = _prompts(args)
    report = reporter(args)
    completions = 1 if args.compare else len(prompts) * params.n  # at a time

    def lead(group: "Group | None") -> int:
        return _generate(args, open_llm(args, report, completions, group), prompts, params, report)

    return on_hosts(args, report, completions, lead)


def _generate(
    args: argparse.Namespace, llm: "LLM", prompts: "list[Prompt]", params: SamplingParams, report: Reporter
) -> int:
    if args.compare:
        from mtp_jax.commands.compare import compare

        return compare(args, llm, prompts, params, report)
    llm.warm_up(prompts, params)
    ready(report, llm, args)
    if len(prompts) == params.n == 1 and not args.json:
        outputs, numbers = _one(llm, prompts[0], params)
    else:
        outputs, numbers = _many(llm, prompts, params, args.json)
    if not args.quiet:
        show.note(numbers)
    return show.failed(outputs)


def _check(args: argparse.Namespace, params: SamplingParams) -> None:
    if args.lines and (args.prompt is not None or args.token_ids is not None):
        raise RequestError("--lines splits -f FILE or standard input; leave out -p and --token-ids")
    if not args.compare:
        if args.runs is not None:
            raise RequestError("--runs has no effect without --compare; add it, or leave --runs out")
        return
    if getattr(args, "num_speculative_tokens", None) == 0:
        raise RequestError("--compare needs drafts to compare with none: --num-speculative-tokens 1 or more")
    wrong = ["-n"] * (params.n > 1)
    wrong += ["--logprobs"] * (params.logprobs is not None)
    wrong += ["--prompt-logprobs"] * (params.prompt_logprobs is not None)
    wrong += ["--synthetic-acceptance"] * ("synthetic_acceptance" in args)
    wrong += ["--load-format"] * random_weights(args)
    if wrong:
        raise RequestError(
            f"--compare measures one completion at a time, and prints no scores; leave out {wrong[0]}"
        )


def _prompts(args: argparse.Namespace) -> "list[Prompt]":
    if args.prompt is not None:
        return [args.prompt]
    if args.token_ids is not None:
        return [args.token_ids]
    text = _read(args.file).removesuffix("\n").removesuffix("\r")
    if not text:
        raise RequestError(
            "the input is empty; give a prompt with -p, in a file with -f, or on standard input"
        )
    if not args.lines:
        return [text]
    # Not splitlines(): form feeds and Unicode separators belong to the prompts.
    return [line.removesuffix("\r") for line in text.split("\n")]


def _read(file: Path | None) -> str:
    if file is None and sys.stdin.isatty():
        raise RequestError("no prompt; give -p TEXT, -f FILE, or text on standard input")
    stdin = file is None or file == Path("-")
    name = "standard input" if stdin else str(file)
    try:
        data = sys.stdin.buffer.read() if file is None or stdin else file.read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 text: byte {error.start} is wrong; convert it") from error
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror}") from error


def _one(llm: "LLM", prompt: "Prompt", params: SamplingParams) -> "tuple[list[RequestOutput], str]":
    output = show.stream(llm, prompt, params)
    assert output is not None
    if output.prompt_logprobs is not None:
        show.write(f"\nprompt:\n{show.logprob_table(llm, output.prompt_logprobs)}")
    if output.outputs[0].logprobs is not None:
        show.write(f"\noutput:\n{show.logprob_table(llm, list(output.outputs[0].logprobs))}")
    return [output], show.stats(output)


def _many(
    llm: "LLM", prompts: "list[Prompt]", params: SamplingParams, json_lines: bool
) -> "tuple[list[RequestOutput], str]":
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    for i, output in enumerate(outputs, start=1):
        if json_lines:
            show.write(json.dumps(show.as_json(output), ensure_ascii=False) + "\n")
            continue
        if output.prompt_logprobs is not None:
            show.write(f"==> prompt {i}\n{show.logprob_table(llm, output.prompt_logprobs)}")
        for c in output.outputs:
            text = show.visible(llm, c)
            number = f", completion {c.index + 1}" if params.n > 1 else ""
            show.write(f"==> prompt {i}{number}\n{text}{'' if text.endswith(chr(10)) else chr(10)}")
            if c.logprobs is not None:
                show.write(show.logprob_table(llm, list(c.logprobs)))
    return outputs, show.totals(outputs, seconds)
