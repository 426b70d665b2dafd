"""Offline batches in OpenAI's format: a file of requests in, a file of answers out, of any size.

    in   {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
    out  {"id": ..., "custom_id": "a", "response": {"status_code", "request_id", "body"}, "error": null}

Answers are written as they come, one line each, so they are not in the requests' order. A line that is no
request becomes one error line. An interrupted run goes on where it stopped: a line of the output shows that a
request is done, by its custom_id, or that a line is in error, by the line's number. Memory does not grow with
the file, but for a digest per line (some 80 bytes), which tells double and finished requests.
"""

import asyncio
import json
import os
import shutil
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from mtp_jax.errors import RequestError, shown
from serve.http.in_process import Answer

MAX_LINE_BYTES = 8 * 2**20
# Rewritten as JSON, a character of two bytes becomes an escape of six bytes.
MAX_BODY_BYTES = 3 * MAX_LINE_BYTES
_URLS = ("/v1/completions", "/v1/chat/completions")
# Type, allowed values, if there is a list of them, and both in words.
_FIELDS: dict[str, tuple[type, tuple[str, ...], str]] = {
    "custom_id": (str, (), "a string"),
    "method": (str, ("POST",), "POST"),
    "url": (str, _URLS, " or ".join(_URLS)),
    "body": (dict, (), "an object"),
}
_BLOCK = 1 << 20
_ID = "batch_req_"
_OUTPUT = b'{"id": "%s' % _ID.encode()  # the beginning of a line of the output


Send = Callable[[str, bytes], Awaitable[Answer]]
"""Sends (url, body) and returns the answer."""


@dataclass
class Counts:
    """Lines of the input without blank lines.

    Attributes:
        skipped: number of lines that an earlier run has done.
        failed_before: number of skipped lines that failed in that run.
        succeeded: number of requests that were answered with status 200.
        failed: number of lines that were answered with another status, or are no requests.
        tokens: number of tokens of the answers.
        warned: number of requests that were answered with a warning; the first warning is kept.
    """

    skipped: int = 0
    failed_before: int = 0
    succeeded: int = 0
    failed: int = 0
    tokens: int = 0
    warned: int = 0
    warning: str = ""

    @property
    def answered(self) -> int:
        """Number of input lines that this run has done."""
        return self.succeeded + self.failed

    @property
    def done(self) -> int:
        """Number of input lines with a line in the output."""
        return self.skipped + self.answered

    def add(self, got: Answer | None) -> None:
        """Count an answer, or a line that is no request."""
        if got is None or got.status != 200:
            self.failed += 1
        else:
            self.succeeded += 1
            self.tokens += got.body["usage"]["completion_tokens"]
        if got is not None and got.warning:
            self.warned += 1
            self.warning = self.warning or got.warning

    def skip(self, key: bytes, done: set[bytes], failed: set[bytes]) -> bool:
        """Count a line if an earlier run has done it, and return whether it did."""
        self.skipped += key in done
        self.failed_before += key in failed
        return key in done


def _key(name: str | int | None) -> bytes:
    """A digest of 64 bits of a custom_id, or of the number of a line without one."""
    text = f"id {name}" if isinstance(name, str) else f"line {name}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


@dataclass(frozen=True)
class Line:
    """A line of the input: its request, or its fault."""

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    error: str | None = None

    @property
    def key(self) -> bytes:
        """The key by which a later run finds this line in the output."""
        return _key(self.custom_id if self.error is None else self.number)


class Job:
    """The unfinished lines of a batch, and the output to which their answers are written.

    Attributes:
        counts: counts of the lines so far.
    """

    def __init__(
        self, source: Path, out: BinaryIO, done: set[bytes], failed: set[bytes], counts: Counts
    ) -> None:
        """Call ``open_job`` instead."""
        self._source, self._out, self._done, self._failed = source, out, done, failed
        self.counts = counts

    def lines(self) -> Iterator[Line]:
        """The lines that have no line in the output yet. Raises RequestError if the file cannot be read."""
        for line in _lines(self._source, set()):
            if not self.counts.skip(line.key, self._done, self._failed):
                yield line

    def write(self, line: Line, got: Answer | None) -> None:
        """Write the output of a line: an answer, or None for a line in error."""
        self._out.write(_result(line, got))
        self._out.flush()  # an answer in Python's buffer is lost when the process is killed
        self.counts.add(got)


@contextmanager
def open_job(source: Path, target: Path, counts: Counts) -> Iterator[Job]:
    """Open ``source`` at its unfinished lines, which ``counts`` counts.

    Raises RequestError for files that cannot be used.
    """
    with _claimed(target) as out:
        yield Job(source, out, *_finished(target, out), counts)


