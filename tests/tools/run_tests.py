"""Runs every part of the test suite that can run here, and says what was skipped and why. Used by dev.py."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from comfy_server import link, why_it_does_not_start
from repo import NO_COMFYUI, ROOT

PACK = "moss_fp16_pack"
NOTHING_COLLECTED = 5  # pytest's exit code
OLDEST_PYTHON = "3.10"
CODE = ("fold", "nodes", "bench", "tests/unit", "tests/comfy", "tests/tools", "tests/web/test_browser.py",
        "tests/web/test_firefox.py", "tests/web/pace_pack", "example_workflows", "__init__.py", "dev.py")  # fmt: skip
#: In CI these parts have to run: without them a change can break every node, or the page, and stay green.
ALL_OF_IT_IN_CI = ("tests/comfy", "tests/web")


@dataclass
class Part:
    """One part's outcome. A lint or type check counts as one test, so that the totals cover everything."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        counts = f"{self.passed:>6} passed {self.failed:>4} failed {self.skipped:>4} skipped"
        return f"{self.name:<12}{counts} {self.seconds:>7.1f} s"


@dataclass(frozen=True)
class Here:
    """What the parts run with: the interpreter, the ComfyUI (or None), pytest's arguments, and the torch asked for."""

    python: Path
    comfyui: Path | None
    arguments: list[str]
    torch: str | None = None


#: Members that Python 2 had: each makes vermin take a file for a mixture of both versions and give up on it.
OF_PYTHON_2 = ("file", "str.decode")


def lint(here: Here) -> list[Part]:
    """Ruff, the Python version that the code needs, and types."""
    python = str(here.python)
    excluded = [word for name in OF_PYTHON_2 for word in ("--exclude", name)]
    needs = [f"-t={OLDEST_PYTHON}-", "--violations", "--no-tips", "--quiet", *excluded, *CODE]
    return [
        check("ruff", [python, "-m", "ruff", "check", "."]),
        check("vermin", [python, "-c", VERMIN, *needs]),
        check("mypy", [python, "-m", "mypy"]),
        check_nodes(here.python),
    ]


#: vermin exits with 0 also where it gave up on a file.
VERMIN = """
import contextlib, io, sys, vermin
said, status = io.StringIO(), 0
try:
    with contextlib.redirect_stdout(said):
        status = vermin.main()
except SystemExit as end:
    status = end.code
print(said.getvalue(), end="")
sys.exit(status or "incompatible versions" in said.getvalue())
"""


#: What `dev.py test --parts` can name, and how each is run.
PARTS: dict[str, Callable[[Here], list[Part]]] = {
    "lint": lint,
    "unit": lambda here: [run_pytest(here, "tests/unit")],
    "comfy": lambda here: [run_comfy(here)],
    "web": lambda here: [run_web(here)],
}


def main(here: Here, names: list[str]) -> int:
    """Run the parts of these names (keys of PARTS), print the summary, return 1 when anything failed."""
    parts = [part for name in names for part in PARTS[name](here)]
    if os.environ.get("CI", "").lower() == "true":
        parts = [insist(part) for part in parts]
    print("\n== Summary")
    for part in parts:
        print(part.line())
    failed = sum(p.failed for p in parts)
    print(f"\n{sum(p.passed for p in parts)} passed, {failed} failed, {sum(p.skipped for p in parts)} skipped")
    print(skipped_line(parts))
    return 1 if failed else 0


def insist(part: Part) -> Part:
    """In CI: a test that was skipped in a part that has to run whole counts as failed, with its reason said."""
    if part.name not in ALL_OF_IT_IN_CI or not part.skipped:
        return part
    for reason in part.reasons:
        print(f"\n!!! {part.name} was skipped in CI, which counts as failed: {reason}", flush=True)
    return Part(part.name, part.passed, part.failed + part.skipped, 0, part.seconds, Counter())


def skipped_line(parts: list[Part]) -> str:
    """The last line: every reason, with how many tests it took."""
    texts = [f"{p.name}: {why}" + f" ({n} tests)" * (n > 1) for p in parts for why, n in p.reasons.items()]
    return "Nothing was skipped." if not texts else "Skipped: " + "; ".join(texts)


