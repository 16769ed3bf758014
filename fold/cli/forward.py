"""`forward`: one model call on saved inputs, the contract that other tools measure against."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .common import add_command, add_json_option

if TYPE_CHECKING:
    from .common import Subparsers


def add(subparsers: Subparsers) -> None:
    """Declare the command."""
    from .running import add_run_options

    parser = add_command(subparsers, "forward", run, "Run the model once on saved inputs and write the velocity.")
    parser.add_argument("checkpoint", help="a .safetensors file or an HF folder")
    parser.add_argument("--io", required=True, metavar="FILE", help="safetensors with the latent and the context")
    parser.add_argument("--latent", required=True, metavar="KEY", help="the latent [B, C, h, w] in it")
    parser.add_argument("--context", required=True, metavar="KEY", help="the text states [B, T, text_dim] in it")
    parser.add_argument("--mask", metavar="KEY", help="the text mask [B, T] in it, nonzero where a token is real")
    parser.add_argument("--sigma", required=True, type=float, help="noise level, 0 to 1")
    add_run_options(parser)
    parser.add_argument("--skip", metavar="BLOCKS", default="", help="joint blocks to leave out, such as 22,24")
    parser.add_argument("--out", required=True, metavar="FILE", help="where `velocity` [B, C, h, w] fp32 is written")
    parser.add_argument("--report", metavar="FILE", help="write the saturation report as JSON")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Run the model once."""
    import torch

    from ..errors import MossError
    from ..measure.conditioning import pick, pick_mask, read_tensors
    from .running import check_results, open_run, show_run, skips, write_tensors

    if not 0.0 <= args.sigma <= 1.0:
        raise MossError(f"--sigma must be 0 to 1, not {args.sigma}.")
    check_results(args.out, args.report, inputs=(args.checkpoint, args.io, args.factors))
    tensors = read_tensors(args.io)
    session = open_run(args)
    latent = pick(tensors, args.latent, args.io, ("B", session.arch.latent_channels, "h", "w"))
    context = pick(tensors, args.context, args.io, (latent.shape[0], "T", session.arch.text_dim))
    mask = None if args.mask is None else pick_mask(tensors, args.mask, args.io, tuple(context.shape[:2]))
    sigma = torch.full((latent.shape[0],), args.sigma)
    velocity = session.call(latent, sigma, context, mask, skips(args.skip, session.arch.depth)).float().cpu()
    session.counters.commit()
    write_tensors(args.out, {"velocity": velocity})
    show_run(session.report(steps=1, model_calls=1, result=velocity), args.out, args)
    return 0
