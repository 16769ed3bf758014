"""A MOSS-Image checkpoint on disk: one file or an HF folder, its header read first, its tensors one at a time.

Opening reads headers only (no torch needed). Tensors are then memory-mapped by safetensors, so that nothing is read
before it is used.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..arch import MossArch
from ..errors import MossError
from ..files import open_regular
from ..names import OFFICIAL, ModuleNames
from ..qkv import join_state_dict, split_state_dict
from ..scaling.record import RECORD_KEY, FoldRecord
from .file_kinds import kind_of
from .header import Header, TensorInfo, clip, read_header
from .keys import PREFIXES, Layout, read_layout

if TYPE_CHECKING:
    import torch

INDEX_NAME = "diffusion_pytorch_model.safetensors.index.json"
SINGLE_NAME = "diffusion_pytorch_model.safetensors"
SUBFOLDER = "transformer"
#: Elements copied and looked at together: 0.5 to 1 MB, which the second-level cache holds.
_PIECE = 2**18
_MAX_INDEX_BYTES = 16 * 2**20
_FIRST_BYTES = 512
_DTYPE_NAMES = {
    "F64": "fp64",
    "F32": "fp32",
    "F16": "fp16",
    "BF16": "bf16",
    "F8_E4M3": "fp8_e4m3",
    "F8_E5M2": "fp8_e5m2",
}


class Checkpoint:
    """An opened checkpoint; use as a context manager, or call ``close``. Names are bare (without the file's prefix)."""

    def __init__(self, path: Path, headers: list[Header], names: ModuleNames = OFFICIAL) -> None:
        self.path = path
        self.where = path.name or str(path.resolve())
        self.headers = headers
        self.layout: Layout = read_layout(_join_tensors(headers), self.where, names)
        self.metadata: dict[str, str] = _join_metadata(headers, self.where)
        self.record: FoldRecord | None = FoldRecord.from_metadata(self.metadata, self.where)
        self._handles: dict[Path, Any] = {}

    @property
    def arch(self) -> MossArch:
        """The model's geometry."""
        return self.layout.arch

    @property
    def prefix(self) -> str:
        """What stands before every model key in the file."""
        return self.layout.prefix

    @property
    def fused(self) -> bool:
        """Whether q, k and v are one matrix."""
        return self.layout.fused

    @property
    def quantization(self) -> str | None:
        """ "int8", "fp8_scaled", "fp8", "nvfp4", several joined by "+", or None."""
        return self.layout.quantization

    @property
    def files(self) -> tuple[Path, ...]:
        """The files the tensors are in (more than one for a folder of shards)."""
        return tuple(header.file for header in self.headers)

    @property
    def file_bytes(self) -> int:
        """Size of all files together."""
        return sum(header.file_bytes for header in self.headers)

    @property
    def nbytes(self) -> int:
        """Size of the model's tensors, companions included, other components not."""
        return sum(info.nbytes for table in (self.layout.model, self.layout.companions) for info in table.values())

    @cached_property
    def dtype(self) -> str:
        """The float dtype that most weights outside quantized tensors are stored in: "bf16", "fp16", "fp32", ..."""
        sizes: Counter[str] = Counter()
        for name, info in self.layout.model.items():
            if name != self.arch.names.rope_bands and self.is_plain(name):
                sizes[info.dtype] += info.nbytes
        return _DTYPE_NAMES[sizes.most_common(1)[0][0]]

    @property
    def foreign(self) -> tuple[str, ...]:
        """Keys of other components (VAE, text encoder) in the same file, as they stand there."""
        return tuple(self.layout.foreign)

    @property
    def companions(self) -> tuple[str, ...]:
        """Bare names of the scales and markers that quantized weights bring along."""
        return tuple(self.layout.companions)

    def names(self) -> tuple[str, ...]:
        """Bare names of the model's weights as stored (fused or split), companions not included."""
        return tuple(self.layout.model)

    def is_plain(self, name: str) -> bool:
        """Whether a weight's stored numbers are its values (fp8 without a scale counts), so that it may be cast."""
        return name in self.layout.model and self.layout.quantized.get(name, "fp8") == "fp8"

    def info(self, name: str) -> TensorInfo:
        """The header entry of one weight or companion; its ``name`` is the key in the file."""
        info = self.layout.model.get(name) or self.layout.companions.get(name)
        if info is None:
            raise MossError(f"{self.where} has no {clip(name)}.")
        return info

    def tensor(self, name: str) -> torch.Tensor:
        """One weight or companion as stored, memory-mapped: do not write into it."""
        return self._read(self.info(name))

    def state_dict(
        self, dtype: torch.dtype | None = None, *, fused: bool | None = None, check: bool = False
    ) -> dict[str, torch.Tensor]:
        """All weights and companions by bare name.

        ``dtype`` casts what is stored as a plain float, except rope.bands; ``fused`` joins (True) or splits (False)
        q, k, v; ``check`` raises MossError on a weight with NaN or infinity. Without options nothing is copied.
        """
        tensors: dict[str, torch.Tensor] = {}
        for name in self.names():
            tensor, plain = self.tensor(name), self.is_plain(name)
            if check and plain:
                check_finite(name, tensor, self.where)
            cast = dtype is not None and plain and name != self.arch.names.rope_bands
            tensors[name] = tensor.to(dtype) if cast else tensor
        if fused is not None and fused != self.fused:
            if self.quantization:
                raise MossError(
                    f"{self.where} is quantized ({self.quantization}): its q, k, v stay as they are stored."
                )
            tensors = join_state_dict(tensors, self.arch) if fused else split_state_dict(tensors, self.arch)
        return tensors | {name: self.tensor(name) for name in self.companions}

    def release(self) -> None:
        """Give the pages read so far back to the system: a mapped file counts as this process's memory page by page.

        Tensors already taken stay usable, and keep their own mapping. The next one opens the file anew.
        """
        self._handles.clear()

    def close(self) -> None:
        """Let go of the files; tensors already taken stay usable."""
        self._handles.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, info: TensorInfo) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        try:
            handle = self._handles.get(info.file)
            if handle is None:
                handle = self._handles[info.file] = safe_open(info.file, framework="pt", device="cpu")
            tensor: torch.Tensor = handle.get_tensor(info.name)
        except (SafetensorError, OSError) as error:
            raise MossError(f"{clip(info.name)} of {info.file.name} cannot be read: {error}.") from None
        return tensor


