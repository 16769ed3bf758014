"""Hostile files: `python -m bench.fuzz --seconds 60 [--seed N]`.

Golden files are damaged at random, in their bytes, their header and their fold record, and opened. Whatever happens has
to be a model or one sentence, within two seconds and 256 MB beyond the file's size. A finding is printed with the seed
that makes it again, and kept as a file; the exit status is 1 then. tests/unit/test_fuzz.py runs the start of it.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fold.checkpoint.reader import open_checkpoint
from fold.errors import MossError
from fold.scaling.record import RECORD_KEY, FoldRecord

from .memory import new_peak, peak_mb

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
SECONDS, MEGABYTES = 2.0, 256
#: Values that stand where others are expected.
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), 2**31, 2**63 - 1,
    2**63, 2**64, -(2**63), 10**400, "", "gate", "F32", "F64", "BF16", "F4", "stock", "0.0625", "1/16", "\0", "\ud800",
    "../../etc/passwd", "a" * 4096, "ä€😀", [], [[]], {}, {"": ""}, [0, 0], [0, 1], [1, 0], [2**40, 2**41], [-1, 4],
)  # fmt: skip


def odd(numbers: random.Random) -> Any:
    """One of ODD, of its own."""
    return copy.deepcopy(numbers.choice(ODD))


@dataclass(frozen=True)
class Sample:
    """One damaged file."""

    header: bytes
    data: bytes
    length: int

    def write(self, file: Path) -> Path:
        file.write_bytes((self.length % 2**64).to_bytes(8, "little") + self.header + self.data)
        return file


def split(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header's object and the data of a sound file."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def damaged(numbers: random.Random, table: dict[str, Any], data: bytes) -> Sample:
    """A damaged copy of a file: one to four faults of any kind."""
    table, shape = copy.deepcopy(table), [table, data]
    for _ in range(numbers.randint(1, 4)):
        shape[1] = numbers.choice(CHANGES)(numbers, table, shape[1])
    header = json.dumps(table, ensure_ascii=numbers.random() < 0.5).encode("utf-8", "surrogatepass")
    length = len(header)
    if numbers.random() < 0.25:
        header = bytes_damaged(numbers, header)
        length = len(header)
    if numbers.random() < 0.15:
        length = numbers.choice((0, 1, length - 1, length + 1, 2**20, 2**32, 2**63, 2**64 - 1, -1))
    return Sample(header, shape[1], length)


def bytes_damaged(numbers: random.Random, raw: bytes) -> bytes:
    """Bytes with some turned, cut, doubled or thrown in."""
    out = bytearray(raw)
    for _ in range(numbers.randint(1, 8)):
        if not out:
            break
        at = numbers.randrange(len(out))
        match numbers.randrange(4):
            case 0:
                out[at] = numbers.randrange(256)
            case 1:
                del out[at : at + numbers.choice((1, 8, len(out)))]
            case 2:
                out[at:at] = out[at : at + numbers.choice((1, 16, 256))]
            case _:
                out[at:at] = numbers.choice(
                    (b"[" * 4000, b"\xff\xfe", b"\0" * 16, b"9" * 5000, b'{"a":' * 2000, b"\xc3")
                )
    return bytes(out)


def _entry(numbers: random.Random, table: dict[str, Any], data: bytes) -> bytes:
    name = numbers.choice(list(table) or [""])
    if isinstance(table.get(name), dict) and name != "__metadata__":
        table[name][numbers.choice(("dtype", "shape", "data_offsets", "more"))] = odd(numbers)
    else:
        table[name] = odd(numbers)
    return data


def _key(numbers: random.Random, table: dict[str, Any], data: bytes) -> bytes:
    name = numbers.choice(list(table) or [""])
    value = table.pop(name, {})
    if numbers.random() < 0.5:
        table[
            numbers.choice((name + "x", "vae." + name, "transformer." + name, "", "layers.999999999.norm1.weight"))
        ] = value
    return data


def _shape(numbers: random.Random, table: dict[str, Any], data: bytes) -> bytes:
    found = [entry for entry in table.values() if isinstance(entry, dict) and isinstance(entry.get("shape"), list)]
    if found:
        shape = numbers.choice(found)["shape"]
        shape[:] = [numbers.choice((0, 1, size, 2**31, 2**62)) if type(size) is int else size for size in shape]
    return data


def _record(numbers: random.Random, table: dict[str, Any], data: bytes) -> bytes:
    table["__metadata__"] = {RECORD_KEY: record_text(numbers)}
    return data


def _cut(numbers: random.Random, table: dict[str, Any], data: bytes) -> bytes:
    return data[: numbers.randrange(len(data) + 1)] + b"\0" * numbers.choice((0, 0, 1, 4096))


def _values(numbers: random.Random, table: dict[str, Any], data: bytes) -> bytes:
    """NaN, infinity and noise among the weights."""
    out = bytearray(data)
    for _ in range(numbers.randint(1, 20)):
        if len(out) > 4:
            at = numbers.randrange(len(out) - 4)
            out[at : at + 4] = numbers.choice((b"\xc0\x7f\xc0\x7f", b"\x80\x7f\x80\xff", b"\xff\xff\xff\xff"))
    return bytes(out)


CHANGES: tuple[Callable[[random.Random, dict[str, Any], bytes], bytes], ...] = (
    _entry, _entry, _key, _shape, _record, _cut, _values,
)  # fmt: skip


def record_text(numbers: random.Random) -> str:
    """A damaged fold record."""
    record: Any = {"c": 0.0625, "via": "gate", "s_attn": 1.0, "s_ffn": 1.0, "eps": "stock"}
    for _ in range(numbers.randint(1, 3)):
        field = numbers.choice((*record, "new")) if isinstance(record, dict) else None
        if field is None or numbers.random() < 0.1:
            record = odd(numbers)
        elif numbers.random() < 0.2:
            record.pop(field, None)
        else:
            record[field] = odd(numbers)
    text = json.dumps(record)
    if numbers.random() < 0.3:
        text = bytes_damaged(numbers, text.encode()).decode("utf-8", "replace")
    return text


def outcome(work: Callable[[], object], file: Path | None = None) -> str:
    """Give "opened" or the sentence; AssertionError for a crash, no sentence, over two seconds, or too much memory.

    file: whose size may come on top of MEGABYTES, as its pages are mapped.
    """
    before = new_peak()
    begun = time.process_time()  # of the processor, which other programs' work does not stretch
    try:
        work()
        said = "opened"
    except MossError as error:
        said = str(error)
        assert said.endswith((".", ")")) and said.strip() == said, f"no sentence: {said!r}"
        assert "\n" not in said and said.isprintable() and len(said) < 1500, f"not one clean line: {said!r}"
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} instead of a sentence: {error!s:.200}") from error
    took = time.process_time() - begun
    assert took < SECONDS, f"{took:.1f} s until {said!r}"
    if before is not None:
        grown, allowed = peak_mb() - before, MEGABYTES + (file.stat().st_size / 1e6 if file else 0.0)
        assert grown < allowed, f"{grown:.0f} MB more until {said!r}"
    return said


def open_and_read(file: Path) -> None:
    """All that a loader does with a file."""
    with open_checkpoint(file) as checkpoint:
        checkpoint.state_dict(check=True)
        _ = checkpoint.dtype, checkpoint.nbytes, checkpoint.foreign


def one(seed: int, sources: list[tuple[dict[str, Any], bytes]], folder: Path) -> str:
    """The sample of one seed, opened; its record, parsed."""
    numbers = random.Random(seed)
    outcome(lambda: FoldRecord.parse(record_text(numbers), "fuzz"))
    file = damaged(numbers, *numbers.choice(sources)).write(folder / "fuzz.safetensors")
    return outcome(lambda: open_and_read(file), file)


def sources() -> list[tuple[dict[str, Any], bytes]]:
    return [split(DATA / f"{name}.safetensors") for name in ("cool", "hot_fp16fix_s", "hot_fused_qkv", "hot_prefixed")]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; each sample takes the next")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="folder for files that did harm")
    options = parser.parse_args(argv)
    files, kinds, found, seed = sources(), Counter[str](), 0, options.seed
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        open_and_read(DATA / "cool.safetensors")  # what opening needs at all: torch
        until = time.monotonic() + options.seconds
        while time.monotonic() < until:
            try:
                kinds["opened" if one(seed, files, folder) == "opened" else "a sentence"] += 1
            except AssertionError as error:
                found += 1
                options.keep.mkdir(exist_ok=True)
                (options.keep / f"{seed}.safetensors").write_bytes((folder / "fuzz.safetensors").read_bytes())
                print(f"seed {seed}: {error}")
            seed += 1
    print(f"{seed - options.seed} files: {dict(kinds)}, {found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
