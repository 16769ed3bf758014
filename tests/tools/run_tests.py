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
from dataclasses import dataclass, field
from pathlib import Path

from comfy_server import link
from repo import NO_COMFYUI, ROOT

PACK = "moss_fp16_pack"
NOTHING_COLLECTED = 5  # pytest's exit code


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


def main(python: Path, comfyui: Path | None, arguments: list[str]) -> int:
    """Run all parts, print the summary, return 1 when anything failed. `arguments` go to every pytest."""
    parts = [check("ruff", [str(python), "-m", "ruff", "check", "."]), check("mypy", [str(python), "-m", "mypy"])]
    parts.append(check_nodes(python))
    parts.append(run_pytest(python, "tests/unit", arguments))
    parts.append(skip("tests/comfy", NO_COMFYUI) if comfyui is None else run_pytest(python, "tests/comfy", arguments))
    parts.append(run_web(python, arguments))

    print("\n== Summary")
    for part in parts:
        print(part.line())
    failed = sum(p.failed for p in parts)
    print(f"\n{sum(p.passed for p in parts)} passed, {failed} failed, {sum(p.skipped for p in parts)} skipped")
    print(skipped_line(parts))
    return 1 if failed else 0


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
    options = ["--config-file", os.devnull, "--ignore-missing-imports", "--follow-imports=silent"]
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


def run_pytest(python: Path, folder: str, arguments: list[str]) -> Part:
    """One pytest process over one folder."""
    if not any((ROOT / folder).rglob("test_*.py")):
        return skip(folder, "no tests there")
    heading(folder)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        xml = Path(temporary) / "junit.xml"
        command = [str(python), "-m", "pytest", folder, f"--junitxml={xml}", *arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        part = read_junit(folder, xml)
    part.seconds = time.monotonic() - started
    chosen_none = code == NOTHING_COLLECTED and bool(arguments)  # such as -k: fine for the parts it does not name
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


def run_web(python: Path, arguments: list[str]) -> Part:
    """The page's tests: npm packages first, which counts as a failure of its own when it goes wrong."""
    folder, npm = ROOT / "tests" / "web", shutil.which("npm")
    installed = not (folder / "package.json").exists() or npm is None or install_packages(npm, folder)
    part = run_pytest(python, "tests/web", arguments)
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
