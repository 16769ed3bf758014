"""Reading a safetensors header with every field checked, before any tensor is touched. No torch needed.

A file that passes here is safe to memory-map: each tensor has a known dtype and a byte range of exactly its size, the
ranges follow one another without a gap, and the last one ends where the file ends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import MossError
from ..files import open_regular

# Bits per element of every dtype that safetensors knows.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
# Headers of the largest checkpoints in use are well below 1 MiB. The cap bounds the time and memory a bad one can take.
MAX_HEADER_BYTES = 4 * 1024 * 1024
MAX_RANK = 8
_MAX_SIZE = 2**63 - 1
_PICKLES = (".ckpt", ".pt", ".pth", ".bin", ".pkl")
_OTHER_FORMATS = {
    b"PK\x03\x04": "a zip or pickle archive",
    b"\x80\x02": "a pickle",
    b"GGUF": "a GGUF file (a GGUF loader node opens those)",
    b"\x89HDF": "an HDF5 file",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the header describes it: ``dtype`` as safetensors spells it ("BF16"), sizes in bytes.

    ``name`` is the key in ``file``; the data lie at bytes ``start`` to ``start + nbytes`` of that file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    start: int
    file: Path


@dataclass(frozen=True, slots=True)
class Header:
    """The checked header of one file."""

    file: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    file_bytes: int


def read_header(file: Path) -> Header:
    """Read and check the header of ``file``; MossError naming the file and the field that is wrong."""
    if file.suffix.lower() in _PICKLES:
        raise MossError(f"{file.name} is not a safetensors file: only .safetensors is opened, never {file.suffix}.")
    with open_regular(file) as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        length = _header_length(stream.read(8), size, file)
        raw = stream.read(length)
    if len(raw) != length:
        _fail(file, "its header is cut off: download or copy it again")
    entries = _parse_json(raw, file)
    metadata = _metadata(entries.pop("__metadata__", {}), file)
    data_start = 8 + length
    tensors = {name: _tensor(name, entry, data_start, file) for name, entry in entries.items()}
    _check_ranges(tensors, data_start, size, file)
    return Header(file, tensors, metadata, size)


def _fail(file: Path, what: str) -> NoReturn:
    raise MossError(f"{file.name} is not a usable safetensors file: {what}.")


def _header_length(first: bytes, size: int, file: Path) -> int:
    for magic, kind in _OTHER_FORMATS.items():
        if first.startswith(magic):
            _fail(file, f"it is {kind}")
    if len(first) < 8:
        _fail(file, f"it has {size} bytes, fewer than the 8 of the header's length")
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER_BYTES:
        _fail(file, f"its header claims {length} bytes, above the limit of {MAX_HEADER_BYTES}")
    if length > size - 8:
        _fail(file, f"its header claims {length} bytes, but only {size - 8} follow: the file is truncated")
    return length


def _parse_json(raw: bytes, file: Path) -> dict[str, Any]:
    """The header's JSON object. A key given twice is refused wherever it stands."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            _fail(file, f"its header gives {clip(twice)} twice")
        return table

    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError:
        _fail(file, "its header is not UTF-8 text")
    except RecursionError:
        _fail(file, "its header is nested too deeply")
    except MossError:
        raise
    except ValueError:
        _fail(file, "its header is not valid JSON")
    if not isinstance(entries, dict):
        _fail(file, "its header is not a JSON object")
    for name in entries:
        if not _is_text(name):
            _fail(file, f"{clip(name)} is not a UTF-8 name")
    return entries


def _metadata(value: Any, file: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(_is_text(item) for pair in value.items() for item in pair):
        _fail(file, "__metadata__ is not an object of UTF-8 strings")
    return value


def _tensor(name: str, entry: Any, data_start: int, file: Path) -> TensorInfo:
    """One header entry, checked on its own."""
    shown = clip(name)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _fail(file, f"{shown} is not an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        _fail(file, f"{shown} has the unknown dtype {clip(dtype)}")
    if not _is_sizes(shape) or len(shape) > MAX_RANK:
        _fail(file, f"{shown} has a bad shape {clip(shape)}")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(file, f"{shown} has bad data_offsets {clip(offsets)}")
    begin, end = offsets
    if math.prod(shape) * bits != (end - begin) * 8:
        _fail(file, f"{shown} has {end - begin} bytes, which do not fit its dtype {dtype} and shape {shape}")
    return TensorInfo(name, dtype, tuple(shape), end - begin, data_start + begin, file)


def _is_text(value: Any) -> bool:
    """Whether ``value`` is a string that UTF-8 can write (JSON can hold halves of surrogate pairs)."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False


def _is_sizes(value: Any) -> bool:
    """Whether ``value`` is a list of integers (no booleans) that a file size can hold."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _MAX_SIZE for item in value)


def _check_ranges(tensors: dict[str, TensorInfo], data_start: int, size: int, file: Path) -> None:
    """Refuse overlaps, gaps, and data that end before or after the file does."""
    position = data_start
    for info in _by_offset(tensors):
        if info.start != position:
            kind = "overlaps the tensor before it" if info.start < position else "leaves a gap before it"
            _fail(file, f"data_offsets of {clip(info.name)} start at {info.start - data_start}, which {kind}")
        position += info.nbytes
        if position > size:
            _fail(file, f"{clip(info.name)} ends at byte {position}, but the file has {size}: it is truncated")
    if position != size:
        _fail(file, f"its tensors end at byte {position}, but the file has {size}")


def _by_offset(tensors: dict[str, TensorInfo]) -> Iterator[TensorInfo]:
    return iter(sorted(tensors.values(), key=lambda info: (info.start, info.nbytes)))


def header_bytes(tensors: Sequence[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file that holds ``tensors`` (name, dtype, shape, nbytes) in this order."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape, nbytes in tensors:
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def clip(value: object) -> str:
    """A short printable form of something read from a file."""
    shown = value if isinstance(value, str) else repr(value)
    shown = "".join(char if char.isprintable() else "?" for char in shown[:100])
    return shown or "''"
