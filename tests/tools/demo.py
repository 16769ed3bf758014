"""`python dev.py demo`: a model that overflows fp16, sampled with the fix off and on, in ComfyUI when there is one.

Makes a small checkpoint and its conditioning in demo_output/, runs the example API workflow (or, without a ComfyUI, the
same job through `python -m fold sample`), prints both saturation tables and writes one chart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import console
from comfy_server import ComfyServer, ComfyUIError, load_client
from repo import ROOT, find_comfyui

OUT = ROOT / "demo_output"
MODEL = OUT / "moss_demo.safetensors"
CONDITIONING = {"positive": OUT / "moss_positive.safetensors", "negative": OUT / "moss_negative.safetensors"}
STEPS, CFG, SEED, SIZE = 8, 3.0, 42, 128
#: fix -> what its table is called
RUNS = {"none": "Fix off (mode none, fp16)", "online": "Fix on (mode online, c = 1/16, fp16)"}


def fold(*arguments: str) -> str:
    """Run `python -m fold ...` and return its output. Raises SystemExit with its message when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "fold", *arguments], cwd=ROOT, check=False, stdout=subprocess.PIPE, encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"python -m fold {' '.join(arguments)} ended with {done.returncode}.")
    return done.stdout


def make_inputs() -> None:
    """The checkpoint, and two made-up prompts of different length in place of a text encoder's output."""
    import torch
    from safetensors.torch import save_file

    OUT.mkdir(exist_ok=True)
    fold("demo-checkpoint", str(MODEL), "--overwrite")
    width = json.loads(fold("inspect", str(MODEL), "--json"))["arch"]["text_dim"]
    for seed, (name, tokens) in enumerate({"positive": 12, "negative": 5}.items()):
        noise = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(seed))
        save_file({"context": noise}, CONDITIONING[name])


def run_in_comfyui(comfyui: Path) -> dict[str, tuple[dict[str, Any], Path]]:
    """Queue the example workflow twice on a real ComfyUI; per fix the report and the saved latent's file."""
    client = load_client()
    results = {}
    with tempfile.TemporaryDirectory(prefix="moss-demo-", ignore_cleanup_errors=True) as temporary:
        server = ComfyServer(comfyui, Path(temporary), models=[MODEL])
        for file in CONDITIONING.values():
            (server.base / "input" / file.name).write_bytes(file.read_bytes())
        print(f"Starting ComfyUI from {comfyui} ...", flush=True)
        started = time.monotonic()
        with server:
            print(f"ComfyUI answers after {time.monotonic() - started:.0f} s", flush=True)
            for fix, title in RUNS.items():
                print(f"Queueing example_workflows/api/moss_fp16_headless.json: {title}", flush=True)
                entry = client.run(server.client, workflow(client, fix))
                if reason := client.failure(entry):
                    raise SystemExit(f"{reason}\nThe end of ComfyUI's log:\n{server.log_tail()}")
                latent = OUT / f"latent_{fix}.safetensors"
                (saved,) = next(out["latents"] for out in entry["outputs"].values() if "latents" in out)
                latent.write_bytes((server.base / "output" / saved["subfolder"] / saved["filename"]).read_bytes())
                results[fix] = (client.reports(entry)[0], latent)
    return results


def workflow(client: Any, fix: str) -> dict[str, Any]:
    """The example API workflow, set to the demo's model and sizes."""
    prompt: dict[str, Any] = client.load_workflow(ROOT / "example_workflows" / "api" / "moss_fp16_headless.json")
    loader = {"model_name": MODEL.name, "compute_dtype": "fp16", "fix": fix, "guard": "report"}
    settings = {
        **{f"MossFP16Loader.{name}": value for name, value in loader.items()},
        "Positive conditioning.file": CONDITIONING["positive"].name,
        "Negative conditioning.file": CONDITIONING["negative"].name,
        "EmptyFlux2LatentImage.width": SIZE,
        "EmptyFlux2LatentImage.height": SIZE,
        "KSampler.steps": STEPS,
        "KSampler.cfg": CFG,
        "KSampler.seed": SEED,
    }
    for name, value in settings.items():
        client.apply_setting(prompt, f"{name}={value}")
    return prompt


def run_in_process() -> dict[str, tuple[dict[str, Any], Path]]:
    """The same two jobs without ComfyUI."""
    results = {}
    for fix, title in RUNS.items():
        print(f"Sampling in process: {title}", flush=True)
        latent, report = OUT / f"latent_{fix}.safetensors", OUT / f"report_{fix}.json"
        fold(
            "sample", str(MODEL), "--mode", fix, "--dtype", "fp16", "--steps", str(STEPS), "--cfg", str(CFG),
            "--seed", str(SEED), "--width", str(SIZE), "--height", str(SIZE),
            "--cond", str(CONDITIONING["positive"]), "--uncond", str(CONDITIONING["negative"]),
            "--out", str(latent), "--report", str(report),
        )  # fmt: skip
        results[fix] = (json.loads(report.read_text("utf-8")), latent)
    return results


def describe_latent(path: Path) -> str:
    """How much of a saved latent is finite."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(path)
    latent = tensors.get("latent_tensor", next(iter(tensors.values())))
    bad = int((~torch.isfinite(latent)).sum())
    if bad:
        return f"latent: {bad} of {latent.numel()} values are not finite: a black image"
    return f"latent: all {latent.numel()} values finite, largest {latent.abs().max():.3g}"


def write_chart(reports: list[dict[str, Any]], target: Path) -> None:
    """Both charts, one above the other, as one PNG."""
    import numpy
    from PIL import Image

    sys.path.insert(0, str(ROOT))
    from fold.report.chart import render_chart

    pictures = [render_chart(report, width=1280, height=520) for report in reports]
    Image.fromarray(numpy.concatenate(pictures, axis=0)).save(target)


def main() -> int:
    """Run the demo; 0 when the fix did what it promises."""
    console.never_raise()
    make_inputs()
    comfyui = find_comfyui()
    try:
        results = run_in_process() if comfyui is None else run_in_comfyui(comfyui)
    except ComfyUIError as error:
        raise SystemExit(str(error)) from None
    for fix, (report, latent) in results.items():
        (OUT / f"report_{fix}.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        print(f"\n{RUNS[fix]}\n{load_client().format_report(report)}\n{describe_latent(latent)}")
    chart = OUT / "saturation.png"
    write_chart([report for report, _ in results.values()], chart)
    print(f"\nChart: {chart}\nReports and latents: {OUT}")
    off, on = (results[fix][0]["summary"] for fix in RUNS)
    overflowed = off["saturated"] + off["non_finite"] > 0
    in_range = on["saturated"] + on["non_finite"] == 0
    print(
        f"Overflow with the fix off: {'yes' if overflowed else 'no'}; with the fix on: {'no' if in_range else 'yes'}."
    )
    return 0 if overflowed and in_range else 1


if __name__ == "__main__":
    sys.exit(main())
