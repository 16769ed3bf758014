"""Reading a safetensors header with every field checked, before any tensor is touched. No torch needed.

A file that passes here is safe to memory-map: each tensor has a known dtype and a byte range of exactly its size, the
ranges follow one another without a gap, and the last one ends where the file ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..errors import MossError
from ..files import open_regular
from .file_kinds import kind_of
from .header_json import RepeatedNameError, is_utf8, read_object, read_string, read_value, skip_space

# Bits per element of every dtype that safetensors knows.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
# The safetensors package opens no larger one. A MODEL saved with a workflow has all of that in its header.
MAX_HEADER_BYTES = 100_000_000
_MAX_SIZE = 2**64 - 1
#: The names under which safetensors files come, in upper or lower case.
SUFFIXES = (".safetensors", ".sft")
_PICKLES = (".ckpt", ".pt", ".pth", ".bin", ".pkl")
_ENTRY_FIELDS = ("dtype", "shape", "data_offsets")
_FIRST_BYTES = 512


class TensorInfo(NamedTuple):
    """One tensor as the header describes it: ``dtype`` as safetensors spells it ("BF16"), sizes in bytes.

    ``name`` is the key in ``file``; the data lie at bytes ``start`` to ``start + nbytes`` of that file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    start: int
    file: Path


class Header(NamedTuple):
    """The checked header of one file."""

    file: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    file_bytes: int


def is_safetensors(name: str) -> bool:
    """Whether a file is named as safetensors."""
    return name.lower().endswith(SUFFIXES)


def read_header(file: Path) -> Header:
    """Read and check the header of ``file``; MossError naming the file and the field that is wrong.

    Whatever the safetensors package opens is read, and means the same. Memory: a few times the header's size.
    """
    if file.suffix.lower() in _PICKLES:
        raise MossError(f"{file.name} is not a safetensors file: only .safetensors is opened, never {file.suffix}.")
    with open_regular(file) as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        length = _header_length(stream.read(_FIRST_BYTES), size, file)
        stream.seek(8)
        raw = stream.read(length)
    if len(raw) != length:
        _fail(file, "its header is cut off: download or copy it again")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        _fail(file, "its header is not UTF-8 text")
    del raw
    tensors, metadata = _members(text, 8 + length, file)
    _check_ranges(tensors, 8 + length, size, file)
    return Header(file, tensors, metadata, size)


def _fail(file: Path, what: str) -> NoReturn:
    raise MossError(f"{file.name} is not a usable safetensors file: {what}.")


def _header_length(first: bytes, size: int, file: Path) -> int:
    """The header's length, which the file begins with; ``first``: up to the first 512 bytes."""
    length = int.from_bytes(first[:8], "little")
    if len(first) < 8 or length == 0 or length > MAX_HEADER_BYTES:
        kind = kind_of(first)
        if kind is not None:
            _fail(file, f"it is {kind}")
    if len(first) < 8:
        _fail(file, f"it has {size} bytes, fewer than the 8 of the header's length")
    if length > MAX_HEADER_BYTES:
        _fail(file, f"its header claims {length} bytes, above the limit of {MAX_HEADER_BYTES}")
    if length > size - 8:
        _fail(file, f"its header claims {length} bytes, but only {size - 8} follow: the file is truncated")
    return length


def _members(text: str, data_start: int, file: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors and the metadata in the header's JSON object. Of a tensor given twice the last one counts."""
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] | None = None

    def member(name: str, position: int) -> int:
        nonlocal metadata
        if name == "__metadata__":
            if metadata is not None:
                _fail(file, "its header gives __metadata__ twice")
            metadata, end = _metadata(text, position, file)
            return end
        if not is_utf8(name):
            _fail(file, f"{clip(name)} is not a UTF-8 name")
        entry, end = read_value(text, position)
        tensors[name] = _tensor(name, entry, data_start, file)
        return end

    try:
        if not text.startswith("{", skip_space(text, 0)):
            read_value(text, 0)
            _fail(file, "its header is not a JSON object")
        end = read_object(text, 0, member)
        if skip_space(text, end) < len(text):
            raise ValueError("more after the object")
    except MossError:
        raise
    except RecursionError:
        _fail(file, "its header is nested too deeply")
    except RepeatedNameError as error:
        _fail(file, f"its header gives {clip(error.name)} twice")
    except ValueError:
        _fail(file, "its header is not valid JSON")
    return tensors, metadata or {}


