"""dev.py's helpers: what gets installed, and what the summary says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import environment
import pytest
import repo
import run_tests


def make_comfyui(folder: Path, requirements: str = "") -> Path:
    (folder / "comfy").mkdir(parents=True)
    for name in ("main.py", "comfy/cli_args.py"):
        (folder / name).touch()
    (folder / "requirements.txt").write_text(requirements, "utf-8")
    return folder.resolve()


def test_without_comfyui_only_our_own_and_torch() -> None:
    wanted = environment.requirements(None)
    assert environment.TORCH in wanted
    assert not [line for line in wanted if line.startswith(("torchvision", "comfyui"))]
    assert all("==" in line for line in wanted)


def test_comfyui_requirements_without_what_is_pinned_here(tmp_path: Path) -> None:
    theirs = (
        "torch\ntorchsde\ntorchvision>=0.2\ntorchaudio\n\n# note\ncomfyui-frontend-package==1.0\ncomfy-kitchen==0.2\n"
    )
    wanted = environment.requirements(make_comfyui(tmp_path / "ComfyUI", theirs))
    assert wanted[-2:] == ["torchsde", "comfy-kitchen==0.2"]
    assert [line for line in wanted if line.startswith("torch==")] == [environment.TORCH]
    assert environment.TORCHVISION in wanted and environment.FRONTEND in wanted


def test_comfyui_is_found_by_variable_and_at_the_usual_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repo, "ROOT", tmp_path / "elsewhere" / "pack")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.delenv("COMFYUI_DIR", raising=False)
    usual = make_comfyui(tmp_path / "comfy" / "ComfyUI")
    named = make_comfyui(tmp_path / "named")
    assert repo.find_comfyui() == usual
    monkeypatch.setenv("COMFYUI_DIR", str(named))
    assert repo.find_comfyui() == named


def test_comfyui_is_found_around_an_installed_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMFYUI_DIR", raising=False)
    around = make_comfyui(tmp_path / "mine")
    monkeypatch.setattr(repo, "ROOT", around / "custom_nodes" / "ComfyUI-MOSS-FP16")
    assert repo.find_comfyui() == around


def test_junit_counts_and_reasons(tmp_path: Path) -> None:
    xml = tmp_path / "j.xml"
    xml.write_text(
        "<testsuites><testsuite><testcase name='a'/><testcase name='b'><failure/></testcase><testcase name='c'>"
        "<error/></testcase><testcase name='d'><skipped message='no browser'/></testcase></testsuite></testsuites>",
        "utf-8",
    )
    part = run_tests.read_junit("tests/web", xml)
    assert (part.passed, part.failed, part.skipped) == (1, 2, 1)
    assert run_tests.skipped_line([part]) == "Skipped: tests/web: no browser"


def test_nothing_skipped_is_said_too() -> None:
    assert run_tests.skipped_line([run_tests.Part("ruff", passed=1, reasons=Counter())]) == "Nothing was skipped."
