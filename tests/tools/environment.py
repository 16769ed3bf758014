"""The development environment: .venv in the repository with pinned dependencies, made once, remembered by a stamp."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

from repo import ROOT

VENV = ROOT / ".venv"
TORCH = "torch==2.14.1"
TORCHVISION = "torchvision==0.29.1"
FRONTEND = "comfyui-frontend-package==1.58.1"
# Lines of ComfyUI's requirements that are pinned here instead.
OURS = re.compile(r"^(torch|torchvision|torchaudio|comfyui-frontend-package)\b(?!-)", re.IGNORECASE)


class SetupError(Exception):
    """The environment cannot be made; the message says what to do."""


def requirements(comfyui: Path | None) -> list[str]:
    """The requirement lines to install: ours, torch, and those of the ComfyUI that was found."""
    lines = (ROOT / "tests" / "requirements.txt").read_text("utf-8").splitlines()
    lines.append(TORCH)
    if comfyui is not None:
        theirs = (comfyui / "requirements.txt").read_text("utf-8").splitlines()
        lines += [TORCHVISION, FRONTEND, *(line for line in theirs if not OURS.match(line.strip()))]
    kept = (line.strip() for line in lines)
    return [line for line in kept if line and not line.startswith("#")]


def python_of(venv: Path) -> Path:
    """The interpreter inside a virtual environment."""
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def ensure(comfyui: Path | None) -> Path:
    """Make or complete the environment and return its Python. Quick when nothing changed. Raises SetupError."""
    if given := os.environ.get("MOSS_PYTHON"):
        return Path(given)
    wanted = requirements(comfyui)
    stamp, python = VENV / "moss-stamp.txt", python_of(VENV)
    key = hashlib.sha256("\n".join([sys.version, *wanted]).encode()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text("utf-8") == key:
        return python
    if not runs(python):
        print(f"Making {VENV}", flush=True)
        call(
            [sys.executable, "-m", "venv", "--clear", str(VENV)], "make a virtual environment (is python3-venv there?)"
        )
    print("Installing the dependencies. The first time this takes minutes: torch is large.", flush=True)
    listing = VENV / "moss-requirements.txt"
    listing.write_text("\n".join(wanted) + "\n", "utf-8")
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    if not sys.stdout.isatty():
        pip.append("-qq")  # errors only: logs need no progress bars
    call([*pip, "-r", str(listing)], "install the dependencies")
    if comfyui is not None:
        # ComfyUI imports torchaudio at its start. Its dependencies would bring another torch.
        call([*pip, "--no-deps", "torchaudio"], "install torchaudio")
    stamp.write_text(key, "utf-8")
    return python


def runs(python: Path) -> bool:
    """Whether this interpreter is there, starts, and is of the version that runs now."""
    if not python.exists():
        return False
    check = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    return subprocess.run([str(python), "-c", check], check=False, capture_output=True).returncode == 0


def call(command: list[str], what: str) -> None:
    """Run a command with its output shown. Raises SetupError when it fails."""
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        raise SetupError(f"Could not {what}: the command ended with {code}, its message is above.")
