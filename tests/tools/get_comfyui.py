"""Gets a ComfyUI for the tests into .comfyui, by git or out of an archive. Standard library only.

MOSS_COMFYUI=off       get none
COMFYUI_ARCHIVE=FILE   unpack this tar file instead of asking git
COMFYUI_TAG=TAG        another release than the pinned one; `newest` for the newest release
COMFYUI_GIT=ADDRESS    another repository than ComfyUI's own
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

from repo import OWN_COMFYUI, ROOT, is_comfyui

ADDRESS = "https://github.com/comfyanonymous/ComfyUI.git"
TAG = "v0.33.1"
ORIGIN = "moss-origin.txt"  # written into .comfyui: what it was made from
ASK_SECONDS, CLONE_SECONDS = 20.0, 900.0
MOST_BYTES, MOST_MEMBERS = 2 * 1024**3, 200_000


class GetError(Exception):
    """No ComfyUI could be got; the message says why."""


class ArchiveError(GetError):
    """The archive that was asked for is not there, broken, or leads out of its folder."""


def get_comfyui(say: Callable[[str], None] = print) -> Path:
    """Make .comfyui, unless it is what is asked for already; return its path. Raises GetError."""
    folder = ROOT / OWN_COMFYUI
    if declined():
        raise GetError("MOSS_COMFYUI=off declines getting one")
    if os.environ.get("MOSS_PYTHON") and not os.environ.get("COMFYUI_ARCHIVE"):
        raise GetError("for $MOSS_PYTHON nothing is installed, which a new one would need")
    if archive := os.environ.get("COMFYUI_ARCHIVE"):
        file = Path(archive).expanduser()
        if not file.is_file():
            raise ArchiveError(f"COMFYUI_ARCHIVE is {archive}, which is not a file")
        wanted, make = f"archive {digest(file)}", lambda target: unpack(file, target)
    else:
        address = os.environ.get("COMFYUI_GIT", ADDRESS)
        tag = resolve_tag(address, os.environ.get("COMFYUI_TAG", TAG))
        wanted, make = f"{address} {tag}", lambda target: clone(address, tag, target)
    if not is_comfyui(folder) or origin(folder) != wanted:
        say(f"Getting ComfyUI ({wanted}) into {folder}")
        replace(folder, make, wanted)
    return folder


def is_outdated(folder: Path) -> bool:
    """Whether .comfyui was made here from something other than what is asked for now. One made by hand never is."""
    made_from = origin(folder)
    if made_from is None or declined():
        return False
    if archive := os.environ.get("COMFYUI_ARCHIVE"):
        file = Path(archive).expanduser()
        return file.is_file() and made_from != f"archive {digest(file)}"
    if made_from.startswith("archive ") and "COMFYUI_TAG" not in os.environ:
        return False  # unpacked by hand earlier, and nothing else is asked for
    tag = os.environ.get("COMFYUI_TAG", TAG)
    return tag == "newest" or made_from != f"{os.environ.get('COMFYUI_GIT', ADDRESS)} {tag}"


def declined() -> bool:
    """Whether $MOSS_COMFYUI says that none is to be got."""
    return os.environ.get("MOSS_COMFYUI", "").lower() == "off"


def origin(folder: Path) -> str | None:
    """What .comfyui was made from, None when it was not made here."""
    note = folder / ORIGIN
    return note.read_text("utf-8").strip() if note.is_file() else None


def digest(file: Path) -> str:
    """The file's SHA-256, in hexadecimal."""
    total = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            total.update(chunk)
    return total.hexdigest()


