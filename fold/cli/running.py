"""What `forward`, `sample` and the other commands that run a model share: options, the loaded model, its report."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arch import MossArch
from ..checkpoint.load import load_model
from ..checkpoint.reader import holds_model, open_checkpoint
from ..dtypes import (
    DTYPES,
    INPUT_CHOICES,
    AppliedDtypes,
    InputPolicy,
    apply_rules,
    parse_dtype,
    parse_rules,
    stored_dtype,
)
from ..errors import MossError
from ..files import check_target, new_file, save_tensors
from ..model.forward import BlockReplacement, MossDiT, skip_block
from ..report.counters import DEFAULT_THRESHOLD, Counters, site_names
from ..report.messages import message
from ..report.report import Outcome, Remedy, Report, make_report
from ..report.words import bars_of, counts, fact, setup, title
from ..scaling.factors import factor_text
from ..scaling.plan import FP16_MAX, StreamPlan, plan_for
from ..scaling.record import StoredFold
from .common import FACTOR_OPTIONS, add_factor_options, factors_from, print_json

MAX_BATCH = 64
MAX_PIXELS = 16384


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """How the model is run: mode, factors, eps, clamp, dtype, device."""
    parser.add_argument("--mode", choices=("auto", "none", "online", "fp32_residual"), default="auto")
    add_factor_options(parser)
    parser.add_argument("--eps", choices=("exact", "stock"), help="eps of the stream norms: c^2 times stock, or stock")
    parser.add_argument(
        "--clamp", nargs="?", type=float, const=FP16_MAX, metavar="V", help="limit the stream to +-V (default 65504)"
    )
    parser.add_argument("--unfold", choices=("auto", "keep"), default="auto", help="take a recorded fold out at load")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help="the compute dtype (default fp32)")
    parser.add_argument("--device", default="cpu", help="a torch device (default cpu)")
    parser.add_argument(
        "--threshold", type=float, default=DEFAULT_THRESHOLD, help="what the report counts as over (default 4096)"
    )
    add_dtype_options(parser)


def add_dtype_options(parser: argparse.ArgumentParser) -> None:
    """Dtypes of the model's inputs and of single parameters."""
    for name, what in (("latents", "the latents"), ("cond", "the text states"), ("timestep", "sigma")):
        parser.add_argument(
            f"--{name}-dtype",
            choices=INPUT_CHOICES,
            default="default",
            help=f"{what} at the model's boundary (default: {'fp32' if name == 'timestep' else 'the compute dtype'})",
        )
    parser.add_argument(
        "--param-dtype",
        action="append",
        default=[],
        metavar="GLOB=DTYPE",
        help="keep and compute these parameters in another dtype, such as 'layers.*.proj.o.weight=fp32'; repeatable",
    )


def check_run_options(args: argparse.Namespace) -> None:
    """MossError for options that are wrong whatever the checkpoint holds."""
    if not 0.0 < args.threshold < math.inf:
        raise MossError(f"--threshold must be a finite number above 0, not {args.threshold}.")


@dataclass(frozen=True)
class Session:
    """A loaded model with its plan and counters."""

    model: MossDiT
    plan: StreamPlan
    dtype: torch.dtype
    device: torch.device
    counters: Counters
    inputs: InputPolicy
    overrides: AppliedDtypes

    @property
    def arch(self) -> MossArch:
        """The model's geometry."""
        return self.model.arch

    @torch.no_grad()
    def call(
        self,
        latent: Tensor,
        sigma: Tensor,
        context: Tensor,
        mask: Tensor | None = None,
        replace: Mapping[int, BlockReplacement] | None = None,
    ) -> Tensor:
        """The velocity [B, C, h, w] fp32 on the session's device, counted."""
        here = (latent.to(self.device), sigma.to(self.device), context.to(self.device))
        velocity: Tensor = self.model(
            *self.inputs.apply(*here, self.dtype),
            plan=self.plan,
            mask=None if mask is None else mask.to(self.device),
            dtype=self.dtype,
            replace=replace,
            observer=self.counters,
        )
        return velocity

    def report(self, *, steps: int, model_calls: int, result: Tensor) -> Report:
        """The report of a run that gave `result`."""
        return make_report(
            node_id="cli",
            engine="builtin",
            plan=self.plan,
            dtype=self.dtype,
            rows=self.counters.read(),
            threshold=self.counters.threshold,
            model_calls=model_calls,
            steps=steps,
            finite=bool(result.isfinite().all()),
            advise=self.advise,
            input_dtypes=self.inputs.to_json(),
            param_dtypes=self.overrides.record,
        )

    def advise(self, outcome: Outcome) -> Remedy | None:
        """The options that would have kept the run in range."""
        if outcome not in ("saturated", "broken"):
            return None
        match self.plan.mode:
            case "none" if self.dtype == torch.float16:
                return Remedy(message("remedy_mode", value="auto"))
            case "online" if self.dtype == torch.float16 and self.plan.smallest_scale / 16 >= self.plan.least_scale:
                return Remedy(message("remedy_smaller_c", value=factor_text(min(self.plan.factors.c) / 16)))
            case "online" | "weights" if self.dtype == torch.float16:
                return Remedy(message("remedy_mode", value="fp32_residual"))
            case _:
                return Remedy(message("remedy_dtype"))


