"""Saturation counters: what the streams reached, counted on the device and read once.

Per site (text blocks first, then joint blocks): the largest finite |x|, and how many elements were over a threshold,
saturated (65504 <= |x| < inf), clamped, or not finite. One model call fills `call` buffers; `commit` adds them to the
run's totals, `drop` forgets them (the guard recomputed that call).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..model.observer import Observer
from ..scaling.plan import FP16_MAX

OVER, SATURATED, CLAMPED, NON_FINITE = range(4)
DEFAULT_THRESHOLD = 4096.0
#: A site whose peak has stayed this far below what is counted is not counted on a device, see `Counters`.
QUIET = 4.0


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
    """Device-side counters over the sites named. Only `read` and `read_call` wait for the device.

    The peak is one pass over the stream, the counts are several more. On a CPU these are left out where the peak says
    that there is nothing to count. A GPU cannot be asked that without a wait, but the peaks of the calls before come
    over in a copy nobody waits for: a site that has been QUIET for a whole call is not counted in the next ones. Should
    it jump over the threshold in a single call, peak and `bad_flag` are right, and that call counts as one element.
    """

    def __init__(self, names: tuple[str, ...], threshold: float = DEFAULT_THRESHOLD) -> None:
        self.names = names
        self.threshold = threshold
        self._device: torch.device | None = None
        self._news: PeakCopy | None = None
        self._peaks: list[float] | None = None
        self._skipped = False

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
        peak = torch.maximum(-low, high)
        self.call_peak[site].copy_(torch.maximum(self.call_peak[site], peak))
        counted = min(self.threshold, FP16_MAX / 2)
        if _cheap_branch(x):
            if bool(peak <= counted):
                return  # nothing can be over; on a CPU asking costs nothing (NaN compares false and is counted)
        elif not torch.compiler.is_compiling() and self._quiet(site, counted):
            self._skipped = True
            return
        magnitude = x.abs()
        finite = magnitude < float("inf")
        row = self.call_counts[site]
        row[OVER] += ((magnitude > self.threshold) & finite).sum()
        row[SATURATED] += ((magnitude >= FP16_MAX) & finite).sum()
        row[NON_FINITE] += x.numel() - finite.sum()

    def _quiet(self, site: int, counted: float) -> bool:
        """Whether the site's peak was, in all calls known of, far below what is counted."""
        if self._news is not None and (news := self._news.arrived()) is not None:
            self._peaks, self._news = news, None
        return self._peaks is not None and self._peaks[site] * QUIET <= counted

    def _settle(self) -> None:
        """Where counting was left out and the peak says that there was something after all: at least one element."""
        if self._skipped:
            peak, seen = self.call_peak, self.call_counts
            finite = peak < float("inf")
            least = torch.zeros_like(seen)
            least[:, OVER] = (peak > self.threshold) & finite
            least[:, SATURATED] = (peak >= FP16_MAX) & finite
            least[:, NON_FINITE] = ~finite
            self.call_counts, self._skipped = torch.maximum(seen, least), False

    def clamping(self, site: int, x: Tensor, limit: float) -> None:
        if self._device != x.device:
            self._place(x.device)
        if _cheap_branch(x):
            low, high = torch.aminmax(x)
            if bool((high <= limit) & (low >= -limit)):
                return
        self.call_counts[site, CLAMPED] += (x.abs() > limit).sum()

    def alert(self) -> None:
        """Count every site again: what the calls before showed does not hold for the next one."""
        self._peaks = self._news = None

    def begin(self) -> None:
        """Forget what an aborted call left behind."""
        self._skipped = False
        if self._device is not None:
            self.call_peak.zero_()
            self.call_counts.zero_()

    drop = begin

    def commit(self) -> None:
        """Add the finished call to the totals, on the device."""
        if self._device is not None:
            self._settle()
            # maximum propagates NaN, so a call that was not finite marks its site for good
            self.peak = torch.maximum(self.peak, self.call_peak)
            self.counts += self.call_counts
            self.begin()
            if self._news is None and not torch.compiler.is_compiling():
                self._news = peak_copy(self.peak)

    def saw_anything(self) -> bool:
        """Whether the call in progress ran any block at all (a wait for the device)."""
        return self._device is not None and not bool((self.call_peak == 0).all())

    def bad_flag(self) -> Tensor:
        """A 0-dim bool tensor: this call saturated or was not finite somewhere. Reading it is the caller's one sync."""
        if self._device is None:
            return torch.zeros((), dtype=torch.bool)
        return (~(self.call_peak < FP16_MAX)).any()  # NaN compares false, so it is bad too

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
        self._settle()
        return self._rows(self.call_peak, self.call_counts)

    def _rows(self, peak: Tensor, counts: Tensor) -> tuple[BlockStats, ...]:
        # the peaks ride along as their bit patterns so that one copy brings everything, exactly
        rows = torch.cat((peak.view(torch.int32).long()[:, None], counts), dim=1).cpu()
        peaks = rows[:, 0].to(torch.int32).view(torch.float32).tolist()
        return tuple(
            BlockStats(name, top if top == top else float("inf"), *row)
            for name, top, row in zip(self.names, peaks, rows[:, 1:].tolist(), strict=True)
        )


class PeakCopy:
    """Peaks, or the rows of `Counters.packed`, on their way from a GPU to the CPU."""

    def __init__(self, peaks: Tensor) -> None:
        self.rows = torch.empty(peaks.shape, dtype=peaks.dtype, pin_memory=True)
        self.rows.copy_(peaks, non_blocking=True)
        self.done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.done.record()

    def arrived(self) -> list[Any] | None:
        """The peaks, once they are here."""
        return self.rows.tolist() if self.done.query() else None


def peak_copy(peaks: Tensor) -> PeakCopy | None:
    """Start the copy, where there is a way to ask whether it has arrived."""
    return PeakCopy(peaks) if peaks.device.type == "cuda" and not torch.cuda.is_current_stream_capturing() else None


def _cheap_branch(x: Tensor) -> bool:
    """On a CPU a value can be looked at for free; on a device, or in a compiled graph, a branch would stall."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()
