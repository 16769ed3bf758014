"""Saturation counters: what the streams reached, counted on the device and read once.

Per site (text blocks first, then joint blocks): the largest finite |x|, and how many elements were over a threshold,
saturated (65504 <= |x| < inf), clamped, or not finite. One model call fills `call` buffers; `commit` adds them to the
run's totals, `drop` forgets them (the guard recomputed that call).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .stream import FP16_MAX

OVER, SATURATED, CLAMPED, NON_FINITE = range(4)
DEFAULT_THRESHOLD = 4096.0

Writer = Literal["o", "ffn_down"]


class Observer:
    """What a forward shows of itself. The base class looks at nothing."""

    #: False spares the forward the calls to `inner`.
    wants_inner: bool = False

    def stream(self, site: int, x: Tensor) -> None:
        """The stream [B, S, D] as stored after site's block; text refiner blocks come before the joint blocks."""

    def clamping(self, site: int, x: Tensor, limit: float) -> None:
        """The joint stream just before it is clamped to +-limit."""

    def inner(self, kind: str, layer: int, value: Tensor, scale: float) -> None:
        """`value` inside joint block `layer` (a text block for the kinds text_*), `scale` times what it truly is."""


@dataclass(frozen=True)
class BlockStats:
    """One site of a report. max_abs is inf where something was not finite."""

    name: str
    max_abs: float
    over: int
    saturated: int
    clamped: int
    non_finite: int


def site_names(text_blocks: int, depth: int) -> tuple[str, ...]:
    return tuple(f"text.{i}" for i in range(text_blocks)) + tuple(f"layer.{i}" for i in range(depth))


class Counters(Observer):
    """Device-side counters over the sites named. Only `read` and `read_call` wait for the device."""

    def __init__(self, names: tuple[str, ...], threshold: float = DEFAULT_THRESHOLD) -> None:
        self.names = names
        self.threshold = threshold
        self._device: torch.device | None = None

    def _place(self, device: torch.device) -> None:
        """(Re)make the buffers on the device the stream lives on; totals move along."""
        n = len(self.names)
        if self._device is None:
            self.peak = torch.zeros(n, device=device)
            self.counts = torch.zeros(n, 4, dtype=torch.int64, device=device)
        else:
            self.peak, self.counts = self.peak.to(device), self.counts.to(device)
        self.call_peak = torch.zeros(n, device=device)
        self.call_counts = torch.zeros(n, 4, dtype=torch.int64, device=device)
        self._device = device

    def stream(self, site: int, x: Tensor) -> None:
        if self._device != x.device:
            self._place(x.device)
        low, high = torch.aminmax(x)
        peak = torch.maximum(-low, high).float()
        self.call_peak[site].copy_(torch.maximum(self.call_peak[site], peak))
        if _cheap_branch(x) and bool(peak <= min(self.threshold, FP16_MAX / 2)):
            return  # nothing can be over; on a CPU asking costs nothing (NaN compares false and is counted)
        magnitude = x.abs()
        finite = magnitude < float("inf")
        row = self.call_counts[site]
        row[OVER] += ((magnitude > self.threshold) & finite).sum()
        row[SATURATED] += ((magnitude >= FP16_MAX) & finite).sum()
        row[NON_FINITE] += x.numel() - finite.sum()

    def clamping(self, site: int, x: Tensor, limit: float) -> None:
        if self._device != x.device:
            self._place(x.device)
        if _cheap_branch(x):
            low, high = torch.aminmax(x)
            if bool((high <= limit) & (low >= -limit)):
                return
        self.call_counts[site, CLAMPED] += (x.abs() > limit).sum()

    def begin(self) -> None:
        """Forget what an aborted call left behind."""
        if self._device is not None:
            self.call_peak.zero_()
            self.call_counts.zero_()

    drop = begin

    def commit(self) -> None:
        """Add the finished call to the totals, on the device."""
        if self._device is not None:
            # maximum propagates NaN, so a call that was not finite marks its site for good
            self.peak = torch.maximum(self.peak, self.call_peak)
            self.counts += self.call_counts
            self.begin()

    def bad_flag(self) -> Tensor:
        """A 0-dim bool tensor: this call saturated or was not finite somewhere. Reading it is the caller's one sync."""
        if self._device is None:
            return torch.zeros((), dtype=torch.bool)
        return (self.call_counts[:, SATURATED] + self.call_counts[:, NON_FINITE]).sum() > 0

    def packed(self) -> Tensor:
        """Totals as one fp32 tensor [sites, 5] on the device, for a single (possibly asynchronous) copy.

        Counts above 2^24 lose their last digits here; `read` keeps them exact.
        """
        if self._device is None:
            return torch.zeros(len(self.names), 5)
        return torch.cat((self.peak[:, None], self.counts.float()), dim=1)

    def read(self) -> tuple[BlockStats, ...]:
        """The totals (one wait for the device)."""
        if self._device is None:
            return tuple(BlockStats(name, 0.0, 0, 0, 0, 0) for name in self.names)
        return self._rows(self.peak, self.counts)

    def read_call(self) -> tuple[BlockStats, ...]:
        """The call in progress; only for explaining a fault."""
        if self._device is None:
            return ()
        return self._rows(self.call_peak, self.call_counts)

    def _rows(self, peak: Tensor, counts: Tensor) -> tuple[BlockStats, ...]:
        # the peaks ride along as their bit patterns so that one copy brings everything, exactly
        rows = torch.cat((peak.view(torch.int32).long()[:, None], counts), dim=1).cpu()
        peaks = rows[:, 0].to(torch.int32).view(torch.float32).tolist()
        return tuple(
            BlockStats(name, top if top == top else float("inf"), *row)
            for name, top, row in zip(self.names, peaks, rows[:, 1:].tolist(), strict=True)
        )


def _cheap_branch(x: Tensor) -> bool:
    """On a CPU a value can be looked at for free; on a device, or in a compiled graph, a branch would stall."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()
