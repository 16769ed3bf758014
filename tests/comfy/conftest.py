"""Tests against a real ComfyUI: over HTTP (`server`), and in process (`import comfy...`, `import moss_fp16_pack...`).

They run in a pytest process of their own (`python dev.py test`, or `pytest tests/comfy`): ComfyUI's top-level module
`nodes` and this pack's folder `nodes/` cannot both be on sys.path. In this process ComfyUI's own folder is on the
path, this repository is not, and the pack is imported the way ComfyUI does it: by path, under a name of its own.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comfy_server import ComfyServer, comfy_arguments, golden_models, prepare_base
from no_links import pytest_runtest_call  # noqa: F401
from repo import DATA, NO_COMFYUI, ROOT, find_comfyui, load_module
from serving import serve

COMFYUI = find_comfyui()
PACK = "moss_fp16_pack"


def pytest_report_header() -> str:
    return f"ComfyUI: {COMFYUI or NO_COMFYUI}"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without a ComfyUI there is nothing to import here."""
    return True if COMFYUI is None else None


def _enter_comfyui(comfyui: Path, base: Path) -> None:
    """Prime ComfyUI's argument parser (it reads sys.argv at import) and put its folder, not ours, on sys.path."""
    if "fold" in sys.modules or "nodes" in sys.modules:
        raise pytest.UsageError("Run tests/comfy in a process of its own: `pytest tests/comfy`.")
    sys.path[:] = [str(comfyui), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
    argv, sys.argv = sys.argv, ["main.py", *comfy_arguments(base)]
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.cli_args
        import comfy.sd
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise pytest.UsageError(f"ComfyUI at {comfyui} cannot be imported here: {reason}") from None
    finally:
        sys.argv = argv


_BASE = Path(tempfile.mkdtemp(prefix="moss-comfy-"))


def pytest_configure() -> None:
    """Here and not at import, where pytest would add its own traceback to the sentence."""
    if COMFYUI is not None:
        prepare_base(_BASE, {}, golden_models())
        _enter_comfyui(COMFYUI, _BASE)
        load_module(PACK, ROOT)


def pytest_unconfigure() -> None:
    shutil.rmtree(_BASE, ignore_errors=True)


def save_conditioning(case_file: Path, case: str, target: Path) -> None:
    """One golden case's text context as the file that MossFP16LoadConditioning reads."""
    from safetensors.torch import load_file, save_file

    save_file({"context": load_file(case_file)[f"{case}.context"].contiguous()}, target)


@pytest.fixture(scope="session")
def base() -> Path:
    """The base directory (models, input, output) of the in-process ComfyUI."""
    return _BASE


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """tests/data/expected.json: architecture, factors and per-case figures of the golden models."""
    return dict(json.loads((DATA / "expected.json").read_text("utf-8")))


@pytest.fixture
def foreign() -> Iterator[None]:
    """A MOSS-Image class of ComfyUI's own, as native support would register it (see `foreign_pack`)."""
    import torch
    from comfy_runs import foreign_pack, unload

    pack = foreign_pack()
    pack.register()
    yield
    pack.register.undo()
    with torch.inference_mode():  # as ComfyUI does: quantized weights put back outside of it would not be allowed
        unload()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """One ComfyUI for the whole session; golden models in diffusion_models, `<model>_case0.safetensors` in input."""
    assert COMFYUI is not None
    running = ComfyServer(COMFYUI, tmp_path_factory.mktemp("comfyui"))
    for file in DATA.glob("*_io.safetensors"):
        model = file.stem.removesuffix("_io")
        save_conditioning(file, "case0", running.base / "input" / f"{model}_case0.safetensors")
    yield from serve(running)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failing server test shows the end of the server's log."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    running = getattr(item, "funcargs", {}).get("server")
    if report.failed and isinstance(running, ComfyServer):
        report.sections.append(("ComfyUI log", running.log_tail()))


@pytest.fixture
def forgotten() -> Iterator[None]:
    """No combination has passed the self-check before the test, nor counts as passed after it."""
    from moss_fp16_pack.nodes.guard import self_check

    self_check.forget_all()
    yield
    self_check.forget_all()


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every toast sent."""
    from moss_fp16_pack.nodes.panel import publish

    found: list[dict[str, Any]] = []

    def send(event: str, data: dict[str, Any]) -> None:
        if event == publish.NOTICE_EVENT:
            found.append(data)

    monkeypatch.setattr(publish, "_send", send)
    return found
