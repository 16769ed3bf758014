"""The differences of two runs of the model, per step and overall, in fp32.

Both runs see the same inputs: the other one is given the reference's latents, so that each step's difference is its
own and not what the steps before it added up to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import MossError
from . import NOISE_LEVEL
from .recording import RecordedRun, Step

SCHEMA = "moss_fp16.compare/1"


@dataclass(frozen=True)
class Difference:
    """What one or several pairs of outputs differ by, as sums that add up.

    products: the difference with itself, the reference with itself, the value with itself, value with reference.
    """

    count: int
    abs_sum: float
    max_abs: float
    reference_max: float
    products: tuple[float, float, float, float]

    def __add__(self, other: Difference) -> Difference:
        a, b = self.products, other.products
        return Difference(
            self.count + other.count,
            self.abs_sum + other.abs_sum,
            _larger(self.max_abs, other.max_abs),
            _larger(self.reference_max, other.reference_max),
            (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]),
        )

    @property
    def finite(self) -> bool:
        """Whether both outputs were finite everywhere."""
        return all(math.isfinite(value) for value in (self.abs_sum, self.max_abs, *self.products))

    @property
    def relative_l2(self) -> float:
        """|value - reference| / |reference|."""
        difference, reference, *_ = self.products
        return _ratio(math.sqrt(difference), math.sqrt(reference))

    @property
    def cosine(self) -> float:
        """The cosine of the angle between both.

        Near 1 a quotient of products is lost in rounding, so there it is 1 - (|d|^2 - (|a| - |b|)^2) / (2 |a| |b|).
        """
        difference, reference, value, both = self.products
        if difference == 0.0:
            return 1.0
        a, b = math.sqrt(reference), math.sqrt(value)
        if a * b == 0.0:
            return 0.0
        if difference < 0.01 * a * b:
            return 1.0 - (difference - (a - b) ** 2) / (2.0 * a * b)
        return max(-1.0, min(both / (a * b), 1.0))

    def to_json(self) -> dict[str, float | None]:
        """The metrics; all null where an output was not finite."""
        metrics = {
            "model_output_mean_abs_diff": self.abs_sum / self.count,
            "model_output_max_abs_diff": self.max_abs,
            "model_output_rel_max": _ratio(self.max_abs, self.reference_max),
            "relative_l2": self.relative_l2 if self.finite else math.nan,
            "cosine": self.cosine if self.finite else math.nan,
        }
        return {name: value if self.finite and math.isfinite(value) else None for name, value in metrics.items()}


def difference(value: Tensor, reference: Tensor) -> Difference:
    """Compare two outputs of one shape (one wait for the device). Raises MossError when the shapes differ."""
    if value.shape != reference.shape:
        raise MossError(f"Outputs of shape {list(value.shape)} and {list(reference.shape)} cannot be compared.")
    value, reference = value.float(), reference.float()
    apart = value - reference
    norms = [torch.linalg.vector_norm(tensor) for tensor in (apart, reference, value)]
    both = (value * reference).sum()
    scalars = torch.stack((apart.abs().sum(), apart.abs().amax(), reference.abs().amax(), *norms, both)).tolist()
    abs_sum, max_abs, reference_max, d, r, v, both_sum = scalars
    return Difference(value.numel(), abs_sum, max_abs, reference_max, (d * d, r * r, v * v, both_sum))


def sde_std(sigma: float, sigma_next: float, noise_level: float) -> float:
    """Flow-GRPO's sigma_t = a sqrt(t / (1 - t)) (Liu et al. 2025, arXiv:2505.05470; t = sigma, a the noise level).

    At t = 1, where it is infinite, the denominator is taken at the next sigma, as Flow-GRPO's own sampler does.
    """
    return noise_level * math.sqrt(sigma / (1.0 - (sigma_next if sigma >= 1.0 else sigma)))


def log_prob_change(
    value: Tensor, reference: Tensor, sigma: float, sigma_next: float, noise_level: float, noise: Tensor
) -> Tensor:
    """log p_value(x') - log p_reference(x') per sample [B] for a transition x' drawn under the reference.

    Flow-GRPO's step from x at sigma to x' at sigma_next is Gaussian, with dt = sigma_next - sigma < 0, standard
    deviation s = sigma_t sqrt(-dt) and mean
        mu(v) = x (1 + sigma_t^2 / (2 sigma) dt) + v (1 + sigma_t^2 (1 - sigma) / (2 sigma)) dt.
    With x' = mu(reference) + s noise and d = (mu(value) - mu(reference)) / s the change is noise d - d^2 / 2, averaged
    over all but the batch (as Flow-GRPO averages log p). Taken so, it is exactly 0 for equal velocities.
    """
    std, dt = sde_std(sigma, sigma_next, noise_level), sigma_next - sigma
    factor = (1.0 + std * std * (1.0 - sigma) / (2.0 * sigma)) * dt / (std * math.sqrt(-dt))
    d = (value.float() - reference.float()) * factor
    return (noise * d - d * d / 2.0).flatten(1).mean(dim=1)


@dataclass(frozen=True)
class StepComparison:
    """One step: the conditional output, the guided one where there is guidance, and the SDE step of the latter."""

    step: int
    sigma: float
    input_relative_l2: float
    cond: Difference
    guided: Difference | None
    log_prob: float | None
    ratio: float | None

    def to_json(self, cfg: float) -> dict[str, Any]:
        return {
            "step": self.step,
            "sigma": self.sigma,
            "input_relative_l2": self.input_relative_l2 if math.isfinite(self.input_relative_l2) else None,
            **_metrics(self.cond, self.guided, cfg),
            "log_prob_mean_abs_diff": self.log_prob,
            "ratio_abs_minus_1": self.ratio,
        }


@dataclass(frozen=True)
class Comparison:
    """Two runs compared: a `StepComparison` per step, and how each was run."""

    steps: tuple[StepComparison, ...]
    cfg: float
    noise_level: float
    reference: dict[str, Any]
    other: dict[str, Any]

    @property
    def cond(self) -> Difference:
        """Of the conditional output over all steps."""
        return _total([step.cond for step in self.steps])

    @property
    def guided(self) -> Difference | None:
        """Of the guided output over all steps; None without guidance."""
        found = [step.guided for step in self.steps if step.guided is not None]
        return _total(found) if found else None

    def to_json(self) -> dict[str, Any]:
        """`moss_fp16.compare/1`."""
        return {
            "schema": SCHEMA,
            "reference": self.reference,
            "other": self.other,
            "guidance_scale": self.cfg,
            "noise_level": self.noise_level,
            "overall": {
                **_metrics(self.cond, self.guided, self.cfg),
                "log_prob_mean_abs_diff": _mean([step.log_prob for step in self.steps]),
                "ratio_abs_minus_1": _mean([step.ratio for step in self.steps]),
            },
            "steps": [step.to_json(self.cfg) for step in self.steps],
        }


def compare_runs(
    reference: RecordedRun, other: RecordedRun, *, noise_level: float = NOISE_LEVEL, seed: int = 0
) -> Comparison:
    """Compare `other` with `reference`, step by step. noise_level: of the SDE step, 0 for none; seed: of its noise.

    Raises MossError when their steps, shapes or guidance scales differ.
    """
    check_noise_level(noise_level)
    _check_alike(reference, other)
    draw = torch.Generator().manual_seed(seed)
    steps = tuple(
        _compare_step(index, a, b, reference.cfg, noise_level, draw)
        for index, (a, b) in enumerate(zip(reference.steps, other.steps, strict=True))
    )
    return Comparison(steps, reference.cfg, noise_level, reference.info, other.info)


def check_noise_level(noise_level: float) -> None:
    """MossError for what is no noise level of an SDE step."""
    if not 0.0 <= noise_level < math.inf:
        raise MossError(f"The noise level must be a finite number from 0 up, not {noise_level}.")


def _compare_step(
    index: int, reference: Step, other: Step, cfg: float, noise_level: float, draw: torch.Generator
) -> StepComparison:
    cond = difference(other.cond, reference.cond)
    a, b = reference.guided(cfg), other.guided(cfg)
    guided = difference(b, a) if reference.uncond is not None else None
    log_prob = ratio = None
    if noise_level > 0.0 and reference.sigma_next < reference.sigma:
        noise = torch.randn(a.shape, generator=draw)
        change = log_prob_change(b, a, reference.sigma, reference.sigma_next, noise_level, noise)
        log_prob = _finite(float(change.abs().mean()))
        ratio = _finite(float(torch.expm1(change).abs().mean()))
    inputs = difference(other.x, reference.x).relative_l2
    return StepComparison(index, reference.sigma, inputs, cond, guided, log_prob, ratio)


def _check_alike(reference: RecordedRun, other: RecordedRun) -> None:
    if len(reference.steps) != len(other.steps):
        raise MossError(f"The runs have {len(reference.steps)} and {len(other.steps)} steps: record them alike.")
    if reference.cfg != other.cfg:
        raise MossError(
            f"The runs were guided at {reference.cfg:g} and {other.cfg:g}, which scales their differences: "
            "record them at one scale."
        )
    for index, (a, b) in enumerate(zip(reference.steps, other.steps, strict=True)):
        if abs(a.sigma - b.sigma) > 1e-6:
            raise MossError(f"Step {index} is at sigma {a.sigma:g} in one run and {b.sigma:g} in the other.")
        if (a.uncond is None) != (b.uncond is None):
            raise MossError("One of the runs has a negative output and the other has none: record them alike.")


def _metrics(cond: Difference, guided: Difference | None, cfg: float) -> dict[str, Any]:
    """The scale stands beside what it multiplied: a guided difference is about that much larger than a plain one."""
    return {
        "cond": cond.to_json(),
        "guidance_scale": cfg if guided is not None else None,
        "guided": guided.to_json() if guided is not None else None,
    }


def _total(parts: Sequence[Difference]) -> Difference:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def _ratio(above: float, below: float) -> float:
    return above / below if below else (0.0 if above == 0.0 else math.inf)


def _larger(a: float, b: float) -> float:
    return a if math.isnan(a) or a >= b else b


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


_COLUMNS = {
    "relative_l2": "relative L2",
    "model_output_mean_abs_diff": "mean |diff|",
    "model_output_max_abs_diff": "max |diff|",
    "model_output_rel_max": "rel. max",
    "cosine": "1 - cosine",
}


def comparison_table(found: Mapping[str, Any]) -> list[str]:
    """A `moss_fp16.compare/1` for a person: a line per step and one for all, of the guided output where there is one.

    "-" stands for what is not finite or was left out.
    """
    scale, guided = found["guidance_scale"], found["overall"]["guided"] is not None
    lines = [f"{_described(found['other'])} against {_described(found['reference'])}"]
    if guided:
        lines.append(f"guided at scale {scale:g}, uncond + {scale:g} (cond - uncond): differences grow up to as much")
    lines.append(f"{'sigma':<8}" + "".join(f"{head:>13}" for head in (*_COLUMNS.values(), "|d log p|", "|ratio - 1|")))
    for row in (*found["steps"], found["overall"]):
        metrics = row["guided" if guided else "cond"]
        values = [metrics[name] for name in _COLUMNS]
        values[-1] = None if values[-1] is None else 1.0 - values[-1]
        values += [row["log_prob_mean_abs_diff"], row["ratio_abs_minus_1"]]
        cells = "".join(f"{'-' if value is None else format(value, '.3e'):>13}" for value in values)
        lines.append(f"{row.get('sigma', 'all')!s:.7}".ljust(8) + cells)
    lines.append(f"log p and ratio: of an SDE step at noise level {found['noise_level']:g}")
    return lines


def _described(info: Mapping[str, Any]) -> str:
    return str(info.get("name") or f"{info.get('compute_dtype', 'a run')} {info.get('mode', '')}".strip())
