"""`mtp-jax batch`: a file of requests in OpenAI's batch format, answered as the server would."""

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_jax.commands import show
from mtp_jax.commands.options import (
    add_engine,
    add_options,
    chosen,
    model_options,
    open_llm,
    reporter,
    served_name,
)
from mtp_jax.commands.parser import Subparsers, positive
from mtp_jax.errors import EngineStopped, RequestError, amount
from serve.base.settings import Settings
from serve.http.in_process import Answer, post

if TYPE_CHECKING:
    from mtp_jax.api.async_llm import AsyncLLM
    from mtp_jax.api.progress import Reporter
    from mtp_jax.commands.batch_file import Counts

SLOTS = 8
"""``max_num_seqs`` of an engine, unless the command line gives another."""
_RETRY_SECONDS = 1.0
_DESCRIPTION = """\
Answer every request of IN, a file in OpenAI's batch format: lines such as {"custom_id": "a", "method":
"POST", "url": "/v1/chat/completions", "body": {...}}. Answers are appended to OUT as they come. Run it again
to go on with what an interrupted run left."""


def register(subparsers: Subparsers) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "batch",
        help="answer a file of requests",
        description=_DESCRIPTION,
        usage="%(prog)s IN OUT [MODEL] [options]",
    )
    parser.add_argument("source", type=Path, metavar="IN", help="JSON lines")
    parser.add_argument("target", type=Path, metavar="OUT", help="JSON lines; appended to")
    add_engine(parser)
    add_options(
        parser,
        Settings,
        ("model_names", "strict", "chat_template_kwargs"),
        {"model_names": "its folder's name"},
    )
    parser.add_argument(
        "--in-flight",
        type=positive,
        metavar="N",
        help="requests in memory, or in a batch of --ray (default: two per slot, or eight)",
    )
    parser.add_argument(
        "--retry-failed",
        action="store_true",
        help="ask again what OUT says was refused with status 408, 429 or 5xx, and replace its lines",
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class BatchWork:
    """Lines of a file to answer.

    Attributes:
        args: the command line.
        settings: settings of the server that answers.
        lines: number of lines without an answer.
        counts: counts the lines.
        report: shows the phases, and the number of answered lines.
    """

    args: argparse.Namespace
    settings: Settings
    lines: int
    counts: "Counts"
    report: "Reporter"


def run(args: argparse.Namespace, answer: "Callable[[BatchWork], str] | None" = None) -> int:
    """Answer the file. Returns the exit status: 1 if a line failed in this run or an earlier one.

    answer: answers the lines and returns a summary; None: an engine in this process does.
    """
    from mtp_jax.commands import batch_file

    for path in (args.source, args.target):
        if path.exists() and not path.is_file():
            raise RequestError(
                f"{path} is not a file; IN and OUT are read more than once, so no pipe will do"
            )
    if args.target.exists() and args.target.samefile(args.source):
        raise RequestError(f"{args.target} is the input; name another file for the answers")
    # Faults of the files, and an already finished batch, are reported before the model is loaded.
    lines, before = batch_file.already(args.source, args.target)
    if args.retry_failed and batch_file.forget_refused(args.target):
        lines, before = batch_file.already(args.source, args.target)
    name = served_name(args)
    settings = chosen(args, Settings, model_names=name, max_body_bytes=batch_file.MAX_BODY_BYTES)
    if before.done == lines:
        return _end(args, _done(before), before)
    if before.done and not args.quiet:
        show.note(f"{before.done} of {amount(lines, 'request')} done before")
    counts = batch_file.Counts()
    try:
        work = BatchWork(args, settings, lines - before.done, counts, reporter(args))
        return _end(args, (answer or _answer_here)(work), counts)
    except KeyboardInterrupt:
        if not args.quiet:
            done = before.done + counts.answered
            show.note(f"{done} of {amount(lines, 'request')} done; run the same command again to go on")
        raise


def _answer_here(work: BatchWork) -> str:
    """Answer the lines by an engine in this process. Returns a summary."""
    llm = open_llm(work.args, work.report, SLOTS)
    from mtp_jax.api.async_llm import AsyncLLM

    # --in-flight bounds the requests in memory, so the queue need not be bounded.
    allm = AsyncLLM(llm, max_queued_requests=2**31, max_queued_tokens=2**40)
    in_flight = work.args.in_flight or 2 * llm.engine.config.max_num_seqs
    return _summary(work.counts, allm, asyncio.run(_answer(work, allm, in_flight)))


def _end(args: argparse.Namespace, summary: str, counts: "Counts") -> int:
    if not args.quiet:
        law = model_options(args).law
        show.note(f"{law}; {summary}" if law else summary)
        if counts.warned:
            show.note(f"{amount(counts.warned, 'answer')} came with a warning, the first: {counts.warning}")
    return 1 if counts.failed or counts.failed_before else 0


async def _answer(work: BatchWork, allm: "AsyncLLM", in_flight: int) -> float:
    """Answer the lines, and count them. Returns seconds."""
    from mtp_jax.commands import batch_file
    from serve.http.app import make_app

    args, counts = work.args, work.counts
    app = make_app(allm, work.settings)

    async def send(url: str, body: bytes) -> Answer:
        while True:
            answer = await post(app, url, body)
            if allm.error is not None:
                raise EngineStopped(f"the engine failed: {allm.error}; run the command again for the rest")
            if answer.status != 503:
                return answer
            await asyncio.sleep(_RETRY_SECONDS)

    await allm.start(work.report)
    try:
        began = time.perf_counter()
        with work.report.phase("answer", "request") as update:
            await batch_file.run(
                args.source, args.target, send, in_flight, lambda: update(counts.answered, work.lines), counts
            )
        return time.perf_counter() - began
    finally:
        await allm.close()


def told(counts: "Counts", seconds: float) -> str:
    """Counts of lines, and speed."""
    rate = f"{amount(counts.tokens, 'token')} in {seconds:.1f} s: {counts.tokens / seconds:.0f} tokens/s"
    return f"{_done(counts)}; {rate}"


def _done(counts: "Counts") -> str:
    done = f"{counts.succeeded} answered, {counts.failed} failed"
    if counts.skipped:
        done += f", {counts.skipped} done before"
        done += f" ({counts.failed_before} failed)" if counts.failed_before else ""
    return done


def _summary(counts: "Counts", allm: "AsyncLLM", seconds: float) -> str:
    """Counts of lines, speed, and the effect of speculation."""
    s = allm.stats()
    parts = [told(counts, seconds)]
    if s.drafts:
        shares = " ".join(f"{n / s.drafts:.0%}" for n in s.accepted_per_position)
        length = 1 + s.accepted_tokens / s.drafts
        parts.append(f"acceptance length {length:.2f} where drafted; drafts accepted {shares} by position")
        steps = ", ".join(f"{n} at depth {d}" for d, n in sorted(s.depth_steps.items()))
        parts.append(f"steps: {steps}")
    return "; ".join(parts)
