"""`python -m bench [--full] [--out DIR]`: every target's ratio in one run, as JSON, Markdown and a growth plot.

`python -m bench trace`: what a call does to cards that are not here, see `trace.report`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from . import files, gpu, headless, loading, machine, steps
from .plot import growth_plot
from .table import Row, markdown
from .trace import report
from .work import HERE, NO_COMFYUI, find_comfyui, miniature


def main(argv: list[str] | None = None) -> int:
    """Measure everything that can be measured here; `trace` counts what cannot."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["trace"]:
        return report.main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--full", action="store_true", help="more repeats and larger shapes: about 20 minutes")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results", help="folder for bench.json, bench.md, growth.png"
    )
    parser.add_argument("--only", choices=("steps", "growth", "loading", "casts", "files"), help="one part alone")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    found: dict[str, Any] = {
        "command": " ".join(["python dev.py bench", *(["--full"] if options.full else [])]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine.describe(),
    }
    with tempfile.TemporaryDirectory(prefix="moss-bench-") as temporary:
        run = Run(Path(temporary), options.out, options.full, options.only)
        run.all()
    found |= {
        "seconds": round(time.monotonic() - started),
        "skipped": run.skipped,
        "shapes": run.shapes,
        "rows": [row.to_json() for row in run.rows],
        "growth": run.growth,
    }
    write(options.out, found, run.rows)
    return 0


class Run:
    """One run of the bench: collects rows."""

    def __init__(self, folder: Path, out: Path, full: bool, only: str | None) -> None:
        self.folder, self.out, self.full, self.only = folder, out, full, only
        self.comfyui = find_comfyui()
        self.rows: list[Row] = []
        self.growth: list[dict[str, Any]] = []
        self.imports: list[dict[str, Any]] = []
        self.shapes: list[str] = []
        self.skipped: list[str] = []

    def all(self) -> None:
        """Every part, with a line of progress each."""
        if self.comfyui is None:
            self.skip(f"!!! There is {NO_COMFYUI}: the native path, the loader and the import were not measured.")
            self.part("steps", self.headless_steps)
        else:
            self.part("steps", self.comfy_steps)
            self.part("growth", self.comfy_growth)
            self.part("loading", self.loading)
            self.part("casts", self.casts)
        self.part("files", self.files)
        if torch.cuda.is_available():
            gpu.main(["--rounds", "15" if self.full else "8", "--out", str(self.out)])
        else:
            self.skip("GPU: none here, so its column was not measured; `python -m bench.gpu` does it in one call.")

    def part(self, name: str, measure: Callable[[], Iterable[Row]]) -> None:
        if self.only not in (None, name):
            return
        started = time.monotonic()
        print(f"{name} ...", file=sys.stderr, flush=True)
        for row in measure():
            self.rows.append(row)
            print(f"  {row.what} ({row.device}): {row.value:.3f} {row.unit}", file=sys.stderr, flush=True)
        print(f"  {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    def skip(self, sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)
        self.skipped.append(sentence)

    def comfy_steps(self) -> Iterable[Row]:
        """The miniature in fp32 (what a CPU computes in), and fp32_residual where the stream really is narrower."""
        assert self.comfyui is not None
        shape = steps.Shape(1024, 8 if self.full else 4, (32, 32), 256)
        names = tuple(name for name in steps.VARIANTS if name != steps.AGAIN)
        job = steps.Job(shape, names, 15 if self.full else 7)
        (found,), imported = steps.measure(self.comfyui, self.folder, [job])
        self.imports.append(imported)
        yield from steps.rows(found, shape)
        half = steps.Shape(1024, 2, (16, 16), 64, dtype="fp16")
        job = steps.Job(half, ("fp32_residual", "clamp"), 11 if self.full else 4)
        (found,), imported = steps.measure(self.comfyui, self.folder, [job])
        self.imports.append(imported)
        yield from steps.rows(found, half)
        self.shapes += [shape.label, half.label]

    def headless_steps(self) -> Iterable[Row]:
        """The built-in class alone."""
        arch, cpu = miniature(1024, 8 if self.full else 4), torch.device("cpu")
        model = headless.random_model(arch, cpu, torch.float32)
        inputs = headless.random_inputs(arch, (32, 32), 256, 1, cpu, torch.float32)
        self.shapes.append(f"D 1024, {arch.depth} blocks, 1024 + 256 tokens, fp32, built-in class without ComfyUI")
        return headless.rows(model, inputs, torch.float32, 21 if self.full else 7, "CPU, fp32, built-in class")

    def comfy_growth(self) -> Iterable[Row]:
        assert self.comfyui is not None
        self.growth = steps.growth(self.comfyui, self.folder, self.full)
        return []

    def loading(self) -> Iterable[Row]:
        assert self.comfyui is not None
        nbytes, rounds = (2 * 10**9, 15) if self.full else (10**9, 7)
        yield from loading.loader_rows(self.comfyui, self.folder, nbytes, rounds, self.imports)
        yield loading.import_row(self.imports)

    def casts(self) -> Iterable[Row]:
        assert self.comfyui is not None
        return loading.cast_rows(self.comfyui, self.folder, 1024, 2, 15 if self.full else 5)

    def files(self) -> Iterable[Row]:
        yield files.inspect_row(self.folder, 21)
        yield from files.export_rows(self.folder, 4 * 10**9 if self.full else 10**9, 5)


NOTES = "## How to read it"


def write(out: Path, found: dict[str, Any], rows: list[Row]) -> None:
    """bench.json, bench.md and, where growth was measured, growth.png.

    What stands in an older bench.md from NOTES on was written by people and is kept.
    """
    document = out / "bench.md"
    notes = document.read_text("utf-8").partition(NOTES)[2] if document.exists() else ""
    lines = [
        "# What the fix costs",
        "",
        f"`{found['command']}`, {found['date']}: {machine.sentence(found['machine'])}.",
        "",
        "Each ratio: the median of the ratios of runs next to each other, taken in turns in one run, against the same "
        "model with the fix off. The CPU computes in fp32 (it has no fast 16-bit products) but where a row says fp16.",
        *(f"Model calls: {shape}." for shape in found["shapes"]),
        *found["skipped"],
        "",
        markdown(rows),
    ]
    if found["growth"]:
        growth_plot(found["growth"], out / "growth.png")
        lines += ["![The cost of the default settings over image tokens, blocks and batch](growth.png)", ""]
    if notes:
        lines.append(NOTES + notes)
    text = "\n".join(lines)
    (out / "bench.json").write_text(json.dumps(found, indent=1), "utf-8")
    document.write_text(text, "utf-8")
    print(text)


if __name__ == "__main__":
    sys.exit(main())
