"""What Windows and macOS do differently, as far as it can be shown on any system."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fold import files
from fold.cli import main
from fold.errors import MossError
from fold.files import name_refused_by_windows, new_file


class SharingViolation(PermissionError):
    """What Windows raises while another program has the file open."""

    winerror = 32


def busy(monkeypatch: pytest.MonkeyPatch, times: float) -> list[Path]:
    """Let the first so many renames fail; the list fills with what was tried."""
    tried, rename = [], Path.replace

    def replace(self: Path, target: Path) -> Path:
        tried.append(self)
        if len(tried) <= times:
            raise SharingViolation(errno.EACCES, "The process cannot access the file")
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    return tried


def test_a_scanner_that_has_the_file_open_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = busy(monkeypatch, 2)
    with new_file(tmp_path / "a.safetensors") as write:
        write(b"whole")
    assert len(tried) == 3 and (tmp_path / "a.safetensors").read_bytes() == b"whole"


def test_a_target_that_stays_open_is_said_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.safetensors"
    target.write_bytes(b"old")
    busy(monkeypatch, float("inf"))
    monkeypatch.setattr(files, "_BUSY_SECONDS", 0.1)
    with (
        pytest.raises(MossError, match=r"a\.safetensors cannot be written: another program has it open"),
        new_file(target, overwrite=True) as write,
    ):
        write(b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.safetensors", b"old")]


def test_a_folder_without_permission_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = busy(monkeypatch, float("inf"))
    monkeypatch.setattr(SharingViolation, "winerror", None)  # as on POSIX
    with pytest.raises(MossError, match="cannot be written"), new_file(tmp_path / "a.safetensors") as write:
        write(b"new")
    assert len(tried) == 1 and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_flushed_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            raise PermissionError(errno.EACCES, "Access is denied")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with new_file(tmp_path / "a") as write:
        write(b"x")
    assert (tmp_path / "a").read_bytes() == b"x"


BAD_NAMES = ["a:b.safetensors", "what?.safetensors", "a\tb", "dot.", "space ", "NUL", "nul.safetensors", "Com1.tar.gz"]
GOOD_NAMES = ["a.safetensors", "模型.safetensors", "NULL.safetensors", "com10", "moss fp16 (1).safetensors", ".hidden"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_windows_makes_something_else_of_are_refused_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert name_refused_by_windows(name)
    monkeypatch.setattr(files, "_ON_WINDOWS", True)
    with pytest.raises(MossError, match="cannot be written on Windows"), new_file(tmp_path / name) as write:
        write(b"x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_ordinary_names_are_taken(name: str) -> None:
    assert name_refused_by_windows(name) is None


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
@pytest.mark.parametrize(("ignored", "status"), [(False, 1), (True, 0)], ids=["terminal closed", "nohup"])
def test_a_closed_terminal_stops_a_command_unless_nohup_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, ignored: bool, status: int
) -> None:
    def hung_up(_: object) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        return 0

    monkeypatch.setattr("fold.cli.inspect.run", hung_up)
    given = signal.SIG_IGN if ignored else signal.SIG_DFL
    before = signal.signal(signal.SIGHUP, given)
    try:
        assert main(["inspect", "no.safetensors"]) == status
        assert signal.getsignal(signal.SIGHUP) == given
    finally:
        signal.signal(signal.SIGHUP, before)


def test_windows_without_the_right_to_make_links_skips_and_nothing_else_does(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from no_links import pytest_runtest_call")
    pytester.makepyfile(
        """
        def refused(number):
            error = OSError("a required privilege is not held by the client")
            error.winerror = number
            raise error

        def test_link(): refused(1314)
        def test_other(): refused(5)
        def test_fine(): pass
        """
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1, failed=1, skipped=1)
