"""`mtp-jax chat`: a conversation in the terminal."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_jax.api.interrupt import interruptible
from mtp_jax.api.introduction import introduction
from mtp_jax.commands import show
from mtp_jax.commands.options import (
    add_engine,
    add_sampling,
    model_dir,
    open_llm,
    ready,
    reporter,
    sampling_params,
)
from mtp_jax.commands.parser import Subparsers
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.errors import RequestError
from mtp_jax.json_object import JsonObject
from mtp_jax.text.thoughts import Thoughts
from mtp_jax.text.tokenizer import FILES as TOKENIZER_FILES
from mtp_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mtp_jax.api.llm import LLM

_HELP = "/reset begins anew, /system TEXT does so with a system message, /exit ends; Ctrl-C stops an answer"
_HISTORY = Path("~/.cache/mtp-jax/chat_history")
_HISTORY_LINES = 1000


def register(subparsers: Subparsers) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model",
        description=f"Talk to a model. {_HELP}.",
        epilog="Example: %(prog)s DIR --temperature 0.6 --system 'Answer briefly.'",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_engine(parser, serves=False)
    add_sampling(parser, max_tokens=512, several=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Chat until the end of the input. Returns the exit status."""
    params = replace(sampling_params(args), stop_in_thoughts=False)
    directory = model_dir(args)
    tokenizer = Tokenizer.from_dir(directory, getattr(args, "chat_template", None))
    if tokenizer is None or not tokenizer.has_chat_template:
        missing = f"no {' or '.join(TOKENIZER_FILES)}" if tokenizer is None else "no chat template"
        raise RequestError(f"{directory} has {missing}, so it cannot chat; use `mtp-jax generate`")
    report = reporter(args)
    llm = open_llm(args, report, 1)
    llm.warm_up(None, params)
    ready(report, llm, args)
    if told := introduction(directory):
        show.note(" Try: ".join((told.about, *told.prompts[:1])))
    if not args.quiet:
        show.note(_HELP)
    _Chat(llm, tokenizer, params, args.system, args.quiet).talk()
    return 0


class _Chat:
    """The conversation so far."""

    def __init__(
        self, llm: "LLM", tokenizer: Tokenizer, params: SamplingParams, system: str | None, quiet: bool
    ) -> None:
        self.llm, self.tokenizer, self.params, self.quiet = llm, tokenizer, params, quiet
        self.system = system
        self.turns: list[JsonObject] = []

    def talk(self) -> None:
        """Read lines until /exit or the end of the input."""
        with _history():
            while (line := _ask()) is not None:
                command, _, rest = line.strip().partition(" ")
                if command == "/exit":
                    return
                if command == "/reset":
                    self.turns.clear()
                elif command == "/system":
                    self.system = rest.strip() or None
                    self.turns.clear()
                elif command.startswith("/"):
                    show.note(_HELP)
                elif line.strip():
                    self._answer(line)

    def _answer(self, line: str) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        turns = [*self.turns, {"role": "user", "content": line}]
        try:
            prompt = self.tokenizer.apply_chat_template([*system, *turns])
            ids = self.tokenizer.encode(prompt, add_special_tokens=False)
            with interruptible() as stopped:  # an exception within a step would lose the engine's state
                output = show.stream(self.llm, ids, self.params, stopped.is_set)
        except RequestError as error:
            show.note(f"error: {error}; /reset starts anew")
            return
        if output is None:
            return
        said = output.outputs[0].text
        splitter = self.tokenizer.thoughts.splitter(Thoughts.opened_by(prompt))
        said = "".join(answer for _, answer in (splitter.push(said), splitter.flush()))  # without its thought
        self.turns = [*turns, {"role": "assistant", "content": said}]
        if not self.quiet:
            show.note(f"[{show.stats(output)}]")


def _ask() -> str | None:
    """Read the next line; None at the end of the input. Ctrl-C empties the line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except KeyboardInterrupt:
            show.note("")
        except EOFError:
            return None


@contextmanager
def _history() -> Iterator[None]:
    """Set up line editing, and a history of lines that lasts across conversations."""
    try:
        import readline
    except ImportError:  # not on every platform
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    file = Path(os.path.expanduser(_HISTORY))
    if not file.is_absolute():  # a user without a home folder
        yield
        return
    with suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        with suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            readline.write_history_file(file)
