"""Prepares a release for the Comfy registry: fills in what belongs to whoever publishes.

    python tests/tools/registry.py --publisher my-id --repository https://github.com/me/ComfyUI-MOSS-FP16 --tag v0.1.0

Writes the publisher, the repository and the pictures' addresses into pyproject.toml, and what CHANGELOG.md says of the
version into changes.md; then `comfy node publish --changelog-file changes.md`. Standard library only.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

from repo import ROOT


class ReleaseError(Exception):
    """Something does not fit; the message says what to do."""


def version_of(pyproject: str) -> str:
    """The version that pyproject.toml states."""
    found = re.search(r'^version = "([^"]+)"$', pyproject, re.MULTILINE)
    if found is None:
        raise ReleaseError("pyproject.toml states no version.")
    return found[1]


def changes_of(changelog: str, version: str) -> str:
    """CHANGELOG.md's section on a version, without its heading. Raises ReleaseError when there is none."""
    found = re.search(rf"^## {re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise ReleaseError(f"CHANGELOG.md has no section '## {version}': write one.")
    return found[1].strip() + "\n"


def filled_in(pyproject: str, publisher: str, repository: str, tag: str) -> str:
    """pyproject.toml with the publisher's own values. Raises ReleaseError for values that cannot be right."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", publisher):
        raise ReleaseError(f"{publisher!r} is no publisher id: take the one of your profile on registry.comfy.org.")
    place = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)/?", repository)
    if place is None:
        raise ReleaseError(f"{repository!r} is no address such as https://github.com/me/ComfyUI-MOSS-FP16.")
    pictures = f"https://raw.githubusercontent.com/{place[1]}/{tag}/docs/registry"
    home = f"https://github.com/{place[1]}"
    values = {
        "PublisherId": publisher,
        "Icon": f"{pictures}/icon.png",
        "Banner": f"{pictures}/banner.png",
        "Repository": home,
        "Documentation": f"{home}#readme",
        "Bug Tracker": f"{home}/issues",
    }
    for key, value in values.items():
        key = f'"{key}"' if " " in key else key
        pyproject, count = re.subn(rf'^{key} = "[^"]*"$', f'{key} = "{value}"', pyproject, flags=re.MULTILINE)
        if count != 1:
            raise ReleaseError(f"pyproject.toml has {count} lines for {key}, not one.")
    return pyproject


def left_out(name: str, patterns: list[str]) -> bool:
    """Whether .comfyignore leaves a file out: a pattern is a folder with a slash at its end, or a file's name."""
    return any(name.startswith(pattern) if pattern.endswith("/") else name == pattern for pattern in patterns)


def published_files() -> list[str]:
    """The files that a published archive holds: what git knows of, less what .comfyignore leaves out."""
    lines = (ROOT / ".comfyignore").read_text("utf-8").splitlines()
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    known = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode("utf-8")
    return [name for name in known.split("\0") if name and not left_out(name, patterns)]


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("publisher", "repository", "tag"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args(argv)
    file = ROOT / "pyproject.toml"
    text = file.read_text("utf-8")
    try:
        if options.tag != f"v{version_of(text)}":
            raise ReleaseError(f"The tag is {options.tag}, but pyproject.toml states version {version_of(text)}.")
        changes = changes_of((ROOT / "CHANGELOG.md").read_text("utf-8"), version_of(text))
        file.write_text(filled_in(text, options.publisher, options.repository, options.tag), "utf-8")
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    (ROOT / "changes.md").write_text(changes, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
