"""Saturation counters: what the streams reached, counted on the device and read once.

Per site (text blocks first, then joint blocks): the largest finite |x|, and how many elements were over a threshold,
saturated (65504 <= |x| < inf), clamped, or not finite. One model call fills `call` buffers; `commit` adds them to the
run's totals, `drop` forgets them (the guard recomputed that call).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..model.observer import CallObserver
from ..scaling.plan import FP16_MAX

OVER, SATURATED, CLAMPED, NON_FINITE = range(4)
DEFAULT_THRESHOLD = 4096.0
#: Channels of a site that are counted on a device, see `Counters`.
CHANNELS = 32


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
    """The names of all blocks in the order of their sites: text.0, ..., layer.0, ..."""
    return tuple(f"text.{i}" for i in range(text_blocks)) + tuple(f"layer.{i}" for i in range(depth))


class Counters(CallObserver):
    """Counters on the device for the streams at the sites `names`. Only `read` and `read_call` wait for the device.

    Peaks are exact, one pass over the stream. Counts would take several more. On a CPU they are left out where the peak
    says that there is nothing to count; a device cannot be asked that without a wait, so there the CHANNELS loudest of
    a site's channels are counted. What goes out of range in MOSS-Image sits in a handful of them; should ever more pass
    the threshold, the counts are those of the loudest, and peak and `bad_flag` are right all the same.
    """

    def __init__(self, names: tuple[str, ...], threshold: float = DEFAULT_THRESHOLD) -> None:
        self.names = names
        self.threshold = threshold
        self._device: torch.device | None = None
        self._width = 0
        #: dtype -> the bit patterns above which an |x| is over the threshold, saturated, not finite
        self._patterns = {dtype: _patterns(dtype, threshold) for dtype in _FORMATS}
        self._limits: dict[torch.dtype, Tensor] = {}
        #: sites whose rows of the call's buffers hold something (not known to a compiled graph)
        self._filled: set[int] = set()

    def _place(self, device: torch.device, width: int) -> None:
        """(Re)make the buffers on the device the stream lives on; totals move along. width: peaks kept per site."""
        n = len(self.names)
        if self._device is None:
            self.peak = torch.zeros(n, device=device)
            self.counts = torch.zeros(n, 4, dtype=torch.int64, device=device)
        else:
            self.peak, self.counts = self.peak.to(device), self.counts.to(device)
        if self._device == device:  # the call goes on with streams of another width
            self.call_peaks = self._call_peak()[:, None].repeat(1, width)
            self._filled = set(range(n))
        else:
            self.call_peaks = torch.zeros(n, width, device=device)
            self.call_beyond = torch.zeros(n, 3, dtype=torch.int64, device=device)
            self.call_clamped = torch.zeros(n, dtype=torch.int64, device=device)
            self._limits, self._filled = {}, set()
        self._device, self._width = device, width

    def stream(self, site: int, x: Tensor) -> None:
        if torch.compiler.is_compiling():
            self._whole(site, x, ask=False)
        elif _cheap_branch(x):
            self._whole(site, x, ask=True)
        else:
            self._loudest(site, x.reshape(-1, x.shape[-1]))

    def _whole(self, site: int, x: Tensor, *, ask: bool) -> None:
        """Peak and counts of all of x; ask: leave the counts out where the peak says that they are zero."""
        if self._device != x.device:
            self._place(x.device, 1)
        low, high = torch.aminmax(x)
        peak = torch.maximum(-low, high)
        self.call_peaks[site].copy_(torch.maximum(self.call_peaks[site], peak))
        if not ask or not bool(peak <= min(self.threshold, FP16_MAX / 2)):  # NaN compares false and is counted
            bits = _bits(x)
            self.call_beyond[site] += torch.stack([(bits > limit).sum() for limit in self._patterns[x.dtype]])

    def _loudest(self, site: int, rows: Tensor) -> None:
        """Peaks by channel of rows [tokens, D], and counts in the loudest channels: six kernels, none of them waits."""
        self._make_room(rows)
        peaks = self.call_peaks[site]
        before = (peaks.clone(), self.call_beyond[site].clone()) if site in self._filled else None
        self._filled.add(site)
        torch.linalg.vector_norm(rows, math.inf, dim=0, dtype=torch.float32, out=peaks)
        beyond = _bits(_loud_channels(rows, peaks))[..., None] > self._limits[rows.dtype]
        torch.sum(beyond, dim=(0, 1), out=self.call_beyond[site])
        if before is not None:
            torch.maximum(peaks, before[0], out=peaks)
            self.call_beyond[site] += before[1]

    def _make_room(self, rows: Tensor) -> None:
        """Buffers on the device of rows [tokens, D], one peak per channel; the limits as a tensor."""
        if self._device != rows.device or self._width != rows.shape[1]:
            self._place(rows.device, rows.shape[1])
        if rows.dtype not in self._limits:
            whole, device = _integer(rows.dtype), rows.device
            patterns = [torch.full((), one, dtype=whole, device=device) for one in self._patterns[rows.dtype]]
            self._limits[rows.dtype] = torch.stack(patterns)

    def clamping(self, site: int, x: Tensor, limit: float) -> None:
        if torch.compiler.is_compiling() or _cheap_branch(x):
            if self._device != x.device:
                self._place(x.device, 1)
            low, high = torch.aminmax(x)
            if _cheap_branch(x) and bool((high <= limit) & (low >= -limit)):
                return
        else:
            x = x.reshape(-1, x.shape[-1])
            self._make_room(x)
            x = _loud_channels(x, torch.linalg.vector_norm(x, math.inf, dim=0, dtype=torch.float32))
        self.call_clamped[site] += (x.abs() > limit).sum()

    def begin(self) -> None:
        """Forget what an aborted call left behind."""
        self._filled.clear()
        if self._device is not None:
            self.call_peaks.zero_()
            self.call_beyond.zero_()
            self.call_clamped.zero_()

    drop = begin

    def commit(self) -> None:
        """Add the finished call to the totals, on the device."""
        if self._device is not None:
            # maximum propagates NaN, so a call that was not finite marks its site for good
            self.peak = torch.maximum(self.peak, self._call_peak())
            self.counts += self._call_counts()
            self.begin()

    def _call_peak(self) -> Tensor:
        """The call's peaks by site, fp32 [sites]."""
        return self.call_peaks.amax(dim=1)

    def _call_counts(self) -> Tensor:
        """The call's counts by site, int64 [sites, 4]."""
        over, saturated, non_finite = self.call_beyond.unbind(1)
        return torch.stack((over - non_finite, saturated - non_finite, self.call_clamped, non_finite), dim=1)

    def saw_anything(self) -> bool:
        """Whether the call in progress ran any block at all (a wait for the device)."""
        return self._device is not None and not bool((self.call_peaks == 0).all())

    def bad_flag(self) -> Tensor:
        """A 0-dim bool tensor: this call saturated or was not finite somewhere. Reading it is the caller's one sync."""
        if self._device is None:
            return torch.zeros((), dtype=torch.bool)
        return (~(self.call_peaks < FP16_MAX)).any()  # NaN compares false, so it is bad too

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
        return self._rows(self._call_peak(), self._call_counts())

    def _rows(self, peak: Tensor, counts: Tensor) -> tuple[BlockStats, ...]:
        # the peaks ride along as their bit patterns so that one copy brings everything, exactly
        rows = torch.cat((peak.view(torch.int32).long()[:, None], counts), dim=1).cpu()
        peaks = rows[:, 0].to(torch.int32).view(torch.float32).tolist()
        return stats_of(self.names, [[peak, *row] for peak, row in zip(peaks, rows[:, 1:].tolist(), strict=True)])


