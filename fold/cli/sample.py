"""`sample`: a whole image's latent from saved conditioning, with ComfyUI's noise, sigmas and update."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .common import add_command, add_json_option

if TYPE_CHECKING:
    from torch import Tensor

    from .common import Subparsers


def add(subparsers: Subparsers) -> None:
    """Declare the command."""
    from .running import add_run_options

    parser = add_command(subparsers, "sample", run, "Sample a latent from saved conditioning (Euler, simple, shift 5).")
    parser.add_argument("checkpoint", help="a .safetensors file or an HF folder")
    parser.add_argument("--cond", required=True, metavar="FILE", help="safetensors with `context` [1, T, text_dim]")
    parser.add_argument("--uncond", metavar="FILE", help="the same for the negative prompt (default: zeros, one token)")
    parser.add_argument("--height", type=int, default=1024, help="pixels (default 1024)")
    parser.add_argument("--width", type=int, default=1024, help="pixels (default 1024)")
    parser.add_argument("--batch", type=int, default=1, help="images at once (default 1)")
    parser.add_argument("--steps", type=int, default=50, help="Euler steps (default 50)")
    parser.add_argument("--cfg", type=float, default=3.0, help="guidance; 1 needs no negative (default 3)")
    parser.add_argument("--shift", type=float, default=5.0, help="flow shift (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="noise seed (default 0)")
    parser.add_argument(
        "--skip", metavar="BLOCKS", default="", help="joint blocks the negative pass leaves out, such as 22 (official)"
    )
    add_run_options(parser)
    parser.add_argument("--out", required=True, metavar="FILE", help="where `latent` [B, C, h, w] fp32 is written")
    parser.add_argument("--report", metavar="FILE", help="write the saturation report as JSON")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Sample."""
    import torch

    from ..errors import MossError
    from ..measure.conditioning import read_conditioning
    from ..measure.sampling import SampleSettings, euler, initial_noise
    from .progress import Progress
    from .running import MAX_BATCH, check_results, check_size, open_run, show_run, skips, write_tensors

    check_results(args.out, args.report, inputs=(args.checkpoint, args.cond, args.uncond, args.factors))
    settings = SampleSettings(args.steps, args.cfg, args.shift, args.seed)
    check_size(args.width, args.height)
    if not 1 <= args.batch <= MAX_BATCH:
        raise MossError(f"--batch must be 1 to {MAX_BATCH}, not {args.batch}.")
    session = open_run(args)
    arch, calls = session.arch, 0
    branches = {
        "cond": read_conditioning(args.cond, 1, arch.text_dim),
        "uncond": read_conditioning(args.uncond, 1, arch.text_dim)
        if args.uncond
        else (torch.zeros(1, 1, arch.text_dim), None),
    }
    skipped = {"cond": {}, "uncond": skips(args.skip, arch.depth)}

    def velocity(x: Tensor, sigma: Tensor, branch: str) -> Tensor:
        nonlocal calls
        calls += 1
        context, mask = branches[branch]
        rows = x.shape[0]
        out = session.call(
            x,
            sigma,
            context.expand(rows, -1, -1),
            None if mask is None else mask.expand(rows, -1),
            skipped[branch],
        )
        session.counters.commit()
        return out

    noise = initial_noise((args.batch, arch.latent_channels, args.height // 16, args.width // 16), args.seed)
    with Progress("Sampling") as progress:
        latent = euler(velocity, noise.to(session.device), settings, lambda done, total, _: progress(done, total)).cpu()
    report = session.report(steps=args.steps, model_calls=calls, result=latent)
    write_tensors(args.out, {"latent": latent})
    show_run(report, args.out, args)
    return 0
