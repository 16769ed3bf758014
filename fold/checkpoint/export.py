"""Rewriting a checkpoint with a fold put in or taken out, streamed: a few megabytes of it are in memory at a time."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

import torch

from ..errors import MossCancelledError, MossError
from ..files import Write, check_target, new_file, open_regular
from ..qkv import keys_with, row_range
from ..scaling.factors import IDENTITY, Factors
from ..scaling.record import RECORD_KEY, FoldRecord
from ..scaling.weights import RowScale, rescale, row_scale
from .header import DTYPE_BITS, TensorInfo, header_bytes
from .reader import Checkpoint, is_finite, open_checkpoint
from .streaming import CastBuffer, RingBuffer, WriteBehind

DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_TORCH_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.double,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
# Source bytes handled at a time: they and what is made of them stay in a CPU's cache from reading to writing.
_CHUNK_BYTES = 2 * 1024 * 1024
# Chunks that may wait to be written. Each handing over to the writing thread takes a busy machine milliseconds.
_CHUNKS_WAITING = 5

OnProgress = Callable[[int, int], None]
Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What was written: ``nbytes`` of file, the fold it carries now and carried before, and remarks in sentences."""

    target: Path
    nbytes: int
    tensors: int
    dtype: str
    record: FoldRecord | None
    replaced: FoldRecord | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows ``first`` to ``last`` (exclusive) of a stored tensor."""

    info: TensorInfo
    first: int
    last: int

    @property
    def row_bytes(self) -> int:
        return self.info.nbytes // _rows(self.info.shape) if _rows(self.info.shape) else 0


@dataclass(frozen=True, slots=True)
class _Output:
    """One tensor of the new file: its pieces one after the other, rescaled; ``raw`` is copied byte by byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]
    multiply: RowScale = field(default=None, compare=False)
    divide: RowScale = field(default=None, compare=False)
    raw: bool = False

    @property
    def nbytes(self) -> int:
        if self.raw:
            return sum(piece.info.nbytes for piece in self.pieces)
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def export_checkpoint(
    source: str | Path,
    target: str | Path,
    factors: Factors = IDENTITY,
    *,
    dtype: str = "keep",
    fused: bool | None = None,
    unfold: bool = False,
    overwrite: bool = False,
    progress: OnProgress | None = None,
    cancel: Callable[[], bool] | None = None,
) -> ExportResult:
    """Write ``source`` (file or HF folder) as one file ``target`` whose weights carry the fold ``factors``.

    A fold recorded in the source is taken out first, in the same rounding; ``unfold`` only takes it out and removes
    the record. ``dtype``: "keep", "bf16", "fp16" or "fp32" for all plain weights (rope.bands stays fp32; quantized
    weights and other components are copied as they are). ``fused``: q, k, v joined, split, or as stored (None).
    ``progress(done, total)`` counts bytes written; when ``cancel()`` is true MossCancelledError is raised. Raises
    MossError on anything that cannot be done, and then leaves nothing behind. Peak memory does not depend on the file.
    """
    target = Path(target)
    if target.suffix != ".safetensors":
        raise MossError(f"{target.name} must end in .safetensors.")
    with open_checkpoint(source) as checkpoint:
        check_target(target, overwrite)
        _check_not_source(checkpoint, target)
        record = _new_record(checkpoint, factors, unfold)
        outputs = _plan(checkpoint, IDENTITY if unfold else factors, dtype, fused)
        metadata = {key: text for key, text in checkpoint.metadata.items() if key != RECORD_KEY}
        if record is not None:
            metadata[RECORD_KEY] = record.to_json()
        head = header_bytes([(out.name, out.dtype, out.shape, out.nbytes) for out in outputs], metadata)
        total = len(head) + sum(out.nbytes for out in outputs)
        _check_space(target, total)
        with ExitStack() as stack:
            stack.enter_context(_one_thread())
            # The target's context is entered first: its file is published last, after the sources are closed.
            write = stack.enter_context(new_file(target, overwrite=overwrite))
            reader = _Reader({file: stack.enter_context(open_regular(file)) for file in checkpoint.files})
            _write_all(write, head, outputs, reader, total, progress, cancel)
    return ExportResult(
        target, total, len(outputs), dtype, record, checkpoint.record, tuple(_notes(checkpoint, factors, outputs))
    )


