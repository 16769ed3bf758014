"""Options and output that several commands share."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from ..errors import MossError
from ..scaling.factors import GivenFactors, parse_factors, read_factors

if TYPE_CHECKING:
    from collections.abc import Callable

    Subparsers = argparse._SubParsersAction[Any]
    Run = Callable[[argparse.Namespace], int]


def add_command(subparsers: Subparsers, name: str, run: Run, summary: str) -> argparse.ArgumentParser:
    """Declare a command; ``summary`` is its line in ``--help``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=summary, description=summary)
    parser.set_defaults(run=run)
    return parser


FACTOR_OPTIONS = ("c", "s_attn", "s_ffn", "factors")


def add_factor_options(parser: argparse.ArgumentParser, c: str | None = None) -> None:
    """``--c``, ``--s-attn``, ``--s-ffn``, ``--factors``; ``c`` is what ``--help`` names as the first one's default."""
    form = "0.0625, 1/16 or a comma list with one value per block"
    parser.add_argument("--c", help=f"factor of the streams: {form}" + (f" (default {c})" if c else ""))
    parser.add_argument("--s-attn", help=f"factor of the attention outputs before their gate: {form} (default 1)")
    parser.add_argument("--s-ffn", help=f"factor of the FFN outputs before their gate: {form} (default 1)")
    parser.add_argument("--factors", metavar="FILE", help="read the factors from what `probe` wrote")


def factors_from(args: argparse.Namespace) -> GivenFactors | None:
    """The factors of the command line, or None when none were given."""
    given = {"c": args.c, "s_attn": args.s_attn, "s_ffn": args.s_ffn}
    if args.factors is None:
        return parse_factors(**given)
    for field, value in given.items():
        if value is not None:
            raise MossError(f"--factors already says what {field} is: leave --{field.replace('_', '-')} out.")
    return GivenFactors.of(read_factors(args.factors))


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def add_overwrite_option(parser: argparse.ArgumentParser) -> None:
    """``--overwrite``."""
    parser.add_argument("--overwrite", action="store_true", help="replace the target if it exists")


def print_json(value: object) -> None:
    """Print ``value`` as JSON for a script or a person to read: escaped where the output could not show all of it."""
    shows_all = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, indent=1, ensure_ascii=not shows_all))


def human_bytes(count: float) -> str:
    """A byte count with a unit: ``11.2 GB``."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
