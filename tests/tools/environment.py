"""The development environment: .venv in the repository with pinned dependencies, made once, remembered by a stamp.

One for another torch lies beside it: .venv-torch-2.4.1.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from repo import ROOT

TORCH = "2.14.1"
TORCHVISION = "torchvision==0.29.1"
FRONTEND = "comfyui-frontend-package==1.58.1"
# Lines of ComfyUI's requirements that are pinned here instead.
OURS = re.compile(r"^(torch|torchvision|torchaudio|comfyui-frontend-package)\b(?!-)", re.IGNORECASE)


class SetupError(Exception):
    """The environment cannot be made; the message says what to do."""


@dataclass(frozen=True)
class Wanted:
    """What an environment is made of: its folder, the requirement lines, and the torchaudio to add without its own."""

    folder: Path
    lines: list[str]
    torchaudio: str | None


def wanted(comfyui: Path | None, torch: str | None = None) -> Wanted:
    """The environment for the ComfyUI that was found (or None) and a torch version (None: the pinned one)."""
    lines = (ROOT / "tests" / "requirements.txt").read_text("utf-8").splitlines()
    lines.append(f"torch=={torch or TORCH}")
    if comfyui is not None:
        theirs = [line.strip() for line in (comfyui / "requirements.txt").read_text("utf-8").splitlines()]
        # pip finds the torchvision that goes with another torch by itself.
        lines += [TORCHVISION if torch is None else "torchvision", frontend(theirs)]
        lines += [line for line in theirs if not OURS.match(line)]
    kept = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    folder = ROOT / (".venv" if torch is None else f".venv-torch-{torch}")
    return Wanted(folder, kept, None if comfyui is None else torchaudio(torch or TORCH))


def frontend(theirs: list[str]) -> str:
    """The pinned frontend package, or ComfyUI's own where that is newer."""
    pinned = next((line for line in theirs if re.fullmatch(r"comfyui-frontend-package==[0-9.]+", line)), FRONTEND)
    return max(pinned, FRONTEND, key=lambda line: [int(n) for n in re.findall(r"\d+", line)])


def torchaudio(torch: str) -> str:
    """The torchaudio for a torch: of the same number while there was one for each, up to 2.9; any after that."""
    major, minor = (int(n) for n in re.findall(r"\d+", torch)[:2])
    return f"torchaudio=={torch.partition('+')[0]}" if (major, minor) < (2, 9) else "torchaudio"


def python_of(venv: Path) -> Path:
    """The interpreter inside a virtual environment."""
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def ensure(comfyui: Path | None, torch: str | None = None) -> Path:
    """Make or complete the environment and return its Python. Quick when nothing changed. Raises SetupError."""
    if given := os.environ.get("MOSS_PYTHON"):
        if torch is not None:
            raise SetupError("--torch makes an environment of its own, and $MOSS_PYTHON names one: unset it.")
        return Path(given)
    want = wanted(comfyui, torch)
    stamp, python = want.folder / "moss-stamp.txt", python_of(want.folder)
    key = hashlib.sha256("\n".join([sys.version, *want.lines]).encode()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text("utf-8") == key:
        return python
    if not runs(python):
        print(f"Making {want.folder}", flush=True)
        call(
            [sys.executable, "-m", "venv", "--clear", str(want.folder)],
            "make a virtual environment (is python3-venv there?)",
        )
    print("Installing the dependencies. The first time this takes minutes: torch is large.", flush=True)
    listing = want.folder / "moss-requirements.txt"
    listing.write_text("\n".join(want.lines) + "\n", "utf-8")
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    if not sys.stdout.isatty():
        pip.append("-qq")  # errors only: logs need no progress bars
    call([*pip, "-r", str(listing)], "install the dependencies")
    if want.torchaudio is not None:
        # ComfyUI imports torchaudio at its start. Its dependencies would bring another torch.
        call([*pip, "--no-deps", want.torchaudio], "install torchaudio")
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