def _new_record(checkpoint: Checkpoint, factors: Factors, unfold: bool) -> FoldRecord | None:
    """The record of the new file; unknown fields of the old one are kept."""
    if unfold:
        if checkpoint.record is None:
            raise MossError(f"{checkpoint.where} carries no fold record, so there is nothing to unfold.")
        return None
    factors.expand(checkpoint.arch.depth)
    return FoldRecord.of(factors, checkpoint.record.extra if checkpoint.record else ())


def _plan(checkpoint: Checkpoint, factors: Factors, dtype: str, fused: bool | None) -> list[_Output]:
    """Every tensor of the new file, in the order safetensors writes them: wide dtypes first, then by name."""
    if dtype != "keep" and dtype not in DTYPES:
        raise MossError(f"dtype must be one of keep, {', '.join(DTYPES)}, but it is {dtype!r}.")
    target_fused = checkpoint.fused if fused is None else fused
    if target_fused != checkpoint.fused and checkpoint.quantization:
        raise MossError(
            f"{checkpoint.where} is quantized ({checkpoint.quantization}): its q, k, v layout must be kept as it is."
        )
    bands = checkpoint.arch.names.rope_bands
    outputs = [
        _plan_weight(checkpoint, name, shape, factors, dtype)
        for name, shape in checkpoint.arch.expected_shapes(target_fused).items()
        if name != bands or bands in checkpoint.layout.model
    ]
    others = [*checkpoint.layout.companions.values(), *checkpoint.layout.foreign.values()]
    outputs += [_copied(info) for info in others]
    return sorted(outputs, key=lambda out: (-DTYPE_BITS[out.dtype], out.name))


def _plan_weight(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], factors: Factors, dtype: str) -> _Output:
    """One model weight: which rows of what, and its old and new scale."""
    pieces = tuple(_pieces(checkpoint, name))
    old = checkpoint.record.factors if checkpoint.record else IDENTITY
    multiply = row_scale(name, checkpoint.arch, factors)
    divide = row_scale(name, checkpoint.arch, old)
    if factors == old:
        multiply = divide = None
    scaled = multiply is not None or divide is not None
    kind = checkpoint.layout.quantized.get(name)
    if scaled and kind and (kind != "fp8" or dtype == "keep"):
        fix = "use s_attn = s_ffn = 1" if kind != "fp8" else "choose a dtype of 16 or 32 bits"
        raise MossError(f"{name} of {checkpoint.where} is stored as {kind} and cannot be rescaled: {fix}.")
    if kind and (kind != "fp8" or dtype == "keep"):
        return _copied(pieces[0].info)
    widest = max((piece.info.dtype for piece in pieces), key=DTYPE_BITS.__getitem__)
    stored = "F32" if name == checkpoint.arch.names.rope_bands else DTYPES.get(dtype, widest)
    return _Output(checkpoint.prefix + name, stored, shape, pieces, multiply, divide)


def _pieces(checkpoint: Checkpoint, name: str) -> Iterator[_Piece]:
    """Where the rows of a weight lie, also when it is stored fused and wanted split or the other way round."""
    stored = checkpoint.layout.model
    keys = keys_with(name, checkpoint.arch.names)
    if name in stored or keys is None:
        yield _whole(stored[name])
    elif name == keys.fused:
        for key in keys.split:
            yield _whole(stored[key])
    else:
        rows = row_range(keys.split.index(name), checkpoint.arch.dim)
        yield _Piece(stored[keys.fused], rows.start, rows.stop)


def _whole(info: TensorInfo) -> _Piece:
    return _Piece(info, 0, _rows(info.shape))


def _copied(info: TensorInfo) -> _Output:
    return _Output(info.name, info.dtype, info.shape, (_whole(info),), raw=True)


def _write_all(
    write: Write,
    head: bytes,
    outputs: list[_Output],
    reader: _Reader,
    total: int,
    progress: OnProgress | None,
    cancel: Callable[[], bool] | None,
) -> None:
    """Write header and tensors, reporting and asking after each chunk."""
    done = 0
    with WriteBehind(write, _CHUNKS_WAITING) as writer:
        for data in _all_chunks(head, outputs, reader):
            if cancel is not None and cancel():
                raise MossCancelledError("The export was cancelled; nothing was left behind.")
            writer.write(data)
            done += len(data)
            if progress is not None:
                progress(done, total)


