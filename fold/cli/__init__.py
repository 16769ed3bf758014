"""The command line, ``python -m fold <command>``: one module per command, imported only when it is asked for.

A command module has ``add(subparsers)``, which declares its arguments, and ``run(args) -> int``. It imports what is
heavy inside ``run``. Exit status: 0 done, 2 bad arguments or input (one line on stderr), 1 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

from ..errors import MossError

COMMANDS = ("inspect", "forward", "sample", "probe", "compare", "export", "unfold", "demo-checkpoint")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; argparse would print the usage too."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str]) -> int:
    """Run one command and return the exit status."""
    _replace_what_cannot_be_shown()
    try:
        with _stoppable():
            return _main(argv)
    except KeyboardInterrupt:  # also while torch is being imported, which takes seconds
        print("Stopped.", file=sys.stderr)
        return 1


def _replace_what_cannot_be_shown() -> None:
    """Let a pipe or console whose encoding lacks a character show ``?``: a result must not be lost over its name."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(ValueError):  # closed by whoever started us
                stream.reconfigure(errors="replace")


#: What ends a program from outside, like Ctrl-C from within: a plain kill, a closed terminal, Ctrl-Break on Windows.
_STOP_SIGNALS = ("SIGTERM", "SIGHUP", "SIGBREAK")


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Make a plain ``kill`` unwind like Ctrl-C, so that what is half done is cleaned up."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    known = [getattr(signal, name) for name in _STOP_SIGNALS if hasattr(signal, name)]
    # One that is ignored stays so: nohup asks for that.
    before = {number: signal.signal(number, stop) for number in known if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _main(argv: Sequence[str]) -> int:
    parser = _Parser(prog="python -m fold", description="MOSS-Image in fp16: inspect, run and convert checkpoints.")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    # Only the command asked for is imported; for --help, or a command that is none, all of them.
    asked = [name for name in COMMANDS if argv and argv[0] == name]
    try:
        for name in asked or COMMANDS:
            module = importlib.import_module(f".{name.replace('-', '_')}", __name__)
            module.add(subparsers)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors", "numpy"):
            raise
        return _complain(
            f"{error.name} is not installed for {sys.executable}: use ComfyUI's Python, or .venv's once `python dev.py "
            "test` has made it.",
            1,
        )
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:  # said by the command's own parser, whose --help lists what there is
            subparsers.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    except SystemExit as stop:
        return int(stop.code or 0)
    return _guarded(args)


def _guarded(args: argparse.Namespace) -> int:
    """Run the command; what goes wrong becomes one line on stderr and an exit status."""
    try:
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except (MossError, OSError) as error:
        if isinstance(error, OSError) and _is_broken_pipe(error):
            # The reader of our output has left (``| head``): point stdout elsewhere, or Python complains at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return _complain(error, 2)
    except Exception as error:
        if os.environ.get("MOSS_FP16_TRACEBACK"):
            raise
        return _complain(f"{type(error).__name__}: {error} (MOSS_FP16_TRACEBACK=1 shows where)", 1)


def _is_broken_pipe(error: OSError) -> bool:
    """Whether whoever read our output has left; Windows calls that an invalid argument, of no file."""
    return isinstance(error, BrokenPipeError) or (
        os.name == "nt" and error.errno == errno.EINVAL and error.filename is None
    )


def _complain(error: object, status: int) -> int:
    print(" ".join(str(error).split()), file=sys.stderr)
    return status
