"""``compare``: how far one way of running a model is from another, or from a run saved elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .common import add_command, add_json_option

if TYPE_CHECKING:
    from torch import Tensor

    from ..measure.recording import RecordedRun
    from .common import Subparsers

#: Options that say what the model is given. With --against all of it comes from the saved run.
INPUTS = (
    "cond",
    "uncond",
    "io",
    "latent",
    "context",
    "mask",
    "size",
    "batch",
    "steps",
    "sigmas",
    "cfg",
    "seed",
    "skip",
)
#: The reference's run options, apart from its dtype and mode.
PLAIN: dict[str, Any] = {
    "c": None, "s_attn": None, "s_ffn": None, "factors": None, "eps": None, "clamp": None, "unfold": "auto",
    "param_dtype": [], "latents_dtype": "default", "cond_dtype": "default", "timestep_dtype": "default",
}  # fmt: skip


def add(subparsers: Subparsers) -> None:
    """Declare the command."""
    from .running import add_run_options

    parser = add_command(
        subparsers, "compare", run, "Run a model in two ways on the same inputs and say how far apart they are."
    )
    parser.add_argument("checkpoint", help="a .safetensors file or an HF folder; with --against a saved run as well")
    add_run_options(parser)
    held = parser.add_argument_group("what it is compared with")
    held.add_argument(
        "--reference", metavar="CKPT", help="another checkpoint (default: the same one; with --save: none)"
    )
    held.add_argument("--reference-dtype", choices=("fp32", "fp16", "bf16"), default="fp32", help="default fp32")
    held.add_argument(
        "--reference-mode", choices=("auto", "none", "online", "fp32_residual"), default="auto", help="default auto"
    )
    held.add_argument("--against", metavar="RUN", help="a run that --save wrote, on this machine or another")
    held.add_argument("--save", metavar="RUN", help="write this model's run: inputs and outputs of every step")
    inputs = parser.add_argument_group("inputs (with --against they come from the saved run)")
    inputs.add_argument("--cond", metavar="FILE", help="safetensors with `context` [1, T, text_dim]: walk from noise")
    inputs.add_argument("--uncond", metavar="FILE", help="the same for the negative prompt (default: zeros, one token)")
    inputs.add_argument("--size", metavar="WxH", help="pixels (default 1024x1024)")
    inputs.add_argument("--batch", type=int, help="images at once (default 1)")
    inputs.add_argument("--steps", type=int, help="steps of the walk (default 8)")
    inputs.add_argument("--io", metavar="FILE", help="safetensors with one latent that is used at every sigma")
    inputs.add_argument("--latent", metavar="KEY", help="the latent [B, C, h, w] in it")
    inputs.add_argument("--context", metavar="KEY", help="the text states [B, T, text_dim] in it")
    inputs.add_argument("--mask", metavar="KEY", help="the text mask [B, T] in it")
    inputs.add_argument("--sigmas", help="falling noise levels, such as 1,0.5,0.02 (default: those of the steps)")
    inputs.add_argument("--cfg", type=float, help="guidance scale; 1 compares without a negative (default 1)")
    inputs.add_argument("--seed", type=int, help="noise seed (default 0)")
    inputs.add_argument("--skip", metavar="BLOCKS", help="joint blocks the negative pass leaves out, such as 22")
    parser.add_argument(
        "--noise-level", type=float, default=0.7, help="of the SDE step for log-probabilities; 0 for none (default 0.7)"
    )
    parser.add_argument("--out", metavar="FILE", help="write the comparison as JSON")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Compare."""
    from ..errors import MossError
    from ..measure.compare import check_noise_level, compare_runs, comparison_table
    from ..measure.recording import is_run, load_run, save_run
    from .running import check_results, show_result

    read = (args.checkpoint, args.reference, args.against, args.cond, args.uncond, args.io, args.factors)
    check_results(args.save, args.out, inputs=read)
    check_noise_level(args.noise_level)
    if args.against:
        _refuse_inputs(args)
    reference = load_run(args.against) if args.against else None
    if is_run(args.checkpoint):
        if reference is None or args.save:
            raise MossError(f"{args.checkpoint} is a saved run: give the one to compare it with by --against.")
        other = load_run(args.checkpoint)
    else:
        reference, other = _run_both(args, reference)
    if args.save:
        save_run(args.save, other)
    if reference is None:
        print(f"{args.save}: {len(other.steps)} steps saved; hold another run against it with --against.")
        return 0
    found = compare_runs(reference, other, noise_level=args.noise_level, seed=args.seed or 0).to_json()
    show_result(found, comparison_table(found), out=args.out, as_json=args.json)
    return 0


def _refuse_inputs(args: argparse.Namespace) -> None:
    from ..errors import MossError

    given = [f"--{name}" for name in INPUTS if getattr(args, name) is not None]
    given += ["--reference"] if args.reference else []
    if given:
        raise MossError(f"With --against the inputs come from the saved run: leave {', '.join(given)} out.")


def _run_both(args: argparse.Namespace, saved: RecordedRun | None) -> tuple[RecordedRun | None, RecordedRun]:
    """The reference (None where only --save was asked for) and the model's own run, one model in memory at a time."""
    if saved is not None:
        return saved, _run_on(args, saved)
    if args.save and not args.reference:
        return None, _run_anew(args)
    plain = {"checkpoint": args.reference or args.checkpoint, "dtype": args.reference_dtype}
    reference = _run_anew(argparse.Namespace(**{**vars(args), **PLAIN, **plain, "mode": args.reference_mode}))
    return reference, _run_on(args, reference)