async def run(
    source: Path,
    target: Path,
    send: Send,
    in_flight: int,
    progress: Callable[[], None],
    counts: Counts,
) -> None:
    """Answer every line of ``source`` that has no line in ``target`` yet, ``in_flight`` at a time.

    counts: counts the lines. progress: called after every line that this run has done.

    Raises RequestError for files that cannot be used. An error that ``send`` raises ends the run; requests
    without an answer have no line in the output, so the next run asks again.
    """
    tasks: set[asyncio.Task[None]] = set()
    with open_job(source, target, counts) as job:

        async def answer(line: Line) -> None:
            job.write(line, await send(line.url, line.body) if line.error is None else None)
            progress()

        try:
            for line in job.lines():
                tasks.add(asyncio.create_task(answer(line)))
                if len(tasks) == in_flight:
                    tasks = await _some(tasks)
            while tasks:
                tasks = await _some(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _some(tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait until a task has ended; return the running tasks. Raises the errors of ended tasks."""
    ended, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()
    return others


def already(source: Path, target: Path) -> tuple[int, Counts]:
    """The number of all lines, and the part that earlier runs have done.

    The output is made if there is none; a torn off last line is cut away. Raises RequestError for a file that
    is no such output (it stays unchanged), for an output that another run writes, and for an unreadable
    input. Raises OSError for an output that cannot be written.
    """
    lines, seen, counts = 0, set[bytes](), Counts()
    next(_raw_lines(source), None)  # fails for an unreadable input, before an output is made
    with _claimed(target) as file:
        done, failed = _finished(target, file)
    for line in _lines(source, seen):
        lines += 1
        counts.skip(line.key, done, failed)
    return lines, counts


def forget_refused(target: Path) -> int:
    """Delete the lines of an output whose refusal may pass (408, 429, 5xx), and return their number.

    The output is replaced as a whole, so that a run that is killed loses nothing. Raises RequestError for a
    file that is no such output, and for an output that another run writes.
    """
    with _claimed(target) as file:
        _finished(target, file)
        file.seek(0)
        lines = list(map(_may_pass, file))
        if not any(lines):
            return 0
        place = target.resolve()
        with _claimed(place.with_name(f"{place.name}.retry")) as kept:
            kept.truncate(0)
            file.seek(0)
            kept.writelines(line for line, passing in zip(file, lines, strict=True) if not passing)
            kept.flush()
            os.fsync(kept.fileno())
            shutil.copymode(place, kept.name)
            os.replace(kept.name, place)
    return sum(lines)


def _may_pass(line: bytes) -> bool:
    """Whether a line of the output is a refusal by a cause that may pass."""
    response = json.loads(line)["response"]
    status = 200 if response is None else response["status_code"]
    return status in (408, 429) or status >= 500


@contextmanager
def _claimed(target: Path) -> Iterator[BinaryIO]:
    """The output, locked against other runs. Raises RequestError where it cannot be."""
    try:
        import fcntl
    except ImportError:
        raise RequestError("a batch locks its output file, which needs Linux or macOS") from None
    with target.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{target} is being written by another run; wait for its end, or name another file"
            raise RequestError(message) from None
        yield file


def _finished(target: Path, file: BinaryIO) -> tuple[set[bytes], set[bytes]]:
    """Keys of lines with an answer in the output, and of failed lines; cuts a torn off last line away."""
    done, failed = set[bytes](), set[bytes]()
    file.seek(0)
    whole = 0
    for number, line in enumerate(file, start=1):
        try:
            if not line.endswith(b"\n"):
                if line[: len(_OUTPUT)] != _OUTPUT[: len(line)]:
                    raise ValueError
                file.truncate(whole)
                break
            whole += len(line)
            entry = json.loads(line)
            error = entry["error"]
            key = _key(entry["custom_id"] if error is None else error["line"])
            done.add(key)
            if error is not None or entry["response"]["status_code"] != 200:
                failed.add(key)
        except (ValueError, LookupError, TypeError, RecursionError):
            raise RequestError(
                f"{target} line {number} is no line of a batch's output; name another file"
            ) from None
    return done, failed


def _lines(source: Path, seen: set[bytes]) -> Iterator[Line]:
    """The lines. Adds the key of each custom_id to ``seen``. Raises RequestError for a key that is there."""
    for number, data in _raw_lines(source):
        line = _parsed(number, data)
        if line.custom_id is not None:
            if (key := _key(line.custom_id)) in seen:
                raise RequestError(
                    f"{source} line {number} has the custom_id {shown(line.custom_id)!r} of an earlier line, "
                    "and answers are told by it; give each line its own"
                )
            seen.add(key)
        yield line


def _raw_lines(source: Path) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of every line that is not blank; of a line that is too long, only its beginning."""
    number = 0
    try:
        with source.open("rb") as file:
            while data := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                rest = data
                while not rest.endswith(b"\n") and (rest := file.readline(_BLOCK)):
                    pass
                if data.strip():
                    yield number, data
    except OSError as error:
        raise RequestError(f"{source} cannot be read: {error.strerror}") from error


def _parsed(number: int, data: bytes) -> Line:
    if len(data) > MAX_LINE_BYTES:
        return Line(number, None, error=f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        entry = json.loads(data)
    except (ValueError, RecursionError) as error:
        return Line(number, None, error=f"the line is not JSON: {error}")
    name = entry.get("custom_id") if isinstance(entry, dict) else None
    name = name if isinstance(name, str) else None
    if fault := _fault(entry):
        return Line(number, name, error=fault)
    return Line(number, name, entry["url"], json.dumps(entry["body"]).encode())


def _fault(entry: object) -> str | None:
    """The reason why a line of JSON is no request."""
    if not isinstance(entry, dict):
        return f"the line is {entry!r:.80}; expected an object with custom_id, method, url and body"
    for name, (kind, allowed, expected) in _FIELDS.items():
        if name not in entry:
            return f"{name} is missing; expected {expected}"
        if not isinstance(entry[name], kind) or (allowed and entry[name] not in allowed):
            return f"{name} = {entry[name]!r:.80}; expected {expected}"
    if entry["body"].get("stream"):
        return (
            f"body has stream = {entry['body']['stream']!r:.80}; leave it out, as answers are written whole"
        )
    return None


def _result(line: Line, got: Answer | None) -> bytes:
    response, error = None, None
    if got is None:
        error = {"code": "invalid_line", "message": f"line {line.number}: {line.error}", "line": line.number}
    else:
        response = {"status_code": got.status, "request_id": got.request_id, "body": got.body}
    entry = {"id": f"{_ID}{uuid.uuid4().hex}", "custom_id": line.custom_id}
    return json.dumps(entry | {"response": response, "error": error}).encode() + b"\n"
