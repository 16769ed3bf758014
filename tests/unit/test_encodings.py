"""Output into pipes and consoles that cannot show every character: replaced, never an error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import run_tests
from encoded import ENCODINGS, NAME, pipe, written
from repo import DATA, ROOT
from safetensors.torch import load_file, save_file

import dev
from fold.cli import main

CASE = "case0"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    context = load_file(DATA / "hot_io.safetensors")[f"{CASE}.context"][:1].contiguous()
    save_file({"context": context}, tmp_path / "prompt.safetensors")
    return Path(shutil.copy(DATA / "hot.safetensors", tmp_path / f"{NAME}.safetensors"))


def commands(model: Path) -> dict[str, list[str]]:
    """A short run of every command on the model; what is written goes beside it."""
    inputs = str(DATA / "hot_io.safetensors")
    one = ["--io", inputs, "--latent", f"{CASE}.latent", "--context", f"{CASE}.context", "--sigma", "0.7"]
    size = ["--width", "64", "--height", "64"]
    prompt = ["--cond", str(model.with_name("prompt.safetensors"))]
    out = str(model.with_name("結果.safetensors"))
    return {
        "inspect": ["inspect", str(model)],
        "inspect --json": ["inspect", str(model), "--json"],
        "forward": ["forward", str(model), *one, "--dtype", "fp16", "--out", out],
        "sample": ["sample", str(model), *prompt, *size, "--steps", "1", "--dtype", "fp16", "--out", out],
        "export": ["export", str(model), out],
        "unfold": ["unfold", str(DATA / "hot_fp16fix.safetensors"), out],
        "demo-checkpoint": ["demo-checkpoint", out, "--dim", "64", "--depth", "2", "--heads", "2"],
    }


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", list(commands(Path("x"))))
def test_every_command_ends_well(model: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, name: str) -> None:
    stdout, stderr = pipe(monkeypatch, encoding)
    assert main(commands(model)[name]) == 0, written(stderr)
    assert written(stdout)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_json_is_escaped_and_loses_nothing(model: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    stdout, _ = pipe(monkeypatch, encoding)
    assert main(["inspect", str(model), "--json"]) == 0
    assert json.loads(written(stdout))["arch"]["dim"] == 64


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_error_is_still_a_line_and_exit_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    _, stderr = pipe(monkeypatch, encoding)
    assert main(["inspect", str(tmp_path / f"{NAME}.safetensors")]) == 2
    assert written(stderr).endswith("does not exist.\n")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_command_writes_to_a_real_pipe_of_any_encoding(model: Path, encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "fold", *commands(model)["sample"]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode(encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_dev_py_writes_to_a_pipe_of_any_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    comfyui = tmp_path / "模型 😀"
    (comfyui / "comfy").mkdir(parents=True)
    for name in ("main.py", "comfy/cli_args.py"):
        (comfyui / name).touch()
    monkeypatch.setenv("COMFYUI_DIR", str(comfyui))
    monkeypatch.setenv("MOSS_PYTHON", sys.executable)
    monkeypatch.setitem(run_tests.PARTS, "lint", lambda here: [run_tests.skip("lint", "没有 😀")])
    stdout, stderr = pipe(monkeypatch, encoding)
    assert dev.main(["test", "--parts", "lint"]) == 0
    assert "0 passed, 0 failed, 1 skipped" in written(stdout)
    monkeypatch.setenv("COMFYUI_DIR", str(comfyui / "空"))
    assert dev.main(["test"]) == 1 and "holds no ComfyUI" in written(stderr)