def heading(name: str) -> None:
    print(f"\n== {name}", flush=True)


def skip(name: str, reason: str) -> Part:
    """A part that cannot run here."""
    heading(name)
    print(f"skipped: {reason}")
    return Part(name, skipped=1, reasons=Counter([reason]))


def check_nodes(python: Path) -> Part:
    """Types of nodes/, which is a package only inside the pack: seen through a link under the name it has in tests."""
    # strict, but for what ComfyUI leaves untyped: classes to derive from, decorators
    options = ["--config-file", os.devnull, "--ignore-missing-imports", "--follow-imports=silent", "--strict"]
    options += ["--allow-subclassing-any", "--allow-untyped-decorators"]
    with tempfile.TemporaryDirectory(prefix="moss-types-") as folder:
        link(ROOT, Path(folder) / PACK)
        command = [str(python), "-m", "mypy", *options, "-p", f"{PACK}.nodes"]
        return check("mypy nodes", command, Path(folder))


def check(name: str, command: list[str], folder: Path = ROOT) -> Part:
    """A command that either passes or fails."""
    heading(name)
    started = time.monotonic()
    code = subprocess.run(command, cwd=folder, check=False).returncode
    return Part(name, passed=int(code == 0), failed=int(code != 0), seconds=time.monotonic() - started)


def run_pytest(here: Here, folder: str) -> Part:
    """One pytest process over one folder."""
    if not any((ROOT / folder).rglob("test_*.py")):
        return skip(folder, "no tests there")
    heading(folder)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        xml = Path(temporary) / "junit.xml"
        command = [str(here.python), "-m", "pytest", folder, f"--junitxml={xml}", *here.arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        part = read_junit(folder, xml)
    part.seconds = time.monotonic() - started
    chosen_none = code == NOTHING_COLLECTED and bool(here.arguments)  # such as -k: fine for parts it does not name
    if code and not part.failed and not chosen_none:
        part.failed = 1  # it broke down without naming a test
    return part


def read_junit(name: str, xml: Path) -> Part:
    """Counts and skip reasons out of pytest's XML; an empty part when there is none."""
    part = Part(name)
    if not xml.exists():
        return part
    for case in ET.parse(xml).getroot().iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            part.failed += 1
        elif skipped is not None:
            part.skipped += 1
            part.reasons[skipped.get("message") or "no reason given"] += 1
        else:
            part.passed += 1
    return part


def run_comfy(here: Here) -> Part:
    """The tests on a real ComfyUI, where there is one, and where it takes the torch that was asked for."""
    if here.comfyui is None:
        return skip("tests/comfy", NO_COMFYUI)
    if here.torch is not None and (reason := why_it_does_not_start(here.python, here.comfyui)):
        return skip("tests/comfy", f"this ComfyUI does not start with torch {here.torch} ({reason[:200]})")
    return run_pytest(here, "tests/comfy")


def run_web(here: Here) -> Part:
    """The page's tests: npm packages first, which counts as a failure of its own when it goes wrong."""
    folder, npm = ROOT / "tests" / "web", shutil.which("npm")
    installed = not (folder / "package.json").exists() or npm is None or install_packages(npm, folder)
    part = run_pytest(here, "tests/web")
    part.failed += int(not installed)
    return part


def install_packages(npm: str, folder: Path) -> bool:
    """npm ci (npm install without a lock file), only when the package files changed since the last time."""
    files = [folder / "package.json", folder / "package-lock.json"]
    key = hashlib.sha256(b"".join(f.read_bytes() for f in files if f.exists())).hexdigest()
    stamp = folder / "node_modules" / ".moss-stamp"
    if stamp.exists() and stamp.read_text("utf-8") == key:
        return True
    heading("npm")
    verb = "ci" if files[1].exists() else "install"
    done = subprocess.run([npm, verb, "--no-audit", "--no-fund"], cwd=folder, check=False).returncode == 0
    if done:
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(key, "utf-8")
    return done
