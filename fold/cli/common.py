"""Options and output that several commands share."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from ..errors import MossError
from ..scaling.factors import Factors, parse_factors, read_factors

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
    """``--c``, ``--s-attn``, ``--s-ffn``, ``--factors``; ``c`` is the default of the first (None: not given)."""
    form = "0.0625, 1/16 or a comma list with one value per block"
    parser.add_argument("--c", help=f"factor of the streams: {form}" + (f" (default {c})" if c else ""))
    parser.add_argument("--s-attn", help=f"factor of the attention outputs before their gate: {form} (default 1)")
    parser.add_argument("--s-ffn", help=f"factor of the FFN outputs before their gate: {form} (default 1)")
    parser.add_argument("--factors", metavar="FILE", help="read the factors from what `probe` wrote")
    parser.set_defaults(default_c=c)


def factors_from(args: argparse.Namespace, default_c: str | float | None = None) -> Factors | None:
    """The factors of the command line, or None when none were given and c has no default.

    ``default_c`` (else the option's own default) is the c that goes with an ``--s-attn`` or ``--s-ffn`` given alone.
    """
    given = {"c": args.c, "s_attn": args.s_attn, "s_ffn": args.s_ffn}
    if args.factors is not None:
        for field, value in given.items():
            if value is not None:
                raise MossError(f"--factors already says what {field} is: leave --{field.replace('_', '-')} out.")
        return read_factors(args.factors)
    if args.default_c is None and all(value is None for value in given.values()):
        return None
    c = default_c if args.default_c is None else args.default_c
    defaults = {"c": 1.0 if c is None else c, "s_attn": 1.0, "s_ffn": 1.0}
    return parse_factors(**{field: defaults[field] if value is None else value for field, value in given.items()})


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