def open_run(args: argparse.Namespace) -> Session:
    """Load the checkpoint named in the arguments and settle its plan. Raises MossError for what does not fit."""
    check_run_options(args)
    if args.mode == "none" and any(getattr(args, name) is not None for name in FACTOR_OPTIONS):
        print("Warning: --mode none applies no factors, so the ones given do nothing.", file=sys.stderr)
    dtype, device = parse_dtype(args.dtype), find_device(args.device)
    inputs = InputPolicy(args.latents_dtype, args.cond_dtype, args.timestep_dtype)
    rules = parse_rules(args.param_dtype)
    with open_checkpoint(args.checkpoint) as checkpoint:
        record, arch = checkpoint.record, checkpoint.arch
        stored = StoredFold(record, unfolded=record is not None and args.unfold == "auto")
        skips(getattr(args, "skip", None) or "", arch.depth)  # refused before the load, which can take minutes
        overrides = apply_rules(
            rules, checkpoint.names(), lambda name: stored_dtype(name, dtype, arch.names), arch.names
        )
        plan = plan_for(
            args.mode,
            half=dtype == torch.float16,
            stored=stored,
            factors=factors_from(args),
            eps=args.eps,
            clamp=args.clamp,
        )
        plan.blocks(arch.depth)
        model = load_model(checkpoint, dtype, device, unfold=stored.unfolded, overrides=overrides)
    counters = Counters(site_names(arch.text_blocks, arch.depth), args.threshold)
    return Session(model, plan, dtype, device, counters, inputs, overrides)


def find_device(name: str) -> torch.device:
    """The torch device of that name; MossError when it cannot be used here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()  # a device that holds no numbers ("meta") is of no use
    except (RuntimeError, AssertionError):
        raise MossError(f"The device {name!r} cannot be used here: try cpu, cuda or mps.") from None
    return device


def check_size(width: int, height: int) -> None:
    """MossError for a size in pixels that no latent has."""
    for name, value in (("width", width), ("height", height)):
        if not 16 <= value <= MAX_PIXELS or value % 16:
            raise MossError(f"The {name} must be a multiple of 16 pixels from 16 to {MAX_PIXELS}, not {value}.")


def skips(text: str, depth: int) -> dict[int, BlockReplacement]:
    """`22,24` as replacements; MossError for what is no block of this model."""
    found: dict[int, BlockReplacement] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        if not part.isdecimal() or int(part) >= depth:
            raise MossError(f"--skip names block {part!r}, but this model has blocks 0 to {depth - 1}.")
        found[int(part)] = skip_block
    return found


def check_outputs(*targets: str | None, inputs: Iterable[str | None] = (), overwrite: bool = True) -> None:
    """MossError before the work starts when one of the files could not be written after it.

    Nor may a result take the place of what the command reads (``inputs``), or of another result.
    """
    taken: set[Path] = set()
    for target in map(Path, filter(None, targets)):
        check_target(target, overwrite)
        if any(_holds(Path(name), target) for name in inputs if name):
            raise MossError(f"{target} is what this command reads: choose another name for the result.")
        if target.resolve() in taken:
            raise MossError(f"{target} is named for two results: give each its own.")
        taken.add(target.resolve())


def check_results(*targets: str | None, inputs: Iterable[str | None] = ()) -> None:
    """`check_outputs` for results, which are written over earlier ones: MossError where a model would be lost."""
    check_outputs(*targets, inputs=inputs)
    for target in filter(None, targets):
        if Path(target).is_file() and holds_model(Path(target)):
            raise MossError(f"{target} is a MOSS-Image model, which a result must not replace: choose another name.")


def _holds(source: Path, target: Path) -> bool:
    """Whether ``target`` is the file ``source``, or lies in the folder ``source``."""
    if not (source.exists() and target.exists()):
        return False
    return source.resolve() in target.resolve().parents if source.is_dir() else target.samefile(source)


def write_tensors(file: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write results, replacing what is there."""
    save_tensors(file, tensors, metadata, overwrite=True)


def show_result(found: dict[str, Any], lines: Iterable[str], *, out: str | None, as_json: bool) -> None:
    """Write a result as JSON where a file was named, and print it: as JSON, else as the lines for a person."""
    write_report(out, found)
    if as_json:
        print_json(found)
    else:
        print("\n".join(lines))


def show_run(report: Report, written: str, args: argparse.Namespace) -> None:
    """What a run ended with: the report where one was asked for, its verdict first for a person, its warnings last."""
    found = report.to_json()
    seen = "  ·  ".join(filter(None, (fact(found, bars_of(found)), counts(found))))
    lines = [title(found), seen, f"{setup(found)}  ·  wrote {written}"]
    show_result(found, lines, out=args.report, as_json=args.json)
    for text in report.warnings:
        print(f"Warning: {text}", file=sys.stderr)


def write_report(file: str | None, report: Mapping[str, Any]) -> None:
    """Write the report as JSON where one was asked for."""
    if file:
        with new_file(file, overwrite=True) as write:
            write((json.dumps(report, indent=1, allow_nan=False) + "\n").encode())
