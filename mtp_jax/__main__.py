"""The process `mtp-jax`, also as `python -m mtp_jax`."""

import os
import signal
import sys
from typing import NoReturn


def entry() -> NoReturn:
    """Run the command line. Ctrl-C ends the process without a word while anything is being imported."""
    if os.name == "nt":
        sys.exit("error: mtp-jax runs on Linux; on Windows, run it inside WSL2")
    quiet = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # which prints a traceback
    if quiet:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mtp_jax.commands import cli
    from mtp_jax.commands.ctrl_c import end_at_ctrl_c, repeat_lost_ctrl_c

    if quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        end_at_ctrl_c()
        repeat_lost_ctrl_c()
    cli.entry()


if __name__ == "__main__":
    entry()