def _metadata(text: str, position: int, file: Path) -> tuple[dict[str, str], int]:
    """The object of strings at ``position`` (null means none), and where it ends."""
    position = skip_space(text, position)
    if text.startswith("null", position):
        return {}, position + 4
    found: dict[str, str] = {}

    def pair(name: str, place: int) -> int:
        value, end = read_string(text, place)
        if not (is_utf8(name) and is_utf8(value)):
            raise ValueError("half a surrogate pair")
        found[name] = value
        return end

    try:
        return found, read_object(text, position, pair)
    except ValueError:
        _fail(file, "__metadata__ is not an object of UTF-8 strings")


def _tensor(name: str, entry: Any, data_start: int, file: Path) -> TensorInfo:
    """One header entry, its fields checked. Fields that are not known are passed over."""
    shown = clip(name)
    if isinstance(entry, list) and len(entry) == len(_ENTRY_FIELDS):
        entry = dict(zip(_ENTRY_FIELDS, entry, strict=True))  # the package reads such entries, too
    if not isinstance(entry, dict) or not all(field in entry for field in _ENTRY_FIELDS):
        _fail(file, f"{shown} is not an object of dtype, shape and data_offsets")
    dtype, shape, offsets = (entry[field] for field in _ENTRY_FIELDS)
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _fail(file, f"{shown} has the unknown dtype {clip(dtype)}")
    if not _is_sizes(shape):
        _fail(file, f"{shown} has a bad shape {clip(shape)}")
    if not _is_sizes(offsets) or len(offsets) != 2:
        _fail(file, f"{shown} has bad data_offsets {clip(offsets)}")
    begin, end = offsets
    return TensorInfo(name, dtype, tuple(shape), end - begin, data_start + begin, file)


def _is_sizes(value: Any) -> bool:
    """Whether ``value`` is a list of integers (no booleans) of 64 bits."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _MAX_SIZE for item in value)


def _elements(shape: Sequence[int]) -> int:
    """The product of the sizes; once it is beyond any file, as far as it has come."""
    count = 1
    for size in shape:
        count *= size
        if count > _MAX_SIZE:
            break
    return count


def _check_bytes(info: TensorInfo, data_start: int, file: Path) -> None:
    """Refuse a tensor whose bytes are not those that its dtype and shape take."""
    shown, begin = clip(info.name), info.start - data_start
    if info.nbytes < 0:
        _fail(file, f"{shown} has bad data_offsets {[begin, begin + info.nbytes]}")
    if _elements(info.shape) * DTYPE_BITS[info.dtype] != info.nbytes * 8:
        fits = f"fit its dtype {info.dtype} and shape {clip(list(info.shape))}"
        _fail(file, f"{shown} has {info.nbytes} bytes, which do not {fits}")


def _check_ranges(tensors: dict[str, TensorInfo], data_start: int, size: int, file: Path) -> None:
    """Refuse sizes that do not fit, overlaps, gaps, and data that end before or after the file does.

    Only now, since of a tensor given twice the last one counts alone.
    """
    for info in tensors.values():
        _check_bytes(info, data_start, file)
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
    if len(raw) > MAX_HEADER_BYTES:
        raise MossError(
            f"The new file's header would have {len(raw)} bytes, and no loader opens more than {MAX_HEADER_BYTES}: "
            "save the model again with ComfyUI's --disable-metadata, which leaves the workflow out."
        )
    return len(raw).to_bytes(8, "little") + raw


def clip(value: object) -> str:
    """A short printable form of something read from a file."""
    shown = value if isinstance(value, str) else repr(value)
    shown = "".join(char if char.isprintable() else "?" for char in shown[:100])
    return shown or "''"