def open_checkpoint(path: str | Path, names: ModuleNames = OFFICIAL) -> Checkpoint:
    """Open a safetensors file or an HF folder (itself, or the folder above its ``transformer/``).

    ``names``: what its modules are called. Raises MossError, naming file and key, when it is missing, damaged, no
    MOSS-Image model, or its fold record is bad.
    """
    path = Path(path)
    return Checkpoint(path, list(_folder_headers(path)) if path.is_dir() else [read_header(path)], names)


def holds_model(file: Path) -> bool:
    """Whether a file is safetensors with a module that only MOSS-Image has, under any prefix. Reads the header only."""
    try:
        keys = read_header(file).tensors
    except MossError:
        return False
    return any(f"{prefix}{path}.weight" in keys for prefix in PREFIXES for path in OFFICIAL.markers())


def check_finite(name: str, tensor: torch.Tensor, where: str) -> None:
    """Raise MossError naming ``name`` and ``where`` when a float tensor holds NaN or infinity."""
    if not is_finite(tensor):
        raise damaged(name, where)


def damaged(name: str, where: str) -> MossError:
    """The error for a weight that is not finite in the file `where`."""
    return MossError(f"{name} in {where} holds NaN or infinity: the file is damaged, download or convert it again.")


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite: one pass, without a temporary of the tensor's size (but for fp8)."""
    if not tensor.is_floating_point() or tensor.numel() == 0 or math.isfinite(_total(tensor)):
        return True
    # finite values whose sum overflows: these decide, in twice the time
    low, high = _summable(tensor).aminmax()
    return bool(low.isfinite() & high.isfinite())


