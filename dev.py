#!/usr/bin/env python3
"""One command for everything a developer needs; it makes .venv and installs what is missing first.

    python dev.py demo     a model that overflows fp16, with the fix off and on, and a chart
    python dev.py test     lint, types and every test that can run here
    python dev.py bench    measured ratios

Standard library only, Python 3.10+. The ComfyUI is the first of these: $COMFYUI_DIR, the one this pack is installed in,
~/comfy/ComfyUI, .comfyui here. Where there is none, one is got into .comfyui: by git, or out of the tar file
$COMFYUI_ARCHIVE; MOSS_COMFYUI=off declines. $MOSS_PYTHON names a Python to use as it is (for instance ComfyUI's own),
instead of .venv; nothing is installed then.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# Not resolved: a pack that is linked into custom_nodes finds the ComfyUI around it by this path.
sys.path.insert(0, str(Path(__file__).absolute().parent / "tests" / "tools"))

MINIMUM = (3, 10)  # this file is kept readable for older ones, so that they get to say so


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    if sys.version_info < MINIMUM:
        print(f"dev.py needs Python 3.10 or newer; this is {sys.version.split()[0]}.", file=sys.stderr)
        return 2
    import console
    import environment
    import get_comfyui

    console.never_raise()
    options = parse(argv)
    try:
        comfyui = which_comfyui()
        python = environment.ensure(comfyui, options.torch)
    except (environment.SetupError, get_comfyui.ArchiveError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.command != "bench":
        # Threads that wait asleep: on a busy machine spinning ones slow the tests several times over.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if options.command == "test":
        import run_tests

        return run_tests.main(run_tests.Here(python, comfyui, options.arguments, options.torch), options.parts)
    command = ["-m", "bench"] if options.command == "bench" else [str(ROOT / "tests" / "tools" / "demo.py")]
    return subprocess.run([str(python), *command, *options.arguments], cwd=ROOT, check=False).returncode


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line: what is not an option of ours is passed on (test: to pytest)."""
    from run_tests import PARTS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("demo", "test", "bench"):
        command = commands.add_parser(name, allow_abbrev=False, add_help=name == "test")
        command.set_defaults(torch=None, parts=None)
        if name == "test":
            command.epilog = "All other arguments go to pytest."
            command.add_argument("--torch", type=torch_version, metavar="VERSION",
                                 help="unit and comfy tests with this torch, in an environment of its own")  # fmt: skip
            command.add_argument("--parts", type=part_names, metavar="LIST", help=f"only these of {','.join(PARTS)}")
    options, options.arguments = parser.parse_known_args(argv)
    if options.parts is None:
        options.parts = ["unit", "comfy"] if options.torch else list(PARTS)
    return options


def torch_version(text: str) -> str:
    """A version such as 2.4.1; argparse's error otherwise."""
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?(\+\w+)?", text):
        raise argparse.ArgumentTypeError(f"{text} is not a version such as 2.4.1")
    return text


def part_names(text: str) -> list[str]:
    """A comma list of parts, in the order they run in; argparse's error for one that there is not."""
    from run_tests import PARTS

    unknown = set(text.split(",")) - set(PARTS)
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no part {', '.join(sorted(unknown))}, only {', '.join(PARTS)}")
    return [name for name in PARTS if name in text.split(",")]


def which_comfyui() -> Path | None:
    """The one ComfyUI that everything below uses, got first where there is none; None when none can be had."""
    from get_comfyui import ArchiveError, GetError, get_comfyui, is_outdated
    from repo import NO_COMFYUI, OWN_COMFYUI, find_comfyui

    comfyui = find_comfyui()
    if comfyui is None or (comfyui == ROOT / OWN_COMFYUI and is_outdated(comfyui)):
        try:
            comfyui = get_comfyui()
        except ArchiveError:
            raise
        except GetError as error:
            if comfyui is None:
                print(f"!!! There is {NO_COMFYUI}, and none was got: {error}.", flush=True)
                print("!!! Going on without. Set COMFYUI_DIR to use yours.", flush=True)
                return None
            print(f"!!! .comfyui stays as it is: {error}.", flush=True)
    print(f"ComfyUI: {comfyui}", flush=True)
    os.environ["COMFYUI_DIR"] = str(comfyui)  # the commands below use the same one
    return comfyui


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
