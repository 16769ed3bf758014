"""``demo-checkpoint``: make a synthetic checkpoint that overflows fp16, to try everything on."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .common import add_command, add_json_option, add_overwrite_option, human_bytes, print_json
from .progress import Progress

if TYPE_CHECKING:
    from .common import Subparsers


def add(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers, "demo-checkpoint", run, "Make a synthetic checkpoint (bf16) whose stream overflows fp16."
    )
    parser.add_argument("target", help="the .safetensors file to write")
    parser.add_argument("--dim", type=int, default=256, help="model width (default 256)")
    parser.add_argument("--depth", type=int, default=6, help="number of blocks (default 6)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default 4)")
    parser.add_argument("--ffn-dim", type=int, help="FFN width (default 8/3 of the model's)")
    parser.add_argument("--text-dim", type=int, default=128, help="width of the text context (default 128)")
    parser.add_argument("--seed", type=int, default=0, help="another seed is another model (default 0)")
    parser.add_argument("--peak", type=float, help="about the largest |stream| (default 131072; fp16 ends at 65504)")
    parser.add_argument(
        "--io",
        metavar="FILE",
        help="also write inputs for `forward`: tensors latent and context",
    )
    add_overwrite_option(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Make it."""
    from ..demo import PEAK, demo_arch, demo_inputs, write_demo
    from ..files import save_tensors
    from .running import check_outputs

    arch = demo_arch(args.dim, args.depth, args.heads, ffn_dim=args.ffn_dim, text_dim=args.text_dim)
    check_outputs(args.target, args.io, overwrite=args.overwrite)
    peak = PEAK if args.peak is None else args.peak
    with Progress("Making", human_bytes) as progress:
        size = write_demo(args.target, arch, seed=args.seed, peak=peak, overwrite=args.overwrite, progress=progress)
        if args.io:
            save_tensors(args.io, demo_inputs(arch, seed=args.seed), overwrite=args.overwrite)
    if args.json:
        print_json({"target": args.target, "bytes": size, "io": args.io, "seed": args.seed, "peak": peak})
    else:
        print(f"{args.target}: {human_bytes(size)}, a stream of about {peak:g} in fp32")
    return 0