def _total(tensor: torch.Tensor) -> float:
    """The sum, which is never finite with NaN or infinity in it."""
    return float(_summable(tensor).sum())


def _summable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.element_size() == 1 else tensor


def cast_checked(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """A CPU tensor in `dtype` (itself where it has it), and whether the result is finite everywhere."""
    import torch

    if tensor.dtype == dtype:
        return tensor, is_finite(tensor)
    ready = torch.empty(tensor.shape, dtype=dtype)
    return ready, copy_checked(tensor, ready)


def copy_checked(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Copy CPU floats into a contiguous tensor of the same shape; whether they are finite there.

    Piece by piece, so that each is looked at while it is in the cache, not in passes of their own over all of it. From
    one 16-bit dtype to another torch converts a value at a time; by way of fp32 it is exact, too, and faster.
    """
    import torch

    from .fresh_memory import provide

    same, wide, total = source.dtype == target.dtype, None, 0.0
    if not same and source.element_size() == target.element_size() == 2:
        wide = torch.empty(min(_PIECE, source.numel()), dtype=torch.float32)
    source, target = source.reshape(-1), target.view(-1)
    for start in range(0, source.numel(), _PIECE):
        given, piece = source[start : start + _PIECE], target[start : start + _PIECE]
        provide(piece)
        if same:
            total += _total(given)
        piece.copy_(given if wide is None else wide[: given.numel()].copy_(given))
        if not same:
            total += _total(piece)
    return math.isfinite(total) or is_finite(target)


def _folder_headers(folder: Path) -> Iterator[Header]:
    for place in (folder, folder / SUBFOLDER):
        if (place / INDEX_NAME).exists():
            yield from _sharded_headers(place)
            return
        if (place / SINGLE_NAME).exists():
            yield read_header(place / SINGLE_NAME)
            return
    raise MossError(f"{folder} holds no MOSS-Image model: neither {INDEX_NAME} nor {SINGLE_NAME} is in it.")


def _sharded_headers(folder: Path) -> Iterator[Header]:
    """The header of every shard that the index names; each named tensor must be in its shard."""
    index = _read_index(folder / INDEX_NAME)
    shards: dict[str, list[str]] = {}
    for name, shard in index.items():
        shards.setdefault(shard, []).append(name)
    for shard, names in sorted(shards.items()):
        # A plain file name: a path of any kind could lead out of the folder.
        if not shard.endswith(".safetensors") or any(char in shard for char in "/\\:\0"):
            raise MossError(f"{INDEX_NAME} names {clip(shard)} as a shard, which is no plain .safetensors file name.")
        header = read_header(folder / shard)
        for name in names:
            if name not in header.tensors:
                raise MossError(f"{INDEX_NAME} says that {clip(name)} is in {shard}, but it is not.")
        yield header


def _read_index(file: Path) -> dict[str, str]:
    with open_regular(file) as stream:
        raw = stream.read(_MAX_INDEX_BYTES + 1)
    try:
        if len(raw) > _MAX_INDEX_BYTES:
            raise ValueError
        table = json.loads(raw)["weight_map"]
        if not isinstance(table, dict) or not table or not all(isinstance(shard, str) for shard in table.values()):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        kind = kind_of(raw[:_FIRST_BYTES])
        why = "download it again" if kind is None or "JSON" in kind else f"it is {kind}"
        raise MossError(f"{file.name} in {file.parent.name} has no usable weight_map: {why}.") from None
    return table


def _join_tensors(headers: list[Header]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name, info in header.tensors.items():
            if name in tensors:
                raise MossError(f"{clip(name)} is both in {tensors[name].file.name} and in {header.file.name}.")
            tensors[name] = info
    return tensors


def _join_metadata(headers: list[Header], where: str) -> dict[str, str]:
    """The metadata of all shards together; their fold records must agree."""
    records = {header.metadata.get(RECORD_KEY) for header in headers}
    if len(records) > 1:
        raise MossError(f"The shards of {where} carry different {RECORD_KEY} records, so the fold is unknown.")
    merged: dict[str, str] = {}
    for header in reversed(headers):
        merged |= header.metadata
    return merged
