"""What is published: metadata, the files of the archive, the pictures, the release's text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import registry
from PIL import Image
from repo import ROOT

PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
GITHUB = "https://github.com/me/ComfyUI-MOSS-FP16"


def test_what_belongs_to_the_publisher_is_empty_here_and_filled_in_for_a_release() -> None:
    keys = ("PublisherId", "Icon", "Banner", "Repository", "Documentation", '"Bug Tracker"')
    for key in keys:
        assert f'\n{key} = ""\n' in PYPROJECT
    filled = registry.filled_in(PYPROJECT, "me", GITHUB + "/", "v0.1.0")
    assert 'PublisherId = "me"' in filled and f'Repository = "{GITHUB}"' in filled
    assert 'Icon = "https://raw.githubusercontent.com/me/ComfyUI-MOSS-FP16/v0.1.0/docs/registry/icon.png"' in filled
    unchanged = [line for line in filled.splitlines() if line.split(" = ")[0] not in keys]
    assert unchanged == [line for line in PYPROJECT.splitlines() if line.split(" = ")[0] not in keys]


@pytest.mark.parametrize(
    ("publisher", "repository"),
    [("", GITHUB), ("Me Too", GITHUB), ('x"\nv = "9', GITHUB), ("me", "git@github.com:me/x"), ("me", GITHUB + '"')],
)
def test_values_that_cannot_be_right_are_refused(publisher: str, repository: str) -> None:
    with pytest.raises(registry.ReleaseError):
        registry.filled_in(PYPROJECT, publisher, repository, "v0.1.0")


def test_a_release_takes_its_text_from_the_changelog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(registry, "ROOT", tmp_path)
    version = registry.version_of(PYPROJECT)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT, "utf-8")
    (tmp_path / "CHANGELOG.md").write_text(f"# C\n\n## {version}, today\n\n- New.\n\n## 0.0.1\n\n- Old.\n", "utf-8")
    given = ["--publisher", "me", "--repository", GITHUB, "--tag"]
    assert registry.main([*given, "v9.9.9"]) == 1
    assert "The tag is v9.9.9" in capsys.readouterr().err and not (tmp_path / "changes.md").exists()
    assert (tmp_path / "pyproject.toml").read_text("utf-8") == PYPROJECT
    assert registry.main([*given, f"v{version}"]) == 0
    assert (tmp_path / "changes.md").read_text("utf-8") == "- New.\n"
    with pytest.raises(registry.ReleaseError, match="no section"):
        registry.changes_of("# C\n\n## 0.0.1\n\n- Old.\n", version)


def test_this_version_has_its_changes() -> None:
    assert registry.changes_of((ROOT / "CHANGELOG.md").read_text("utf-8"), registry.version_of(PYPROJECT))


def test_no_dependency_can_replace_the_torch_that_fits_the_card() -> None:
    assert "\ndependencies = []\n" in PYPROJECT
    lines = (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == []


def test_the_archive_holds_what_users_need_and_nothing_else() -> None:
    files = registry.published_files()
    for needed in ("__init__.py", "LICENSE", "README.md", "README.zh-CN.md", "web/panel.js", "fold/__main__.py"):
        assert needed in files
    tops = {name.partition("/")[0] for name in files}
    assert {"nodes", "fold", "web", "locales", "example_workflows"} <= tops
    assert not tops & {"tests", "bench", "docs", ".ci", ".github", "dev.py"}
    assert sum((ROOT / name).stat().st_size for name in files) < 2_000_000


@pytest.mark.parametrize(("name", "size"), [("icon", (400, 400)), ("banner", (1260, 540))])
def test_the_pictures_are_what_the_script_draws(name: str, size: tuple[int, int]) -> None:
    with Image.open(ROOT / "docs" / "registry" / f"{name}.png") as picture:
        assert picture.size == size
    assert (ROOT / "docs" / "registry" / f"{name}.png").stat().st_size < 60_000


def test_every_action_is_pinned_by_its_whole_hash() -> None:
    used = [
        line.split("uses:")[1].strip()
        for file in (ROOT / ".github" / "workflows").glob("*.yml")
        for line in file.read_text("utf-8").splitlines()
        if "uses:" in line
    ]
    assert used
    for action in used:
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_ci_uses_the_pinned_comfyui_and_every_python() -> None:
    import get_comfyui

    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text("utf-8")
    assert f"comfyui: [{get_comfyui.TAG}, newest]" in workflow
    lowest = re.search(r'requires-python = ">=([\d.]+)"', PYPROJECT)
    assert lowest and f'python: ["{lowest[1]}"' in workflow
    stated = re.findall(r'Python :: (\d\.\d+)"', PYPROJECT)
    assert {stated[0], stated[-1]} <= set(re.findall(r'"(3\.\d+)"', workflow))