def stats_of(names: Sequence[str], rows: Sequence[Sequence[float]]) -> tuple[BlockStats, ...]:
    """Rows of `Counters.packed` on the CPU, peak first, as stats; a peak of NaN is one that was not finite: inf."""
    return tuple(
        BlockStats(name, math.inf if math.isnan(peak) else peak, *map(int, counts))
        for name, (peak, *counts) in zip(names, rows, strict=True)
    )


class PeakCopy:
    """A copy of peaks, or of the rows of `Counters.packed`, from a GPU to the CPU that has been started."""

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


def _integer(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype == torch.float32 else torch.int16


def _bits(x: Tensor) -> Tensor:
    """|x| as its bit pattern: integers in the same order, infinity above all numbers and NaN above infinity."""
    whole = _integer(x.dtype)
    return x.view(whole) & torch.iinfo(whole).max


#: dtype -> (bit pattern of infinity, struct's formats of a pattern and of its value, bits to shift it to that place)
_FORMATS = {
    torch.float32: (0x7F800000, "<I", "<f", 0),
    torch.bfloat16: (0x7F80, "<I", "<f", 16),
    torch.float16: (0x7C00, "<H", "<e", 0),
}


def _patterns(dtype: torch.dtype, threshold: float) -> tuple[int, int, int]:
    """The bit patterns above which an |x| is over the threshold, saturated, not finite."""
    return (
        _last_pattern(dtype, threshold, reached=True),
        _last_pattern(dtype, FP16_MAX, reached=False),
        _last_pattern(dtype, math.inf, reached=False),
    )


def _loud_channels(rows: Tensor, peaks: Tensor) -> Tensor:
    """The CHANNELS columns of rows [tokens, D] with the largest peaks [D]."""
    return rows.index_select(1, torch.topk(peaks, min(CHANNELS, len(peaks)), sorted=False).indices)


def _last_pattern(dtype: torch.dtype, limit: float, *, reached: bool) -> int:
    """The bit pattern of the largest number of a dtype that is below `limit`, or with `reached` at most that."""
    infinity, whole, number, shift = _FORMATS[dtype]
    low, high = 0, infinity  # the pattern sought is at least low and below high
    while high - low > 1:
        middle = (low + high) // 2
        value: float = struct.unpack(number, struct.pack(whole, middle << shift))[0]
        inside = value <= limit if reached else value < limit
        low, high = (middle, high) if inside else (low, middle)
    return low
