"""The house: one direction, no circles, no crowded floor, and a map that is true."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from repo import ROOT

from fold.names import OFFICIAL

Module = tuple[str, ...]
MOST_ROOMS = 20
FOLDERS = [
    folder
    for top in ("fold", "nodes")
    for folder in (ROOT / top, *(ROOT / top).rglob("*"))
    if folder.is_dir() and folder.name != "__pycache__"
]


@cache
def files() -> dict[Module, Path]:
    """Every module of fold/ and nodes/; a package stands for its __init__.py."""
    found = {}
    for top in ("fold", "nodes"):
        for file in sorted((ROOT / top).rglob("*.py")):
            name = file.relative_to(ROOT).with_suffix("").parts
            found[name[:-1] if name[-1] == "__init__" else name] = file
    return found


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """What of a module's tree runs when it is imported: no function's body, and nothing under `if TYPE_CHECKING`."""
    yield node
    if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
        return
    for child in ast.iter_child_nodes(node):
        yield from run_at_import(child)


@cache
def imports(walk: Callable[[ast.AST], Iterator[ast.AST]] = ast.walk) -> dict[Module, set[Module]]:
    """Which module imports which, wherever in it the import stands, or where `walk` comes by."""
    found: dict[Module, set[Module]] = {}
    for name, file in files().items():
        package = name if file.name == "__init__.py" else name[:-1]
        targets = found[name] = set()
        for node in walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package[: len(package) - node.level + 1] + tuple((node.module or "").split(".")) * bool(
                    node.module
                )
                for alias in node.names:
                    target = (*base, alias.name) if (*base, alias.name) in files() else base
                    if target in files() and target != name:
                        targets.add(target)
    return found


def check_no_circle(arrows: Mapping[Module, Iterable[Module]]) -> None:
    TopologicalSorter(arrows).prepare()  # CycleError names the circle


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert sum(map(len, imports().values())) > 200  # the arrows are seen at all
    check_no_circle(imports())


#: What only running one of the nodes needs: ComfyUI's start does not wait for it.
NOT_AT_START = {
    ("fold", "measure", "compare"),
    ("fold", "measure", "compare_chart"),
    ("fold", "measure", "probe"),
    ("fold", "measure", "recording"),
    ("fold", "report", "chart"),
    ("fold", "checkpoint", "export"),
}


def test_what_measures_exports_and_draws_is_no_part_of_comfyuis_start() -> None:
    found, ahead = set(), [("nodes",)]
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += imports(run_at_import)[name]
    assert len(found) > 60 and ("nodes", "guard", "guard") in found
    assert files().keys() >= NOT_AT_START and not found & NOT_AT_START


@pytest.mark.parametrize("top", ["fold", "nodes"])
def test_no_circle_between_the_rooms_of_a_floor(top: str) -> None:
    rooms: dict[Module, set[Module]] = {}
    for name, targets in imports().items():
        if name[0] == top and len(name) > 1:
            rooms.setdefault(name[:2], set()).update(
                target[:2] for target in targets if target[0] == top and len(target) > 1 and target[:2] != name[:2]
            )
    assert len(rooms) > 10
    check_no_circle(rooms)


def test_a_circle_would_be_seen() -> None:
    with pytest.raises(ValueError, match="cycle"):
        check_no_circle({("a",): [("b",)], ("b",): [("a",)]})


def test_fold_imports_neither_comfy_nor_nodes() -> None:
    assert not [
        (name, t) for name, targets in imports().items() for t in targets if name[0] == "fold" and t[0] != "fold"
    ]
    for name, file in files().items():
        if name[0] == "fold":
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                assert not [n for n in names if n.split(".")[0] in ("comfy", "nodes", "server", "folder_paths")], file


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_no_folder_has_more_rooms_than_one_can_take_in(folder: Path) -> None:
    rooms = [
        entry.name
        for entry in folder.iterdir()
        if (entry.suffix == ".py" or entry.is_dir()) and entry.name not in ("__init__.py", "__main__.py", "__pycache__")
    ]
    assert len(rooms) <= MOST_ROOMS, sorted(rooms)


def test_what_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    named = {name for name in re.findall(r"`([\w./]+)`", text) if "/" in name or name.endswith((".py", ".md"))}
    named |= set(re.findall(r"pytest (tests/[\w./]+)", text))
    assert len(named) > 25
    gone = [name for name in sorted(named) if not ((ROOT / name).exists() or (ROOT / "nodes" / name).exists())]
    assert gone == []


#: Paths of modules that are no ordinary words.
PATHS = [part.path for part in OFFICIAL.parts.values()] + [f"{OFFICIAL.text.blocks}.", f"{OFFICIAL.joint.blocks}."]
PATHS += [part.path for part in OFFICIAL.joint.parts.values() if "." in part.path] + [OFFICIAL.rope_bands]


@pytest.mark.parametrize("name", [name for name in files() if name != ("fold", "names")], ids=".".join)
def test_only_the_table_of_names_spells_a_modules_path(name: Module) -> None:
    tree = ast.parse(files()[name].read_text("utf-8"))
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    # sentences (docstrings, tooltips, messages) may name modules to people
    assert not [text for text in texts if " " not in text.strip() and any(path in text for path in PATHS)]