def _all_chunks(head: bytes, outputs: list[_Output], reader: _Reader) -> Iterator[Data]:
    """What the new file consists of; each chunk is good while _CHUNKS_WAITING of them, itself included, wait."""
    yield head
    buffer = CastBuffer(_CHUNKS_WAITING)
    for out in outputs:
        for piece in out.pieces:
            # A scale per row (the modulation's) only goes with a tensor in one piece.
            yield from _raw_chunks(piece, reader) if out.raw else _scaled_chunks(out, piece, reader, buffer)


def _raw_chunks(piece: _Piece, reader: _Reader) -> Iterator[Data]:
    for offset in range(0, piece.info.nbytes, _CHUNK_BYTES):
        yield reader.read(piece.info, offset, min(_CHUNK_BYTES, piece.info.nbytes - offset))


def _scaled_chunks(out: _Output, piece: _Piece, reader: _Reader, buffer: CastBuffer) -> Iterator[Data]:
    """The piece's rows, rescaled and cast, as many at a time as fit a chunk."""
    target = _TORCH_DTYPES[out.dtype]
    step = max(1, _CHUNK_BYTES // max(1, piece.row_bytes))
    for first in range(piece.first, piece.last, step):
        last = min(first + step, piece.last)
        data = reader.read(piece.info, first * piece.row_bytes, (last - first) * piece.row_bytes)
        if not data:
            continue
        rows = torch.frombuffer(data, dtype=_TORCH_DTYPES[piece.info.dtype]).reshape(last - first, -1)
        multiply, divide = (_some_rows(scale, first, last) for scale in (out.multiply, out.divide))
        if multiply is None and divide is None:
            result = buffer.cast(rows, target)
        else:
            result = rescale(buffer.widen(rows), multiply=multiply, divide=divide, dtype=target)
        _check_values(out, rows, result)
        yield result.contiguous().flatten().view(torch.uint8).numpy().data


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch's own threads gain nothing on chunks this small, and take the cores that write the file."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _some_rows(scale: RowScale, first: int, last: int) -> RowScale:
    if not isinstance(scale, torch.Tensor):
        return scale
    part = scale[first:last]
    return None if bool((part == 1.0).all()) else part


def _check_values(out: _Output, before: torch.Tensor, after: torch.Tensor) -> None:
    """Refuse NaN and infinity, whether they were in the file or came from a value too large for the new dtype."""
    if is_finite(after):
        return
    if not is_finite(before):
        raise MossError(f"{out.name} holds NaN or infinity: the source is damaged, download or convert it again.")
    raise MossError(f"{out.name} has values too large for {out.dtype}: export to bf16 or fp32 instead.")


class _Reader:
    """Reads pieces of tensors. Plain reads: a memory map of a large file would count as this process's memory."""

    def __init__(self, files: dict[Path, BufferedReader]) -> None:
        self._files = files
        self._ring = RingBuffer(_CHUNKS_WAITING)

    def read(self, info: TensorInfo, offset: int, count: int) -> memoryview:
        """``count`` bytes of a tensor, good for as long as `RingBuffer.take` says."""
        stream, data = self._files[info.file], self._ring.take(count)
        stream.seek(info.start + offset)
        if stream.readinto(data) != count:
            raise MossError(f"{info.file.name} became shorter while it was read.")
        return data


def _check_not_source(checkpoint: Checkpoint, target: Path) -> None:
    for file in checkpoint.files:
        if target.exists() and target.samefile(file):
            raise MossError(f"{target} is the source itself: choose another name for the result.")


def _check_space(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise MossError(
            f"{target} needs {needed / 1e9:.2f} GB, but the disk has only {free / 1e9:.2f} GB free: "
            "make room, or choose another folder."
        )


def _notes(checkpoint: Checkpoint, factors: Factors, outputs: list[_Output]) -> Iterator[str]:
    """Remarks on what was done, in sentences."""
    used = [factors]
    if checkpoint.record is not None:
        yield f"The recorded fold (c = {checkpoint.record.c:g}) was taken out."
        used.append(checkpoint.record.factors)
    if not all(one.power_of_two for one in used):
        yield "Not all factors are powers of two, so the weights were rounded."
    if checkpoint.foreign:
        yield f"{len(checkpoint.foreign)} tensors of other components were copied unchanged."
    if checkpoint.quantization:
        count = sum(out.raw for out in outputs) - len(checkpoint.foreign)
        yield f"{count} quantized tensors and their scales ({checkpoint.quantization}) were copied unchanged."


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1
