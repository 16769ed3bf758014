"""The eps check of an export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from repo import DATA
from safetensors.torch import load_file

from fold.cli import main
from fold.measure.eps_check import check_eps

HOT = DATA / "hot.safetensors"
IO = DATA / "hot_io.safetensors"
OPTIONS = ["--check", str(IO), "--check-latent", "case1.latent", "--check-context", "case1.context"]


def test_exact_eps_is_the_same_function_and_stock_is_near(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "folded.safetensors"
    assert main(["export", str(HOT), str(target), "--dtype", "fp32", "--json", *OPTIONS]) == 0
    found = json.loads(capsys.readouterr().out)["eps_check"]
    assert found["exact"] == 0.0  # a power of two in fp32
    assert 0.0 < found["stock"] < 1e-4
    io = load_file(IO)
    again = check_eps(HOT, target, io["case1.latent"], io["case1.context"], 0.5)
    assert again.to_json() == found


def test_inputs_that_do_not_fit_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "folded.safetensors"
    for options in (["--check", str(IO)], [*OPTIONS, "--check-sigma", "2"], ["--check", str(tmp_path / "none")]):
        assert main(["export", str(HOT), str(target), *options]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert not target.exists()
