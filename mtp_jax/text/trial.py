"""Whether a grammar is cheap enough to be compiled here, found out in a process that can be ended.

llguidance can be neither interrupted nor held to an amount of memory, and a compiled grammar cannot be handed
from one process to another. So each new grammar is compiled twice: first on trial, in a process forked for it
that the system ends at a limit of time or memory, then in this one, which takes the same time and memory.

A helper process holds the table of tokens and forks: it has one thread and no jax, so that takes
milliseconds. It starts with the first grammar, and ends when this process closes the socket between them,
however it ends.
"""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
import weakref

from mtp_jax.errors import Overloaded, RequestError
from mtp_jax.json_object import JsonObject
from mtp_jax.text import child
from mtp_jax.text.compile_grammar import TokenTable

SECONDS = 5.0
"""Seconds of a trial: half of the 10 s that a client with a bad grammar should wait for its refusal."""

MEMORY = 256 * 2**20
"""Bytes that a trial may take beyond what the helper holds."""

TURN_SECONDS = 2.0
"""Seconds that a further trial waits for its turn. Then it is refused as overload: trials may last longer."""

_AT_A_TIME = 4  # trials, each with its own process: together they take 1 GiB at most
# After a trial's own seconds: for the helper to start, on a busy machine.
_START_SECONDS = 30.0
_BEGUN = b"+"


class Trials:
    """Tries grammars of one table of tokens. Threads may share it."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._places = threading.BoundedSemaphore(_AT_A_TIME)
        self._starting = threading.Lock()
        self._helper: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def start(self) -> None:
        """Start the helper, unless it has started, and leave it at work on its table."""
        if _can_try():
            with self._starting:
                self._started()

    def run(self, grammar: str) -> int:
        """Bytes that the grammar takes. Raises RequestError above the limits, Overloaded if too many wait.

        RequestError, too, on a system that cannot fork processes and hand sockets to them.
        """
        if not _can_try():
            raise RequestError(
                "structured output is tried in a process of its own, which needs Linux or macOS"
            )
        if not self._places.acquire(timeout=TURN_SECONDS):
            raise Overloaded("other structured outputs are still being compiled; try again", SECONDS)
        try:
            for _ in range(3):  # the helper may have been ended from outside, with the job or before
                answer = self._tried(grammar)
                if answer is not None:
                    return answer["held"]
        finally:
            self._places.release()
        raise Overloaded("the process that compiles structured outputs has ended; try again", SECONDS)

    def _tried(self, grammar: str) -> JsonObject | None:
        """The trial's result; None if there was none. Raises RequestError above the limits."""
        job, theirs = socket.socketpair()
        with job:
            job.settimeout(SECONDS + _START_SECONDS)
            with theirs:
                if not self._hand_over(theirs):
                    return None
            try:
                if job.recv(1) != _BEGUN:
                    return None
                began = time.monotonic()
                child.send(job, {"grammar": grammar, "seconds": SECONDS, "memory": MEMORY})
                return child.receive(job)
            except TimeoutError:
                raise Overloaded("the machine is too busy to compile it; try again", SECONDS) from None
            except (ConnectionError, EOFError):
                if time.monotonic() - began < SECONDS * 0.9:
                    limit = f"more than {MEMORY >> 20} MiB"
                else:
                    limit = f"longer than {SECONDS:g} s"
                raise RequestError(f"the structured output takes {limit} to compile; simplify it") from None

    def _hand_over(self, job: socket.socket) -> bool:
        """Give the helper one end of a job's socket; False if it has ended meanwhile."""
        with self._starting:
            process, control = self._started()
            try:
                socket.send_fds(control, [_BEGUN], [job.fileno()])
            except OSError:
                child.end(process, control)
                self._helper = None
                return False
        return True

    def _started(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The helper, which the caller has locked."""
        if self._helper is None:
            self._helper = _start(self._table)
            weakref.finalize(self, child.end, *self._helper)
        return self._helper


def _can_try() -> bool:
    return hasattr(os, "fork") and hasattr(socket, "send_fds")


def _start(table: TokenTable) -> tuple[subprocess.Popen[bytes], socket.socket]:
    process, ours = child.start(__name__)
    with contextlib.suppress(OSError):  # it has ended: the next job to it fails
        child.send(ours, {"tokens": [t.decode("latin-1") for t in table.tokens], "eos": list(table.eos)})
    return process, ours


# The helper


def main() -> None:
    """Fork a process for each job that comes, until the other end is closed."""
    control = child.parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forked processes
    try:
        sent = child.receive(control)
        # Without the tokenizer, which takes as long again to read: in a trial any tokens of a text will do.
        table = TokenTable([token.encode("latin-1") for token in sent["tokens"]], sent["eos"])
        _ = table.compiled
        while fds := socket.recv_fds(control, 1, 1)[1]:
            if not os.fork():
                control.close()
                os.close(0)
                _answer(table, socket.socket(fileno=fds[0]))
            os.close(fds[0])
    except (ConnectionError, EOFError):
        pass


def _answer(table: TokenTable, job: socket.socket) -> None:
    """Compile one grammar within its limits, report its time and memory, and end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust says there that memory has run out
        job.sendall(_BEGUN)
        wanted = child.receive(job)
        signal.setitimer(signal.ITIMER_REAL, wanted["seconds"])  # SIGALRM ends a process at any point
        before = child.held()
        child.limit_memory(wanted["memory"])
        matcher = table.build(wanted["grammar"])
        held = child.held() - before
        child.send(job, {"held": held if not matcher.is_error() else 0})
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
