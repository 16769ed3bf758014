"""README.md and README.zh-CN.md say the same: headings, commands, numbers, tables and links, section by section."""

from __future__ import annotations

import re
from collections import Counter

import get_comfyui
import pytest
from repo import OWN_COMFYUI, ROOT

import dev

ENGLISH = (ROOT / "README.md").read_text("utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text("utf-8")


def sections(text: str) -> list[str]:
    """Cut at the headings; the first piece is what stands before any."""
    pieces = re.split(
        r"^(?=#{1,6} )", re.sub(r"```.*?```", lambda block: block[0].replace("#", "\0"), text, flags=re.S), flags=re.M
    )
    return [piece.replace("\0", "#") for piece in pieces]


def levels(text: str) -> list[int]:
    return [len(piece) - len(piece.lstrip("#")) for piece in sections(text)]


def commands(text: str) -> list[str]:
    return re.findall(r"```.*?```", text, re.S)


def code(text: str) -> Counter[str]:
    """Inline code, in any order: the languages order a sentence differently."""
    return Counter(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S)))


def numbers(text: str) -> Counter[str]:
    """Every number outside of code and addresses; `62 000` is one."""
    plain = re.sub(r"```.*?```|`[^`\n]+`|\]\([^)]*\)|<picture>.*?</picture>", " ", text, flags=re.S)
    joined = re.sub(r"(?<=\d) (?=\d{3}\b)", "", plain)
    return Counter(re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", joined))


def links(text: str) -> Counter[str]:
    return Counter(re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", text))


def rows(text: str) -> list[int]:
    """The number of cells of every table row."""
    return [line.count(" | ") for line in text.splitlines() if line.startswith("| ")]


def test_the_headings_are_the_same_ones() -> None:
    assert levels(CHINESE) == levels(ENGLISH) and len(levels(ENGLISH)) > 8


def test_the_commands_are_the_same_ones() -> None:
    assert commands(CHINESE) == commands(ENGLISH) and len(commands(ENGLISH)) == 3


@pytest.mark.parametrize("found", [code, numbers, links, rows], ids=lambda function: function.__name__)
def test_every_section_holds_the_same(found: object) -> None:
    for english, chinese in zip(sections(ENGLISH), sections(CHINESE), strict=True):
        assert callable(found) and found(chinese) == found(english), english[:60]


def test_what_comes_first_fits_two_screens() -> None:
    first = ENGLISH.split("\n---\n")[0]
    assert len(first.splitlines()) <= 60
    for part in ("**The problem.**", "<picture>", "## Install", "## One node"):
        assert part in first


def test_links_and_pictures_are_there() -> None:
    for found in links(ENGLISH):
        target = "".join(found)
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_what_it_says_of_versions_is_what_the_project_states() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    stated = re.findall(r'Python :: (3\.\d+)"', project)
    assert f"Python {stated[0]} to {stated[-1]}" in ENGLISH
    assert ".".join(map(str, dev.MINIMUM)) == stated[0]
    found = re.search(r'requires-comfyui = ">=(\d+\.\d+)', project)
    assert found and f"ComfyUI {found[1]} or newer" in ENGLISH and f"v{found[1]}." in get_comfyui.TAG


def test_the_places_of_a_comfyui_are_those_of_dev_py() -> None:
    places = (f"`{OWN_COMFYUI}`", "`$COMFYUI_DIR`", "`~/comfy/ComfyUI`", "`$COMFYUI_ARCHIVE`", "`MOSS_COMFYUI=off`")
    for place in places:
        assert place in ENGLISH
        assert place.strip("`") in str(dev.__doc__)
