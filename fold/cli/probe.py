"""``probe``: measure activation peaks in fp32 and choose the fold's factors from them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..scaling.factors import factor_text
from .common import add_command, add_json_option

if TYPE_CHECKING:
    from ..measure.probe import ProbeSettings
    from .common import Subparsers


def add(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(subparsers, "probe", run, "Measure activation peaks in fp32 and choose factors from them.")
    parser.add_argument("checkpoint", help="a .safetensors file or an HF folder")
    parser.add_argument(
        "--cond",
        required=True,
        action="append",
        metavar="FILE",
        help="safetensors with `context` [1, T, text_dim]; repeat it for more prompts",
    )
    parser.add_argument("--sizes", default="1024x1024", help="widths x heights in pixels, such as 1024x1024,832x1216")
    parser.add_argument("--sigmas", default="1,0.5,0.02", help="noise levels above 0 (default 1,0.5,0.02)")
    parser.add_argument("--seed", type=int, default=0, help="noise seed (default 0)")
    parser.add_argument("--per-block", action="store_true", help="choose one of each factor per block")
    parser.add_argument(
        "--target", type=float, default=4096.0, help="the peak that the factors are chosen for (default 4096)"
    )
    parser.add_argument("--device", default="cpu", help="a torch device (default cpu)")
    parser.add_argument("--out", metavar="FILE", help="write the result as JSON, for --factors")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Probe."""
    import torch

    from ..checkpoint.load import load_model
    from ..checkpoint.reader import open_checkpoint
    from ..dtypes import DTYPES
    from ..measure.conditioning import read_conditioning
    from ..measure.probe import Prompt, probe
    from .progress import Progress
    from .running import check_results, find_device, show_result

    check_results(args.out, inputs=(args.checkpoint, *args.cond))
    settings, device = read_settings(args), find_device(args.device)
    with open_checkpoint(args.checkpoint) as checkpoint:
        arch = checkpoint.arch
        prompts = [Prompt(*read_conditioning(file, 1, arch.text_dim), Path(file).stem) for file in args.cond]
        # layers cast to fp32 as they run, so the file's own dtype will do; unfolding may need more range than it has
        stored = torch.float32 if checkpoint.record else DTYPES.get(checkpoint.dtype, torch.float32)
        model = load_model(checkpoint, stored, device)
    with Progress("Probing") as progress:
        result = probe(model, arch, prompts, settings, device=device, progress=progress)
    found = result.to_json()
    show_result(found, table(found), out=args.out, as_json=args.json)
    return 0


def read_settings(args: argparse.Namespace) -> ProbeSettings:
    """The settings in the arguments; MossError for what is no size or number."""
    from ..measure.probe import ProbeSettings
    from ..parsing import parse_numbers, parse_sizes

    sizes, sigmas = parse_sizes(args.sizes, "--sizes"), parse_numbers(args.sigmas, "--sigmas")
    return ProbeSettings(sizes, sigmas, args.seed, args.per_block, args.target)


COLUMNS = ("stream", "o", "ffn_down", "ffn_up_gate", "logits")


def table(found: dict[str, Any]) -> list[str]:
    """The result for a person: one line per block, then the advice and the factors as options."""
    lines = [f"{'block':<10}" + "".join(f"{name:>13}" for name in COLUMNS)]
    for row in found["blocks"]:
        cells = ("-" if row[name] is None else f"{row[name]:.5g}" for name in COLUMNS)
        lines.append(f"{row['name']:<10}" + "".join(f"{cell:>13}" for cell in cells))
    lines.append("modulation  " + ", ".join(f"{name} {value:.4g}" for name, value in found["modulation"].items()))
    options = (f"--{key.replace('_', '-')} {_listed(found[key])}" for key in ("c", "s_attn", "s_ffn"))
    return [*lines, *found["advice"], " ".join(options)]


def _listed(value: float | list[float]) -> str:
    values = value if isinstance(value, list) else [value]
    return ",".join(map(factor_text, values))
