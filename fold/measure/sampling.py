"""Flow-matching Euler, for runs without ComfyUI.

The same noise, sigmas and update as ComfyUI's `euler` sampler with the `simple` scheduler and shift 5, so a headless
latent equals the node's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MossError

#: (latent [B, C, h, w], sigma [B], "cond" or "uncond") -> velocity
Velocity = Callable[[Tensor, Tensor, str], Tensor]
#: (steps done, steps in all, sigma)
Progress = Callable[[int, int, float], None]

SHIFT = 5.0
TABLE = 1000


@dataclass(frozen=True)
class SampleSettings:
    """steps, cfg and shift as MOSS-Image ships them; noise comes from `seed` on the CPU."""

    steps: int = 50
    cfg: float = 3.0
    shift: float = SHIFT
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= TABLE:
            raise MossError(f"The number of steps must be 1 to {TABLE}, not {self.steps}.")
        if not 0 < self.shift < math.inf:
            raise MossError(f"The shift must be a finite number above 0, not {self.shift}.")
        if not math.isfinite(self.cfg):
            raise MossError(f"The CFG must be a finite number, not {self.cfg}.")
        if not 0 <= self.seed < 2**64:
            raise MossError(f"The seed must be 0 to 2^64 - 1, not {self.seed}.")


def flow_sigmas(steps: int, shift: float = SHIFT) -> Tensor:
    """[steps + 1] fp32 from 1 to 0: sigma = shift u / (1 + (shift - 1) u), even places of a table of 1000."""
    u = torch.arange(1, TABLE + 1, dtype=torch.float32) / TABLE
    table = shift * u / (1 + (shift - 1) * u)
    picks = [TABLE - 1 - int(i * (TABLE / steps)) for i in range(steps)]
    return torch.cat((table[picks], torch.zeros(1)))


def initial_noise(shape: tuple[int, int, int, int], seed: int) -> Tensor:
    """[B, C, h, w] fp32 normal noise from a CPU generator: the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def guided(x: Tensor, sigma: Tensor, velocity: Velocity, cfg: float) -> Tensor:
    """The guided clean estimate x0 = x - sigma v, uncond + cfg (cond - uncond); at cfg 1 one call."""
    wide = sigma.view(-1, 1, 1, 1)
    cond = x - velocity(x, sigma, "cond").float() * wide
    if cfg == 1.0:
        return cond
    uncond = x - velocity(x, sigma, "uncond").float() * wide
    return uncond + (cond - uncond) * cfg


def euler(
    velocity: Velocity,
    noise: Tensor,
    settings: SampleSettings,
    progress: Progress | None = None,
) -> Tensor:
    """The latent [B, C, h, w] fp32 after all steps, from pure noise at sigma 1."""
    sigmas = flow_sigmas(settings.steps, settings.shift).to(noise.device)
    levels = sigmas.tolist()
    x = noise * sigmas[0]
    for i in range(settings.steps):
        sigma = sigmas[i].expand(noise.shape[0])
        x0 = guided(x, sigma, velocity, settings.cfg)
        x = x + (x - x0) / sigmas[i] * (sigmas[i + 1] - sigmas[i])
        if progress is not None:
            progress(i + 1, settings.steps, levels[i])
    return x
