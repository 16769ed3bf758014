#!/usr/bin/env python3
"""One command for everything a developer needs; it makes .venv and installs what is missing first.

    python dev.py demo     a model that overflows fp16, with the fix off and on, and a chart
    python dev.py test     lint, types and every test that can run here
    python dev.py bench    measured ratios

Standard library only, Python 3.11+. A ComfyUI is used when there is one: $COMFYUI_DIR, the ComfyUI this pack is
installed in, or ~/comfy/ComfyUI. $MOSS_PYTHON names a Python to use as it is (for instance ComfyUI's own), instead of
.venv; nothing is installed then.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# Not resolved: a pack that is linked into custom_nodes finds the ComfyUI around it by this path.
sys.path.insert(0, str(Path(__file__).absolute().parent / "tests" / "tools"))

MINIMUM = (3, 11)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    if sys.version_info < MINIMUM:
        print(f"dev.py needs Python 3.11 or newer; this is {sys.version.split()[0]}.", file=sys.stderr)
        return 2
    import environment
    from repo import NO_COMFYUI, find_comfyui

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("demo", "test", "bench"))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on (test: to pytest)")
    options = parser.parse_args(argv)

    comfyui = find_comfyui()
    if comfyui is None:
        print(f"!!! There is {NO_COMFYUI}: going on without. Set COMFYUI_DIR to use yours.", flush=True)
    else:
        print(f"ComfyUI: {comfyui}", flush=True)
        os.environ["COMFYUI_DIR"] = str(comfyui)  # the commands below use the same one
    try:
        python = environment.ensure(comfyui)
    except environment.SetupError as error:
        print(error, file=sys.stderr)
        return 1
    if options.command != "bench":
        # Threads that wait asleep: on a busy machine spinning ones slow the tests several times over.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    match options.command:
        case "test":
            import run_tests

            return run_tests.main(python, comfyui, options.arguments)
        case "demo":
            command = [str(ROOT / "tests" / "tools" / "demo.py")]
        case _:
            command = ["-m", "bench"]
    return subprocess.run([str(python), *command, *options.arguments], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
