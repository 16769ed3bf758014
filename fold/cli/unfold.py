"""``unfold``: write a checkpoint with its recorded fold taken out again."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .common import add_command
from .export import add_file_arguments, rewrite

if TYPE_CHECKING:
    from .common import Subparsers


def add(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(subparsers, "unfold", run, "Write a checkpoint with its recorded fold taken out.")
    add_file_arguments(parser, dtype="keep")


def run(args: argparse.Namespace) -> int:
    """Unfold."""
    return rewrite(args, unfold=True)
