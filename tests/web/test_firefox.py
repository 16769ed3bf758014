"""The panel in a real Firefox, driven by WebDriver BiDi: a run is shown, and its colours and chart are drawn.

Needs Firefox ($FIREFOX, else on PATH) and a ComfyUI. The rest of the page's tests are in Chromium (test_browser.py).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comfy_server import ComfyServer
from conditionings import save_conditionings
from repo import NO_COMFYUI, ROOT, find_comfyui

HERE = Path(__file__).resolve().parent
FIREFOX = os.environ.get("FIREFOX") or shutil.which("firefox-esr") or shutil.which("firefox")
SECONDS = 120.0
TEMPLATE = ROOT / "example_workflows" / "MOSS-Image fp16 - without text encoder.json"

pytestmark = [
    pytest.mark.skipif(find_comfyui() is None, reason=NO_COMFYUI),
    pytest.mark.skipif(FIREFOX is None, reason="no Firefox: set FIREFOX or put one on PATH"),
]


class Page:
    """One page of a headless Firefox; `evaluate` runs JavaScript in it."""

    def __init__(self, socket: Any, context: str) -> None:
        self.socket, self.context, self.number = socket, context, 0

    async def call(self, method: str, **params: Any) -> Any:
        """One BiDi command and its result. Raises AssertionError with the browser's words for an error."""
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": params})
        while True:
            answer = json.loads((await asyncio.wait_for(self.socket.receive(), SECONDS)).data)
            if answer.get("id") == self.number:
                assert answer["type"] == "success", answer
                return answer["result"]

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression, which may be a promise; as JSON."""
        text = f"(async () => JSON.stringify(await ({expression})))()"
        answer = await self.call(
            "script.evaluate", expression=text, target={"context": self.context}, awaitPromise=True
        )
        assert answer["type"] == "success", answer.get("exceptionDetails", {}).get("text")
        value = answer["result"].get("value")
        return None if value is None else json.loads(value)

    async def until(self, expression: str, what: str) -> Any:
        """Ask again and again until the answer is true."""
        end, last = time.monotonic() + SECONDS, None
        while time.monotonic() < end:
            try:
                last = await self.evaluate(expression)
            except AssertionError as error:  # the page is being loaded
                last = str(error)
            else:
                if last:
                    return last
            await asyncio.sleep(0.1)
        raise AssertionError(f"{what}: not within {SECONDS:g} s; the last answer was {last}")

    async def picture(self, name: str) -> None:
        answer = await self.call("browsingContext.captureScreenshot", context=self.context)
        (HERE / "artifacts").mkdir(exist_ok=True)
        (HERE / "artifacts" / f"{name}.png").write_bytes(base64.b64decode(answer["data"]))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    comfyui = find_comfyui()
    assert comfyui is not None
    running = ComfyServer(comfyui, tmp_path_factory.mktemp("firefox"))
    save_conditionings(running.base / "input")
    with running:
        yield running


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The websocket of a Firefox with a profile of its own."""
    log = tmp_path / "firefox.log"
    arguments = ["--headless", "--no-remote", "--profile", str(tmp_path), "--remote-debugging-port", "0"]
    with log.open("wb") as out:
        browser = subprocess.Popen([str(FIREFOX), *arguments], stdout=out, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + SECONDS
        while not (found := re.search(r"BiDi listening on (ws://\S+)", log.read_text("utf-8", "replace"))):
            assert browser.poll() is None and time.monotonic() < end, log.read_text("utf-8", "replace")
            time.sleep(0.1)
        yield f"{found[1]}/session"
    finally:
        browser.terminate()
        browser.wait(30)


def test_the_panel_in_firefox(server: ComfyServer, address: str) -> None:
    """Both canvases in one browser: starting another takes as long as the test."""
    asyncio.run(_both_canvases(server, address))


async def _both_canvases(server: ComfyServer, address: str) -> None:
    import aiohttp

    async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
        page = Page(socket, "")
        await page.call("session.new", capabilities={})
        page.context = (await page.call("browsingContext.getTree"))["contexts"][0]["context"]
        await page.call("browsingContext.setViewport", context=page.context, viewport={"width": 1500, "height": 1000})
        for vue in (False, True):
            settings = {
                "Comfy.TutorialCompleted": True, "Comfy.VueNodes.Enabled": vue, "Comfy.ColorPalette": "light",
                "Comfy.Locale": "en", "Comfy.Validation.Workflows": False, "Comfy.Minimap.Visible": False,
            }  # fmt: skip
            server.client.call("POST", "/settings", settings)
            await _show_a_run(page, server.url, vue)


async def _show_a_run(page: Page, url: str, vue: bool) -> None:
    await page.call("browsingContext.navigate", context=page.context, url=url, wait="interactive")
    ready = "window.app?.vueAppReady && app.graph?.id && app.extensions.some((e) => e.name === 'moss.fp16.panel')"
    await page.until(f"Boolean({ready})", "the page")
    workflow = json.dumps({**json.loads(TEMPLATE.read_text("utf-8")), "id": str(uuid.uuid4())})
    values = {
        "MossFP16Loader": {"model_name": "hot.safetensors", "compute_dtype": "fp16", "fix": "none", "guard": "report"},
        "EmptyFlux2LatentImage": {"width": 64, "height": 64},
        "KSampler": {"steps": 4, "seed": 71 + vue},
    }
    await page.evaluate(f"app.loadGraphData({workflow}, true, true, null).then(() => 1)")
    await page.evaluate(
        f"Object.entries({json.dumps(values)}).forEach(([type, set]) => Object.entries(set).forEach(([name, value]) =>"
        " { app.rootGraph.nodes.find((n) => n.type === type).widgets.find((w) => w.name === name).value = value }))"
    )
    await page.evaluate(
        "(() => { const n = app.rootGraph.nodes.find((n) => n.type === 'MossFP16Report'); app.canvas.ds.scale = 1;"
        " app.canvas.ds.offset = [400 - n.pos[0], 200 - n.pos[1]]; app.canvas.setDirty(true, true) })()"
    )
    await page.evaluate("app.queuePrompt(0, 1).then(() => 1)")
    panel = "document.querySelector('.moss-panel[data-verdict=broken]:not([data-small])')"
    await page.until(f"Boolean({panel}?.dataset.phase === 'done')", "the run")
    shown = await page.evaluate(
        f"((p) => ({{ headline: p.querySelector('.moss-headline').textContent,"
        " button: p.querySelector('.moss-remedy-button').textContent,"
        " bars: [...p.querySelectorAll('.moss-bar rect')].map((r) => r.getBoundingClientRect().height),"
        " colours: ['.moss-headline', '.moss-fact', '.moss-state'].map("
        " (s) => getComputedStyle(p.querySelector(s)).color),"
        " ground: getComputedStyle(p).backgroundColor, room: p.scrollHeight - p.clientHeight }))"
        f"({panel})"
    )
    await page.picture(f"firefox-{'nodes2' if vue else 'classic'}")
    assert shown["headline"] == "Image is black or broken: the model left fp16's range"
    assert shown["button"] == "Set fix = auto"
    assert len(shown["bars"]) == 6 and max(shown["bars"]) > 80
    assert len({*shown["colours"], shown["ground"]}) >= 3, shown  # colours that Firefox did not know would be one
    assert shown["room"] <= 1
    await page.evaluate(f"{panel}.querySelector('.moss-remedy-button').click()")
    widget = "app.rootGraph.nodes.find((n) => n.type === 'MossFP16Loader').widgets.find((w) => w.name === 'fix').value"
    await page.until(f"{widget} === 'auto'", "fix = auto")
