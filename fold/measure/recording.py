"""A run of the model, step by step: recorded, saved as safetensors, read again on another machine or by another tool.

File: `steps.000.x`, `.cond`, `.uncond`, `.guided` [B, C, h, w] fp32 per step, `sigmas` [steps + 1], `context` and
`negative` [1 or B, T, text_dim] with their masks, and the facts as JSON under `moss_fp16_run` in the metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.header import read_header
from ..errors import MossCancelledError, MossError
from ..files import save_tensors
from .sampling import Velocity

KEY = "moss_fp16_run"
SCHEMA = "moss_fp16.run/1"


@dataclass(frozen=True)
class Step:
    """One step: its noise levels, the latent the model was given, and what it answered; all [B, C, h, w] on the CPU."""

    sigma: float
    sigma_next: float
    x: Tensor
    cond: Tensor
    uncond: Tensor | None = None

    def guided(self, cfg: float) -> Tensor:
        """uncond + cfg (cond - uncond), fp32; cond where there is no negative."""
        if self.uncond is None:
            return self.cond.float()
        return self.uncond.float() + cfg * (self.cond.float() - self.uncond.float())


@dataclass(frozen=True)
class RecordedRun:
    """All steps of a run. conditioning: `context`, `negative` and their masks, by name. info: facts for people."""

    steps: tuple[Step, ...]
    cfg: float = 1.0
    conditioning: Mapping[str, Tensor] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def sigmas(self) -> list[float]:
        """Of all steps, and the one after the last."""
        return [step.sigma for step in self.steps] + [self.steps[-1].sigma_next]


@torch.no_grad()
def record_run(
    velocity: Velocity,
    latents: Tensor | Sequence[Tensor],
    sigmas: Sequence[float],
    *,
    cfg: float = 1.0,
    walk: bool = True,
    conditioning: Mapping[str, Tensor] | None = None,
    info: dict[str, Any] | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    cancel: Callable[[], bool] | None = None,
) -> RecordedRun:
    """Run the model at each of `sigmas` but the last, which is only where the last step leads.

    latents: the first step's latent [B, C, h, w] (at sigma 1 the noise), from which Euler steps lead on, or with `walk`
    off the latent of every step; or one latent per step, such as another run's. At cfg 1 there is no negative call.
    """
    check_sigmas(sigmas)
    if not math.isfinite(cfg):
        raise MossError(f"The guidance scale must be a finite number, not {cfg}.")
    given = None if isinstance(latents, Tensor) else list(latents)
    if given is not None and len(given) != len(sigmas) - 1:
        raise MossError(f"{len(sigmas) - 1} steps need as many latents, not {len(given)}.")
    x = latents.to(device, torch.float32) if isinstance(latents, Tensor) else torch.empty(0)
    steps: list[Step] = []
    for index, (sigma, after) in enumerate(pairwise(sigmas)):
        if cancel is not None and cancel():
            raise MossCancelledError("The run was cancelled.")
        x = x if given is None else given[index].to(device, torch.float32)
        level = torch.full((x.shape[0],), sigma, device=device)
        answers = [velocity(x, level, branch) for branch in (("cond",) if cfg == 1.0 else ("cond", "uncond"))]
        kept = [answer.detach().float().cpu() for answer in answers]
        step = Step(sigma, after, x.detach().cpu(), kept[0], kept[1] if len(kept) > 1 else None)
        steps.append(step)
        if walk and given is None:
            x = x + step.guided(cfg).to(device) * (after - sigma)
        if progress is not None:
            progress(index + 1, len(sigmas) - 1)
    return RecordedRun(tuple(steps), cfg, dict(conditioning or {}), dict(info or {}))


def check_sigmas(sigmas: Sequence[float]) -> None:
    """MossError unless there are two or more, each in 0..1, all but the last above 0, falling."""
    if len(sigmas) < 2 or not all(0.0 < sigma <= 1.0 for sigma in sigmas[:-1]) or not 0.0 <= sigmas[-1] <= 1.0:
        raise MossError("The sigmas of a run must be at most 1 and above 0 (the last may be 0).")
    if any(after >= before for before, after in pairwise(sigmas)):
        raise MossError("The sigmas of a run must fall from step to step.")


def save_run(file: str | Path, run: RecordedRun, *, overwrite: bool = True) -> None:
    """Write the run whole or not at all; MossError when it cannot be written."""
    tensors: dict[str, Tensor] = {"sigmas": torch.tensor(run.sigmas, dtype=torch.float32)}
    for index, step in enumerate(run.steps):
        name = f"steps.{index:03d}"
        tensors |= {f"{name}.x": step.x, f"{name}.cond": step.cond, f"{name}.guided": step.guided(run.cfg)}
        if step.uncond is not None:
            tensors[f"{name}.uncond"] = step.uncond
    tensors |= {name: tensor.float() for name, tensor in run.conditioning.items()}
    facts = {"schema": SCHEMA, "cfg": run.cfg, "info": run.info}
    # safetensors refuses tensors that share memory
    save_tensors(
        file, {name: tensor.clone() for name, tensor in tensors.items()}, {KEY: json.dumps(facts)}, overwrite=overwrite
    )


def is_run(file: str | Path) -> bool:
    """Whether `file` is a saved run; False for anything that cannot be read."""
    path = Path(file)
    try:
        return path.is_file() and KEY in read_header(path).metadata
    except MossError:
        return False


def load_run(file: str | Path) -> RecordedRun:
    """Read what `save_run` wrote. Raises MossError, naming the file, for anything else."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(file)
    metadata = read_header(path).metadata
    if KEY not in metadata:
        raise MossError(f"{path.name} is not a saved run: write one with compare --save.")
    try:
        facts = json.loads(metadata[KEY])
        if facts["schema"] != SCHEMA:
            raise MossError(f"{path.name} holds {str(facts['schema'])[:40]!r}, but {SCHEMA} is needed.")
        cfg, info = float(facts["cfg"]), dict(facts["info"])
        tensors = load_file(path)
        sigmas = tensors.pop("sigmas").tolist()
        check_sigmas(sigmas)
        steps = tuple(_step(tensors, index, sigmas) for index in range(len(sigmas) - 1))
    except (KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        if isinstance(error, MossError):
            raise
        raise MossError(f"{path.name} is not a whole saved run ({error}): record it again.") from None
    conditioning = {name: tensor for name, tensor in tensors.items() if not name.startswith("steps.")}
    return RecordedRun(steps, cfg, conditioning, info)


def _step(tensors: Mapping[str, Tensor], index: int, sigmas: Sequence[float]) -> Step:
    name = f"steps.{index:03d}"
    x, cond, uncond = tensors[f"{name}.x"], tensors[f"{name}.cond"], tensors.get(f"{name}.uncond")
    if x.dim() != 4 or any(other.shape != x.shape for other in (cond, uncond) if other is not None):
        raise ValueError(f"the tensors of {name} differ in shape")
    return Step(sigmas[index], sigmas[index + 1], x, cond, uncond)
