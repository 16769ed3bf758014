"""What a model's activations reach, and the factors that bring them into fp16's range.

The forward runs in fp32, where nothing overflows, over every prompt, size and sigma asked for. The latents are those of
a denoising run from seeded noise through the sigmas, so that the low ones are met with an image in them, not noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..arch import MossArch
from ..errors import MossCancelledError, MossError
from ..model.forward import Attention, run_dit, sdpa
from ..model.observer import Kind, Observer
from ..names import HEAD_MODULATION, MODULATION
from ..scaling.factors import SCHEMA, TARGET_PEAK, Factors, factor_for_peak, factor_text
from ..scaling.plan import FP16_MAX, StreamPlan
from .sampling import initial_noise

#: Elements of the logits held at a time.
LOGITS_CHUNK = 2**22
PIXELS = 16
_MAX_SIZE = 16384

OnProgress = Callable[[int, int], None]
Cancel = Callable[[], bool]
#: (kind, layer) -> largest |x|
#: What an observer measured: a kind that the forward shows, or the name of what follows from one, and the layer.
Key = tuple[Kind | str, int]
Readings = dict[Key, float]


@dataclass(frozen=True)
class Prompt:
    """One conditioning: context [1, T, text_dim], mask [1, T] true where a token is real (None: everywhere)."""

    context: Tensor
    mask: Tensor | None = None
    name: str = ""

    def tokens(self) -> Tensor:
        """The real tokens alone, [1, T', text_dim]; a prompt of padding only keeps one zero token."""
        if self.mask is None:
            return self.context
        real = self.context[:, self.mask[0].to(torch.bool)]
        return real if real.shape[1] else torch.zeros_like(self.context[:, :1])


@dataclass(frozen=True)
class ProbeSettings:
    """sizes: (width, height) in pixels. sigmas: noise levels above 0, at most 1. target: where peaks shall end up."""

    sizes: tuple[tuple[int, int], ...] = ((1024, 1024),)
    sigmas: tuple[float, ...] = (1.0, 0.5, 0.02)
    seed: int = 0
    per_block: bool = False
    target: float = TARGET_PEAK

    def __post_init__(self) -> None:
        if not self.sizes or not self.sigmas:
            raise MossError("The probe needs at least one size and one sigma.")
        for size in self.sizes:
            if any(not PIXELS <= edge <= _MAX_SIZE or edge % PIXELS for edge in size):
                raise MossError(
                    f"The size {size[0]}x{size[1]} is not in multiples of 16 pixels from 16 to {_MAX_SIZE}."
                )
        for sigma in self.sigmas:
            if not 0.0 < sigma <= 1.0:
                raise MossError(f"A sigma of the probe must be above 0 and at most 1, not {sigma}.")
        if not 0 <= self.seed < 2**64:
            raise MossError(f"The seed must be 0 to 2^64 - 1, not {self.seed}.")
        if not 1.0 <= self.target <= FP16_MAX:
            raise MossError(f"The target of the peaks must be 1 to {FP16_MAX:g}, not {self.target}.")


@dataclass(frozen=True)
class BlockPeaks:
    """Largest |x| of one block. stream: after its attention and after its FFN; ffn_up_gate: None for text blocks."""

    name: str
    stream: float
    o: float
    ffn_down: float
    ffn_up_gate: float | None
    logits: float


@dataclass(frozen=True)
class Peaks:
    """Largest |x| over all runs. entry and text_entry: the streams before their first block; modulation: by row."""

    entry: float
    text_entry: float
    text: tuple[BlockPeaks, ...]
    joint: tuple[BlockPeaks, ...]
    modulation: Mapping[str, float] = field(default_factory=dict)

    @property
    def stream(self) -> float:
        """The largest |x| of the joint stream."""
        return max(self.entry, *(block.stream for block in self.joint))

    @property
    def text_stream(self) -> float:
        """The largest |x| of the text refiner's stream."""
        return max(self.text_entry, *(block.stream for block in self.text))

    def of(self, kind: str) -> float:
        """The largest |x| of "o", "ffn_down", "ffn_up_gate" or "logits" over the joint blocks."""
        values: list[float] = [getattr(block, kind) for block in self.joint]
        return max(values)


@dataclass(frozen=True)
class ProbeResult:
    """The peaks, the factors chosen from them, and one row per run."""

    factors: Factors
    peaks: Peaks
    settings: ProbeSettings
    arch: MossArch
    runs: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """`moss_fp16.factors/1`: c, s_attn and s_ffn first, as `Factors.from_json` reads them, then the reasons."""
        peaks = self.peaks
        gates = max(peaks.modulation[name] for name in ("gate_a", "gate_f"))
        return {
            "schema": SCHEMA,
            **self.factors.to_json(),
            "target": self.settings.target,
            "advice": list(advice(self)),
            "peaks": {
                "stream": peaks.stream,
                "text_stream": peaks.text_stream,
                **{kind: peaks.of(kind) for kind in ("o", "ffn_down", "ffn_up_gate", "logits")},
                "gates": gates,
                "modulation": max(peaks.modulation.values()),
            },
            "entry": {"stream": peaks.entry, "text_stream": peaks.text_entry},
            "modulation": dict(peaks.modulation),
            "blocks": [_row(block) for block in (*peaks.text, *peaks.joint)],
            "runs": list(self.runs),
            "seed": self.settings.seed,
            "model": {"dim": self.arch.dim, "depth": self.arch.depth},
        }


def _row(block: BlockPeaks) -> dict[str, Any]:
    row = {"name": block.name, "stream": block.stream, "o": block.o, "ffn_down": block.ffn_down}
    return row | {"ffn_up_gate": block.ffn_up_gate, "logits": block.logits}


class PeakObserver(Observer):
    """Largest |x| by kind and layer, kept on the device until `read`; asks `cancel` after every block."""

    wants_inner = True

    def __init__(self, text_blocks: int, cancel: Cancel | None = None) -> None:
        self.text_blocks, self.cancel = text_blocks, cancel
        self.found: dict[Key, Tensor] = {}
        self._queries: Tensor | None = None

    def stream(self, site: int, x: Tensor) -> None:
        if self.cancel is not None and self.cancel():
            raise MossCancelledError("The probe was cancelled.")
        joint = site - self.text_blocks
        self._see("stream" if joint >= 0 else "text_stream", joint if joint >= 0 else site, x)

    def inner(self, kind: Kind, layer: int, value: Tensor, scale: float) -> None:
        match kind:
            case Kind.Q | Kind.TEXT_Q:
                self._queries = value
            case Kind.K | Kind.TEXT_K:
                assert self._queries is not None
                name = "logits" if kind is Kind.K else "text_logits"
                self._keep((name, layer), largest_logit(self._queries, value))
                self._queries = None
            case _:
                self._see(kind, layer, value, scale)

    def modulation(self, row: str, value: Tensor) -> None:
        self._see(row, 0, value)

    def _see(self, kind: Kind | str, layer: int, value: Tensor, scale: float = 1.0) -> None:
        self._keep((kind, layer), largest(value) / scale)

    def _keep(self, key: Key, peak: Tensor) -> None:
        before = self.found.get(key)
        self.found[key] = peak if before is None else torch.maximum(before, peak)

    def read(self) -> Readings:
        """All peaks (one wait for the device). Raises MossError where one is not finite even in fp32."""
        values = torch.stack(list(self.found.values())).tolist()
        readings = dict(zip(self.found, values, strict=True))
        for (kind, layer), value in readings.items():
            if not math.isfinite(value):
                name = kind if isinstance(kind, str) else kind.name.lower()
                raise MossError(
                    f"The probe met NaN or infinity in {name} of block {layer}, in fp32: check the weights."
                )
        return readings


def largest(x: Tensor) -> Tensor:
    """max |x|, 0-dim fp32; NaN where one is in it."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float()


def largest_logit(q: Tensor, k: Tensor) -> Tensor:
    """max |q . k| * Dh^-1/2 over all pairs of q, k [B, H, S, Dh], 0-dim fp32, some rows of q at a time."""
    batch, heads, tokens, dim = q.shape
    rows = max(1, LOGITS_CHUNK // (batch * heads * tokens))
    turned = k.transpose(-1, -2)
    peaks = [largest(q[:, :, first : first + rows] @ turned) for first in range(0, tokens, rows)]
    return torch.stack(peaks).amax() * math.sqrt(1 / dim)


@torch.no_grad()
def probe(
    tree: Any,
    arch: MossArch,
    prompts: Sequence[Prompt],
    settings: ProbeSettings,
    *,
    device: torch.device | str = "cpu",
    plan: StreamPlan | None = None,
    attention: Attention = sdpa,
    progress: OnProgress | None = None,
    cancel: Cancel | None = None,
) -> ProbeResult:
    """Measure `tree` (any module tree with the official names whose layers cast to their input's dtype).

    plan: how the streams run; for weights that carry a fold, with `baked` set. progress(done, total) counts model
    calls; when cancel() is true MossCancelledError is raised, at the latest after the block in progress.
    """
    if not prompts:
        raise MossError("The probe needs at least one prompt.")
    runs: list[dict[str, Any]] = []
    worst: Readings = {}
    sigmas = sorted(set(settings.sigmas), reverse=True)
    total = len(prompts) * len(settings.sizes) * len(sigmas)
    for index, prompt in enumerate(prompts):
        context = prompt.tokens().to(device, torch.float32)
        for width, height in settings.sizes:
            shape = (1, arch.latent_channels, height // PIXELS, width // PIXELS)
            x = initial_noise(shape, settings.seed).to(device)
            for step, sigma in enumerate(sigmas):
                watch = PeakObserver(arch.text_blocks, cancel)
                level = torch.full((1,), sigma, device=device)
                v = run_dit(
                    tree,
                    arch,
                    x,
                    level,
                    context,
                    plan=plan or StreamPlan(),
                    dtype=torch.float32,
                    observer=watch,
                    attention=attention,
                ).float()
                after = sigmas[step + 1] if step + 1 < len(sigmas) else sigma
                x = x + v * (after - sigma)
                readings = watch.read()
                worst = {key: max(value, worst.get(key, 0.0)) for key, value in readings.items()}
                runs.append(_run(prompt.name or f"prompt {index + 1}", (width, height), sigma, readings, arch))
                if progress is not None:
                    progress(len(runs), total)
    peaks = gather(worst, arch)
    return ProbeResult(choose_factors(peaks, settings.per_block, settings.target), peaks, settings, arch, tuple(runs))


def _run(name: str, size: tuple[int, int], sigma: float, readings: Readings, arch: MossArch) -> dict[str, Any]:
    peaks = gather(readings, arch)
    head = {"prompt": name, "size": f"{size[0]}x{size[1]}", "sigma": sigma}
    kinds = {kind: peaks.of(kind) for kind in ("o", "ffn_down", "ffn_up_gate", "logits")}
    return {**head, "stream": peaks.stream, "text_stream": peaks.text_stream, **kinds}


def gather(readings: Readings, arch: MossArch) -> Peaks:
    """The readings of an observer, by block."""

    def at(kind: Kind | str, layer: int) -> float:
        return readings[kind, layer]

    text = tuple(
        BlockPeaks(
            f"text.{i}",
            max(at(Kind.TEXT_MID, i), at("text_stream", i)),
            at(Kind.TEXT_O, i),
            at(Kind.TEXT_FFN_DOWN, i),
            None,
            at("text_logits", i),
        )
        for i in range(arch.text_blocks)
    )
    joint = tuple(
        BlockPeaks(
            f"layer.{i}",
            max(at(Kind.MID, i), at("stream", i)),
            at(Kind.O, i),
            at(Kind.FFN_DOWN, i),
            at(Kind.FFN_UP_GATE, i),
            at("logits", i),
        )
        for i in range(arch.depth)
    )
    rows = {name: at(name, 0) for name in (*MODULATION, *HEAD_MODULATION)}
    return Peaks(at(Kind.ENTRY, 0), at(Kind.TEXT_ENTRY, 0), text, joint, rows)


def choose_factors(peaks: Peaks, per_block: bool = False, target: float = TARGET_PEAK) -> Factors:
    """Powers of two, each the largest that brings its peak to the target: c from the larger of the two streams.

    per_block: one of each per joint block. A block's c must also hold the stream as the block before left it, and the
    first one's the text stream.
    """
    if not per_block:
        c = factor_for_peak(max(peaks.stream, peaks.text_stream), target)
        return Factors(
            (c,), (factor_for_peak(peaks.of("o"), target),), (factor_for_peak(peaks.of("ffn_down"), target),)
        )
    arriving = [max(peaks.entry, peaks.text_stream), *(block.stream for block in peaks.joint[:-1])]
    held = [max(before, block.stream) for before, block in zip(arriving, peaks.joint, strict=True)]
    return Factors(
        tuple(factor_for_peak(peak, target) for peak in held),
        tuple(factor_for_peak(block.o, target) for block in peaks.joint),
        tuple(factor_for_peak(block.ffn_down, target) for block in peaks.joint),
    )


def advice(result: ProbeResult) -> list[str]:
    """What the peaks mean, in sentences."""
    peaks, factors, names = result.peaks, result.factors, result.arch.names
    top = max((*peaks.text, *peaks.joint), key=lambda block: block.stream)
    stream = max(peaks.stream, peaks.text_stream)
    where = f" (at {top.name})" if top.stream == stream else ""
    said = [f"The stream peaks at {stream:.4g}{where}; fp16 ends at {FP16_MAX:g}."]
    if factors.identity:
        said.append("Everything is in range as it is: no fix is needed.")
    else:
        smallest = {name: min(values) for name, values in zip(("c", "s_attn", "s_ffn"), _lists(factors), strict=True)}
        used = ", ".join(f"{name} = {factor_text(value)}" for name, value in smallest.items() if value < 1.0)
        said.append(f"{used}{' at the least' if not factors.uniform else ''} brings it to {result.settings.target:g}.")
    for what, parameters, peak in (
        ("ffn_up_gate", names.joint.pattern(names.joint.ffn_up_gate), peaks.of("ffn_up_gate")),
        ("the text refiner's proj", names.text.pattern(names.text.proj), max(block.o for block in peaks.text)),
        ("the text refiner's ffn_down", names.text.pattern(names.text.ffn_down), max(b.ffn_down for b in peaks.text)),
    ):
        if peak > FP16_MAX:
            said.append(
                f"The output of {what} reaches {peak:.4g}, which no fold moves: set its parameters to fp32 "
                f"({parameters} = fp32)."
            )
    if peaks.of("logits") > FP16_MAX:
        said.append(
            f"Attention logits reach {peaks.of('logits'):.4g}: use an attention that keeps them in fp32 (ComfyUI's "
            "--use-pytorch-cross-attention)."
        )
    return said


def _lists(factors: Factors) -> tuple[tuple[float, ...], ...]:
    return factors.c, factors.s_attn, factors.s_ffn
