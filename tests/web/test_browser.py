"""The page: its pure parts under node's test runner, and the panel in a real Chromium on a real ComfyUI.

Each `unit/*.test.mjs` and `browser/*.test.mjs` is one test here. Needs Node.js 20; the browser part also needs a
ComfyUI, Chromium ($CHROMIUM, else on PATH) and `npm ci` in this folder. Screenshots end up in `artifacts/`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from comfy_server import ComfyServer
from conditionings import save_conditionings
from repo import NO_COMFYUI, find_comfyui
from serving import serve

HERE = Path(__file__).resolve().parent
NODE = shutil.which("node")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
TIMEOUT = 900.0

pytestmark = pytest.mark.skipif(NODE is None, reason="no Node.js on PATH")


def files(folder: str) -> list[str]:
    return sorted(path.name for path in (HERE / folder).glob("*.test.mjs"))


def run_node(file: Path, environment: dict[str, str]) -> None:
    """Run one file under node's test runner; its output is the failure message."""
    done = subprocess.run(
        [str(NODE), "--test", "--test-reporter=spec", str(file)],
        cwd=HERE, env={**os.environ, **environment}, capture_output=True, encoding="utf-8", errors="replace",
        timeout=TIMEOUT, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.fail(f"{file.name}:\n{done.stdout[-12_000:]}\n{done.stderr[-3000:]}", pytrace=False)


def missing() -> str | None:
    """What the browser tests lack here, in words."""
    if find_comfyui() is None:
        return NO_COMFYUI
    if CHROMIUM is None:
        return "no Chromium: set CHROMIUM or put one on PATH"
    if not (HERE / "node_modules" / "playwright-core").is_dir():
        return "no playwright-core: run `npm ci` in tests/web"
    return None


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A ComfyUI with this pack, the golden models and their conditionings."""
    comfyui = find_comfyui()
    assert comfyui is not None
    running = ComfyServer(comfyui, tmp_path_factory.mktemp("comfyui"), packs={"pace_pack": HERE / "pace_pack"})
    save_conditionings(running.base / "input")
    yield from serve(running)


@pytest.fixture(scope="session")
def control(server: ComfyServer) -> Iterator[str]:
    """The address of a helper: a POST to it restarts the ComfyUI at the address it had."""

    class Restart(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            server.stop()
            server.start()
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Not into the tests' output."""

    with HTTPServer(("127.0.0.1", 0), Restart) as helper:
        threading.Thread(target=helper.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{helper.server_port}"
        helper.shutdown()


@pytest.mark.parametrize("name", files("unit"))
def test_the_pages_functions_without_a_browser(name: str) -> None:
    run_node(HERE / "unit" / name, {})


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
@pytest.mark.parametrize("name", files("browser"))
def test_the_page_in_chromium(name: str, server: ComfyServer, control: str) -> None:
    run_node(HERE / "browser" / name, {"MOSS_URL": server.url, "MOSS_CONTROL": control, "CHROMIUM": str(CHROMIUM)})
