"""`python -m bench.gpu`: blocks of the real size on a GPU, in bf16, fp16 and fp16 with reduced-precision accumulation.

Step time by events and peak memory, with and without the fix; then every mode's ratio. Needs an NVIDIA (or ROCm) GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fold.arch import MossArch
from fold.model.forward import MossDiT
from fold.scaling.plan import StreamPlan

from . import machine, steps
from .files import REAL
from .headless import ONLINE, Inputs, call, random_inputs, random_model, rows
from .stats import interleave, quartiles
from .table import markdown
from .work import NO_COMFYUI, find_comfyui

NO_GPU = "No GPU that torch can use was found, so nothing was measured; run this command on a machine that has one."
SIZE, TEXT = (64, 64), 512
#: name -> (dtype, reduced-precision accumulation)
PRECISIONS = {
    "bf16": (torch.bfloat16, False),
    "fp16": (torch.float16, False),
    "fp16, fp16 accumulation": (torch.float16, True),
}


def main(argv: list[str] | None = None) -> int:
    """Measure, print Markdown, write gpu.json and gpu.md."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--blocks", type=int, default=42, help="joint blocks of the large model (default 42)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(NO_GPU)
        return 0
    device = torch.device("cuda")
    found = measure(device, fitting(options.blocks), options.rounds)
    if (comfyui := find_comfyui()) is None:
        found["markdown"] += f"\nThere is {NO_COMFYUI}: the native path was not measured.\n"
    else:
        found["markdown"] += f"\n{in_comfyui(comfyui, options.rounds)}"
    text = f"{machine.sentence(found['machine'])}; {found['date']}\n\n{found['markdown']}"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.json").write_text(json.dumps(found, indent=1), "utf-8")
    (options.out / "gpu.md").write_text(text, "utf-8")
    print(text)
    return 0


def in_comfyui(comfyui: Path, rounds: int) -> str:
    """The table of all modes inside ComfyUI's sampler, on a few blocks of the real size."""
    shape = steps.Shape(REAL.dim, 4, SIZE, TEXT, dtype="fp16")
    names = tuple(name for name in steps.VARIANTS if name != steps.AGAIN)
    with tempfile.TemporaryDirectory(prefix="moss-bench-") as folder:
        (found,), _ = steps.measure(comfyui, Path(folder), [steps.Job(shape, names, 2 * rounds)], cpu=False)
    return f"In ComfyUI: {shape.label}\n\n{markdown(steps.rows(found, shape, gpu=True))}"


def fitting(blocks: int) -> int:
    """As many blocks as asked for, or as fit into three quarters of the free memory in 16 bits."""
    free, _ = torch.cuda.mem_get_info()
    block = 2 * (4 * REAL.dim**2 + 3 * REAL.ffn_dim * REAL.dim)
    rest = 4 * 2**30  # embedders, text refiner, activations
    fit = max(1, int((0.75 * free - rest) // block))
    if fit < blocks:
        print(f"Only {fit} of {blocks} blocks fit into the memory that is free.", file=sys.stderr)
    return min(blocks, fit)


def measure(
    device: torch.device,
    blocks: int,
    rounds: int,
    arch: MossArch = REAL,
    size: tuple[int, int] = SIZE,
    text: int = TEXT,
) -> dict[str, Any]:
    """Both tables, as data and as Markdown."""
    timed, ratios, lacking = [], [], ""
    for name, (dtype, reduced) in PRECISIONS.items():
        if reduced and not has_fp16_accumulation():
            lacking = f"\nNo row for {name}: torch {torch.__version__} does not have it (2.7 and newer do).\n"
            continue
        model = random_model(replace(arch, depth=blocks), device, dtype)
        inputs = random_inputs(model.arch, size, text, 1, device, dtype)
        with accumulation(reduced):
            timed += step_rows(name, model, inputs, dtype, rounds)
            if name == "fp16":
                ratios += rows(model, inputs, dtype, rounds, f"{blocks} blocks, fp16")
        del model, inputs
    if blocks > 4:
        small = random_model(replace(arch, depth=4), device, torch.float16)
        inputs = random_inputs(small.arch, size, text, 1, device, torch.float16)
        ratios += rows(small, inputs, torch.float16, 2 * rounds, "4 blocks, fp16")
    shape = f"D {arch.dim}, {blocks} blocks, {size[0] * size[1]} + {text} tokens, random weights"
    table = f"{shape}\n\n{step_table(timed)}{lacking}\n{markdown(ratios)}"
    return {
        "machine": machine.describe(),
        "date": time.strftime("%Y-%m-%d"),
        "shape": shape,
        "steps": timed,
        "rows": [row.to_json() for row in ratios],
        "markdown": table,
    }


def step_rows(name: str, model: MossDiT, inputs: Inputs, dtype: torch.dtype, rounds: int) -> Iterator[dict[str, Any]]:
    """Milliseconds and peak memory of a step without and with the fix (online, counters, guard's flag)."""
    things = {
        "off": call(model, inputs, dtype, StreamPlan(), counted=False, flag=False),
        "on": call(model, inputs, dtype, ONLINE, counted=True, flag=True),
    }
    seconds = interleave(things, rounds, warm_up=2)
    for fix, once in things.items():
        low, high = quartiles(seconds[fix])
        yield {
            "precision": name, "fix": fix, "ms": 1e3 * statistics.median(seconds[fix]),
            "low": 1e3 * low, "high": 1e3 * high, "peak_mib": peak_mib(inputs.latent.device, once),
        }  # fmt: skip


def step_table(timed: list[dict[str, Any]]) -> str:
    """The step rows as Markdown."""
    lines = ["| precision | fix | step, ms | quartiles | peak memory, MiB |", "| --- | --- | --- | --- | --- |"]
    for one in timed:
        spread = f"{one['low']:.2f} to {one['high']:.2f}"
        lines.append(f"| {one['precision']} | {one['fix']} | {one['ms']:.2f} | {spread} | {one['peak_mib']:.0f} |")
    return "\n".join(lines) + "\n"


def peak_mib(device: torch.device, once: Any) -> float:
    """The most device memory that was allocated during one call, weights included (0 where it cannot be told)."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats(device)
    once()
    return torch.cuda.max_memory_allocated(device) / 2**20


def has_fp16_accumulation() -> bool:
    """Whether this torch has the switch that ComfyUI's --fast fp16_accumulation turns on."""
    return hasattr(torch.backends.cuda.matmul, "allow_fp16_accumulation")


@contextlib.contextmanager
def accumulation(reduced: bool) -> Iterator[None]:
    """Turn fp16 accumulation on or off for the time of a measurement; without the switch it is always off."""
    if not has_fp16_accumulation():
        yield
        return
    settings = torch.backends.cuda.matmul
    before = settings.allow_fp16_accumulation
    settings.allow_fp16_accumulation = reduced
    try:
        yield
    finally:
        settings.allow_fp16_accumulation = before


if __name__ == "__main__":
    sys.exit(main())
