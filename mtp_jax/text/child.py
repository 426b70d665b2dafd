"""Child processes, for work whose time and memory cannot be limited within this process.

A child is a module of this package that runs as a program, with one end of a socket as its standard input. It
ends when the other end is closed, which every end of its parent causes.
"""

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from mtp_jax.json_object import JsonObject

_LENGTH = 8  # bytes of a message's length


def start(module: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run a module; returns the process and our end of the socket."""
    ours, theirs = socket.socketpair()
    found = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],  # no module from the working folder
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(found)},
        )
    return process, ours


def end(process: subprocess.Popen[bytes], control: socket.socket) -> int:
    """End a child. Returns its exit status, negative for a signal, also if it had ended before."""
    control.close()
    process.kill()
    return process.wait()


def send(to: socket.socket, message: JsonObject) -> None:
    """Raises ConnectionError if the other side has ended; TypeError, ValueError: values unknown to JSON."""
    text = json.dumps(message).encode()
    to.sendall(len(text).to_bytes(_LENGTH, "big") + text)


def receive(source: socket.socket) -> JsonObject:
    """Receive a message. Raises EOFError or ConnectionError if the other side has ended."""
    return json.loads(_bytes(source, int.from_bytes(_bytes(source, _LENGTH), "big")))


def _bytes(source: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = source.recv(count - len(found))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def limits() -> bool:
    """Whether the memory of children can be limited: Linux alone has /proc."""
    return find_spec("resource") is not None and held() > 0


# In the child


def parent() -> socket.socket:
    """The other end of the socket, in a child that begins."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C of a terminal: the parent ends this process
    return socket.socket(fileno=os.dup(0))


def limit_memory(more: int) -> None:
    """Limit this process to ``more`` bytes above its present memory, where the system can (``limits``)."""
    try:
        import resource
    except ImportError:  # not on every system
        return
    before = held()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if before:
        resource.setrlimit(resource.RLIMIT_DATA, (before + more, before + more))


def held() -> int:
    """Bytes of writable memory of this process; 0 where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[5]) * mmap.PAGESIZE
    except OSError:
        return 0
