"""Rows of files: inspect on a large one, export against a plain copy, and export's peak memory."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from fold.arch import MossArch
from fold.checkpoint.export import export_checkpoint
from fold.checkpoint.header import header_bytes
from fold.cli import main as fold_command
from fold.scaling.factors import DEFAULT

from .stats import interleave, quartiles, ratio
from .table import Row
from .work import ROOT

#: MOSS-Image 5B: about 10 GB in bf16.
REAL = MossArch(3072, 42, 24, 8192, 4096, 2, 8192, 128, 256)
_TARGET_MEMORY_MB = 100.0


def entries(arch: MossArch) -> list[tuple[str, str, tuple[int, ...], int]]:
    """The header of a bf16 checkpoint: name, dtype, shape, bytes."""
    kinds = {name: "F32" if name == arch.names.rope_bands else "BF16" for name in arch.expected_shapes(fused=False)}
    return [
        (name, kinds[name], shape, math.prod(shape) * (4 if kinds[name] == "F32" else 2))
        for name, shape in arch.expected_shapes(fused=False).items()
    ]


def write_sparse(target: Path, arch: MossArch) -> int:
    """A checkpoint of zeros that takes no room on the disk; its size in bytes."""
    listed = entries(arch)
    with target.open("wb") as stream:
        stream.write(header_bytes(listed, {"title": "sparse"}))
        stream.truncate(stream.tell() + sum(nbytes for *_, nbytes in listed))
        return stream.seek(0, 2)


def write_noise(target: Path, nbytes: int) -> int:
    """A checkpoint of about this size with blocks of the 5B's shapes."""
    block = 2 * (4 * REAL.dim**2 + 3 * REAL.ffn_dim * REAL.dim)
    depth = max(1, round(nbytes / block))
    return write_checkpoint(target, replace(REAL, depth=depth, text_dim=64, text_ffn_dim=64))


def write_checkpoint(target: Path, arch: MossArch) -> int:
    """A checkpoint with real content, quickly: every tensor has the same random numbers. Its size in bytes."""
    listed = entries(arch)
    noise = torch.randn(max(n for *_, n in listed) // 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    data = memoryview(noise.view(torch.uint8).numpy())
    with target.open("wb") as stream:
        stream.write(header_bytes(listed, {"title": "noise"}))
        for _, kind, _, count in listed:
            stream.write(bytes(count) if kind == "F32" else data[:count])
        return stream.tell()


def inspect_row(folder: Path, repeats: int) -> Row:
    """`python -m fold inspect` after the imports, on a sparse file of the 5B's size."""
    file = folder / "sparse.safetensors"
    size = write_sparse(file, REAL)
    taken = []
    for _ in range(repeats):
        with contextlib.redirect_stdout(io.StringIO()):
            started = time.perf_counter()
            code = fold_command(["inspect", str(file), "--json"])
            taken.append(1e3 * (time.perf_counter() - started))
        if code:
            raise RuntimeError("inspect failed on the sparse file.")
    file.unlink()
    what = f"inspect on a {size / 1e9:.1f} GB (sparse) file, after import"
    return Row(what, "CPU", statistics.median(taken), *quartiles(taken), repeats, 50.0, "ms")


def export_rows(folder: Path, nbytes: int, repeats: int) -> Iterator[Row]:
    """Export against `cp` and fsync of the same file, as stored and to fp16; export's peak memory."""
    source, copied, exported = (folder / f"{name}.safetensors" for name in ("source", "copy", "export"))
    size = write_noise(source, nbytes)

    def copy() -> float:
        copied.unlink(missing_ok=True)
        started = time.perf_counter()
        shutil.copyfile(source, copied)
        with copied.open("rb+") as stream:
            os.fsync(stream.fileno())
        return time.perf_counter() - started

    def export(dtype: str) -> float:
        exported.unlink(missing_ok=True)
        started = time.perf_counter()
        export_checkpoint(source, exported, DEFAULT, dtype=dtype)
        return time.perf_counter() - started

    seconds = interleave({"cp": copy, "keep": lambda: export("keep"), "fp16": lambda: export("fp16")}, repeats)
    where = f"CPU, {size / 1e9:.1f} GB"
    rate = f"cp: {size / 1e6 / statistics.median(seconds['cp']):.0f} MB/s"
    yield Row.of(
        "export against copying the file (cp + fsync)", where, ratio(seconds["keep"], seconds["cp"]), 1.5, rate
    )
    yield Row.of("export to fp16 against copying the file", where, ratio(seconds["fp16"], seconds["cp"]), 1.5)
    copied.unlink()
    exported.unlink()
    yield memory_row(source, exported, size)
    for file in (source, exported):
        file.unlink()


_MEMORY = """
import json, sys
from bench.memory import peak_mb
from fold.export import export_checkpoint
from fold.factors import DEFAULT
before = peak_mb()
export_checkpoint(sys.argv[1], sys.argv[2], DEFAULT, dtype="fp16")
print(json.dumps([before, peak_mb()]))
"""


def memory_row(source: Path, target: Path, size: int) -> Row:
    """What export adds to the peak memory of a process that has imported it."""
    command = [sys.executable, "-c", _MEMORY, str(source), str(target)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    before, peak = json.loads(done.stdout)
    added = peak - before
    note = f"above {before:.0f} MB after import"
    where = f"CPU, {size / 1e9:.1f} GB"
    return Row("peak memory of export to fp16", where, added, added, added, 1, _TARGET_MEMORY_MB, "MB", note)
