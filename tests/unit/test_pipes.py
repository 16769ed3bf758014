"""Pipes, and devices, which are like them here, where a file belongs: nothing waits for them or takes their place."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fold.cli import main
from fold.errors import MossError
from fold.files import new_file
from fold.scaling.factors import read_factors

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A pipe with factors in it, whose writer is gone after a second (who reads it to its end waits no longer)."""
    path = tmp_path / "pipe.safetensors"
    os.mkfifo(path)
    both = os.open(path, os.O_RDWR)
    os.write(both, b'{"c": 0.0625}')
    timer = threading.Timer(1.0, os.close, [both])
    timer.start()
    yield path
    timer.join()


def test_factors_are_not_awaited_from_a_pipe(pipe: Path) -> None:
    with pytest.raises(MossError, match="not a regular file"):
        read_factors(pipe)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_result_takes_no_pipes_place(pipe: Path, overwrite: bool) -> None:
    with pytest.raises(MossError, match="pipe or a device"), new_file(pipe, overwrite=overwrite) as write:
        write(b"x")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("link", [False, True])
def test_the_command_line_replaces_no_pipe_by_a_result(
    pipe: Path, link: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = pipe
    if link:
        target = tmp_path / "link.safetensors"
        target.symlink_to(pipe)
    assert main(["demo-checkpoint", str(target), "--overwrite"]) == 2
    assert "pipe or a device" in capsys.readouterr().err
    assert stat.S_ISFIFO(target.stat().st_mode)
