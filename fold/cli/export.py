"""``export``: write a checkpoint with a fold in its weights and the record that says so."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..checkpoint.keys import LAYOUTS
from .common import (
    add_command,
    add_factor_options,
    add_json_option,
    add_overwrite_option,
    factors_from,
    human_bytes,
    print_json,
)
from .progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..checkpoint.export import ExportResult
    from ..measure.eps_check import EpsCheck
    from .common import Subparsers


def add(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers, "export", run, "Write a checkpoint whose weights carry the fold (a fold already there is replaced)."
    )
    add_file_arguments(parser, dtype="fp16")
    add_factor_options(parser, c="1/16")
    parser.add_argument(
        "--check",
        metavar="FILE",
        help="then hold exact and stock eps against the source, on the latent and context in this safetensors file",
    )
    parser.add_argument("--check-latent", default="latent", metavar="KEY", help="the latent [B, C, h, w] in it")
    parser.add_argument("--check-context", default="context", metavar="KEY", help="the text states in it")
    parser.add_argument("--check-sigma", type=float, default=0.5, help="the noise level of the check (default 0.5)")


def add_file_arguments(parser: argparse.ArgumentParser, dtype: str) -> None:
    """What ``export`` and ``unfold`` share; ``dtype`` is the default."""
    parser.add_argument("source", help="a .safetensors file or an HF folder")
    parser.add_argument("target", help="the .safetensors file to write")
    parser.add_argument(
        "--dtype", default=dtype, choices=("keep", "bf16", "fp16", "fp32"), help=f"of the weights (default {dtype})"
    )
    parser.add_argument("--layout", default="keep", choices=tuple(LAYOUTS), help="q, k, v as one matrix or three")
    add_overwrite_option(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Export."""
    check = prepare_check(args) if args.check else None
    return rewrite(args, unfold=False, check=check)


def prepare_check(args: argparse.Namespace) -> Callable[[], EpsCheck]:
    """Read the inputs of the eps check before the export starts; MossError where they do not fit."""
    from ..checkpoint.reader import open_checkpoint
    from ..errors import MossError
    from ..measure.conditioning import pick, read_tensors
    from ..measure.eps_check import check_eps

    if not 0.0 <= args.check_sigma <= 1.0:
        raise MossError(f"--check-sigma must be 0 to 1, not {args.check_sigma}.")
    tensors = read_tensors(args.check)
    with open_checkpoint(args.source) as checkpoint:
        arch = checkpoint.arch
    latent = pick(tensors, args.check_latent, args.check, ("B", arch.latent_channels, "h", "w"))
    context = pick(tensors, args.check_context, args.check, (latent.shape[0], "T", arch.text_dim))
    return lambda: check_eps(args.source, args.target, latent, context, args.check_sigma)


def rewrite(args: argparse.Namespace, unfold: bool, check: Callable[[], EpsCheck] | None = None) -> int:
    """Export or unfold, with a progress bar, and say what was written."""
    from ..checkpoint.export import export_checkpoint
    from ..scaling.factors import DEFAULT, IDENTITY

    given = None if unfold else factors_from(args)
    factors = IDENTITY if unfold else given.with_c(DEFAULT.c) if given is not None else DEFAULT

    with Progress("Writing", human_bytes) as progress:
        result = export_checkpoint(
            args.source,
            args.target,
            factors,
            dtype=args.dtype,
            fused=LAYOUTS[args.layout],
            unfold=unfold,
            overwrite=args.overwrite,
            progress=progress,
        )
    checked = check() if check is not None else None
    if args.json:
        print_json(_as_dict(result) | ({"eps_check": checked.to_json()} if checked else {}))
    else:
        fold = result.record.to_json() if result.record else "no fold"
        print(f"{result.target}: {human_bytes(result.nbytes)} in {result.tensors} tensors, {fold}")
        for note in result.notes:
            print(note)
        if checked is not None:
            print(checked.sentence())
    return 0


def _as_dict(result: ExportResult) -> dict[str, object]:
    return {
        "target": str(result.target),
        "bytes": result.nbytes,
        "tensors": result.tensors,
        "dtype": result.dtype,
        "fold": result.record.to_dict() if result.record else None,
        "replaced": result.replaced.to_dict() if result.replaced else None,
        "notes": list(result.notes),
    }