def replace(folder: Path, make: Callable[[Path], None], made_from: str) -> None:
    """Make the new source beside `folder`, then put it in its place: an interrupt leaves the old one, or none."""
    with scratch_folder(folder.parent) as scratch:
        new = scratch / "new"
        make(new)
        if not is_comfyui(new):
            raise GetError(f"what came from {made_from} is no ComfyUI (no main.py and comfy/cli_args.py)")
        (new / ORIGIN).write_text(made_from + "\n", "utf-8")
        try:
            if folder.exists():
                folder.rename(scratch / "old")
            new.rename(folder)
        except OSError as error:  # a program has it open, or another dev.py was quicker
            raise GetError(f"{folder} cannot be replaced: {error}") from error


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A folder on the same disk as `parent`, removed at the end, with what git marks read-only in it."""
    folder = Path(tempfile.mkdtemp(prefix=f"{OWN_COMFYUI}-", dir=parent))
    try:
        yield folder
    finally:
        for path in folder.rglob("*"):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | stat.S_IWUSR)  # else Windows would not remove it
        shutil.rmtree(folder, ignore_errors=True)


def resolve_tag(address: str, tag: str) -> str:
    """Check that the tag is there; `newest` becomes the newest release. Quick, with or without a network."""
    lines = git(["ls-remote", "--tags", "--refs", address], ASK_SECONDS).splitlines()
    tags = {line.rpartition("refs/tags/")[2] for line in lines}
    if tag == "newest":
        releases = {tuple(map(int, m.groups())): m[0] for t in tags if (m := re.fullmatch(r"v(\d+)\.(\d+)\.(\d+)", t))}
        if not releases:
            raise GetError(f"{address} has no release")
        return releases[max(releases)]
    if tag not in tags:
        raise GetError(f"{address} has no release {tag}")
    return tag


def clone(address: str, tag: str, target: Path) -> None:
    """The source of one tag, without its history."""
    options = ["--depth", "1", "--single-branch", "--branch", tag, "-c", "advice.detachedHead=false"]
    git(["clone", "--quiet", *options, address, str(target)], CLONE_SECONDS)


def git(arguments: list[str], seconds: float) -> str:
    """Run git and return its output; it asks for no password, and gives up on a stalled connection. Raises GetError."""
    slow = ["-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=30", "-c", "core.longpaths=true"]
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", *slow, *arguments],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise GetError("git is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise GetError(f"git got no answer in {seconds:.0f} s") from error
    if done.returncode:
        message = " ".join(done.stderr.decode("utf-8", "replace").split()) or f"it ended with {done.returncode}"
        raise GetError(f"git said: {message[:300]}")
    return done.stdout.decode("utf-8", "replace")


def unpack(file: Path, target: Path) -> None:
    """Unpack a tar file whose top, or whose one folder, is ComfyUI's source. Raises ArchiveError: for one that would
    lead out of its folder before anything is written."""
    whole = target.with_name("whole")
    try:
        with tarfile.open(file) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python's own check, where it has one
            for member in list(checked(archive)):
                archive.extract(member, whole, set_attrs=False)
        tops = [path for path in whole.iterdir() if path.is_dir()]
        (tops[0] if len(tops) == 1 and not is_comfyui(whole) else whole).rename(target)
    except ArchiveError:
        raise
    except Exception as error:  # each kind of compression has errors of its own
        raise ArchiveError(f"{file} cannot be unpacked: {error}") from error


def checked(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The archive's files and folders. Raises ArchiveError for a path out of the folder, a link and a device."""
    size = 0
    for number, member in enumerate(archive):
        if not (member.isreg() or member.isdir()):
            raise ArchiveError(f"{archive.name}: {member.name} is a link or a device, not a file")
        if leads_out(member.name):
            raise ArchiveError(f"{archive.name}: {member.name} would be written outside of the folder")
        size += member.size
        if size > MOST_BYTES or number > MOST_MEMBERS:
            raise ArchiveError(f"{archive.name} is larger than any ComfyUI")
        yield member


def leads_out(name: str) -> bool:
    """Whether a path out of an archive leaves the folder it is unpacked into, on any system."""
    windows, posix = PureWindowsPath(name), PurePosixPath(name)
    return bool(windows.drive or windows.root or posix.root) or ".." in windows.parts or "\0" in name