def _run_on(args: argparse.Namespace, saved: RecordedRun) -> RecordedRun:
    """The model on another run's inputs."""
    import torch

    from ..errors import MossError
    from .running import open_run

    session = open_run(args)
    arch, parts = session.arch, saved.conditioning
    batch, channels = saved.steps[0].x.shape[:2]
    for name in ("context", "negative"):
        tensor = parts.get(name, torch.zeros(1, 1, arch.text_dim))
        if tensor.dim() != 3 or tensor.shape[0] not in (1, batch) or tensor.shape[2] != arch.text_dim:
            raise MossError(f"{name} of the saved run has shape {list(tensor.shape)}, which does not fit this model.")
    if "context" not in parts or channels != arch.latent_channels:
        raise MossError("The saved run's inputs do not fit this model: its latents or its text states differ.")
    return _record(
        args, session, [step.x for step in saved.steps], saved.sigmas, saved.cfg, parts, str(saved.info.get("skip", ""))
    )


def _run_anew(args: argparse.Namespace) -> RecordedRun:
    """The model on the inputs of the arguments."""
    from ..errors import MossError
    from ..measure.conditioning import pick, pick_mask, read_conditioning, read_tensors
    from ..measure.sampling import SampleSettings, flow_sigmas, initial_noise
    from ..parsing import parse_numbers, parse_sizes
    from .running import MAX_BATCH, check_size, open_run

    _check_inputs(args)
    steps, cfg = 8 if args.steps is None else args.steps, 1.0 if args.cfg is None else args.cfg
    settings = SampleSettings(steps, cfg, seed=args.seed or 0)
    sigmas = [*parse_numbers(args.sigmas, "--sigmas"), 0.0] if args.sigmas else flow_sigmas(settings.steps).tolist()
    sizes = parse_sizes(args.size or "1024x1024", "--size")
    if len(sizes) != 1:
        raise MossError(f"--size takes one size, not {len(sizes)}.")
    width, height = sizes[0]
    check_size(width, height)
    batch = 1 if args.batch is None else args.batch
    if not 1 <= batch <= MAX_BATCH:
        raise MossError(f"--batch must be 1 to {MAX_BATCH}, not {batch}.")
    tensors = read_tensors(args.io) if args.io else {}
    session = open_run(args)
    arch = session.arch
    parts: dict[str, Tensor] = {}
    if args.io:
        latent = pick(tensors, args.latent, args.io, ("B", arch.latent_channels, "h", "w"))
        parts["context"] = pick(tensors, args.context, args.io, (latent.shape[0], "T", arch.text_dim))
        if args.mask:
            parts["context_mask"] = pick_mask(tensors, args.mask, args.io, tuple(parts["context"].shape[:2]))
    else:
        latent = initial_noise((batch, arch.latent_channels, height // 16, width // 16), settings.seed)
        _keep(parts, "context", *read_conditioning(args.cond, 1, arch.text_dim))
    if args.uncond:
        _keep(parts, "negative", *read_conditioning(args.uncond, 1, arch.text_dim))
    return _record(args, session, latent, sigmas, settings.cfg, parts, args.skip or "")


def _check_inputs(args: argparse.Namespace) -> None:
    """MossError unless the inputs are given in one of the two ways, and nothing of the other with it."""
    from ..errors import MossError

    if (args.cond is None) == (args.io is None):
        raise MossError("Give the inputs with --cond (a walk from noise), or with --io, --latent and --context.")
    if args.io and not (args.latent and args.context and args.sigmas):
        raise MossError("--io needs --latent, --context and --sigmas.")
    unused: tuple[str, ...] = ("size", "batch", "steps") if args.io else ("latent", "context", "mask")
    unused += ("steps",) if args.sigmas and not args.io else ()
    given = ", ".join(f"--{name}" for name in unused if getattr(args, name) is not None)
    if given:
        raise MossError(f"{given} does not go with {'--io' if args.io else '--sigmas' if args.sigmas else '--cond'}.")


def _keep(parts: dict[str, Tensor], name: str, context: Tensor, mask: Tensor | None) -> None:
    parts[name] = context
    if mask is not None:
        parts[f"{name}_mask"] = mask


def _record(
    args: argparse.Namespace,
    session: Any,
    latents: Tensor | list[Tensor],
    sigmas: list[float],
    cfg: float,
    parts: Mapping[str, Tensor],
    skip: str,
) -> RecordedRun:
    """Run the model step by step, with the conditioning of `parts`."""
    import torch

    from ..dtypes import dtype_name
    from ..measure.recording import record_run
    from ..report.report import AppliedFactors
    from .progress import Progress
    from .running import skips

    replace = {"cond": {}, "uncond": skips(skip, session.arch.depth)}
    empty = torch.zeros(1, 1, session.arch.text_dim)

    def velocity(x: Tensor, sigma: Tensor, branch: str) -> Tensor:
        name = "context" if branch == "cond" else "negative"
        context, mask = parts.get(name, empty), parts.get(f"{name}_mask")
        rows = (x.shape[0], -1)
        keep = None if mask is None else (mask != 0).expand(*rows)
        answer: Tensor = session.call(x, sigma, context.expand(*rows, -1), keep, replace[branch])
        return answer

    info = {
        "checkpoint": str(args.checkpoint),
        "compute_dtype": dtype_name(session.dtype),
        "mode": session.plan.mode,
        "factors": AppliedFactors.of(session.plan).to_json(),
        "device": str(session.device),
        "skip": skip,
    }
    with Progress(f"Running in {info['compute_dtype']}") as progress:
        return record_run(
            velocity,
            latents,
            sigmas,
            cfg=cfg,
            walk=args.io is None,
            conditioning=parts,
            info=info,
            device=session.device,
            progress=progress,
        )
