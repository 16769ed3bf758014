"""The command line, ``python -m fold <command>``: one module per command, imported only when it is asked for.

A command module has ``add(subparsers)``, which declares its arguments, and ``run(args) -> int``. It imports what is
heavy inside ``run``. Exit status: 0 done, 2 bad arguments or input (one line on stderr), 1 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
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
    try:
        with _stoppable():
            return _main(argv)
    except KeyboardInterrupt:  # also while torch is being imported, which takes seconds
        print("Stopped.", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Make a plain ``kill`` unwind like Ctrl-C, so that what is half done is cleaned up."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
    except BrokenPipeError:
        # The reader of our output has left (``| head``): point stdout elsewhere, or Python complains at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (MossError, OSError) as error:
        return _complain(error, 2)
    except Exception as error:
        if os.environ.get("MOSS_FP16_TRACEBACK"):
            raise
        return _complain(f"{type(error).__name__}: {error} (MOSS_FP16_TRACEBACK=1 shows where)", 1)


def _complain(error: object, status: int) -> int:
    print(" ".join(str(error).split()), file=sys.stderr)
    return status
