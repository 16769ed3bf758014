"""A real ComfyUI, started on a free port over a temporary base directory with this pack linked in.

Standard library only: the tests, the demo and the browser tests all use it. The ComfyUI checkout itself is only read.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from repo import DATA, PACK_NAME, ROOT, load_module

START_SECONDS = 120.0
LOG_LINES = 40


class ComfyUIError(RuntimeError):
    """ComfyUI did not start, or failed a job: one sentence, then the end of its log."""


def load_client() -> ModuleType:
    """The example client script, as a module: what users run is what the tests talk through."""
    return load_module("moss_queue_prompt", ROOT / "example_workflows" / "api" / "queue_prompt.py")


def free_port() -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def link(source: Path, target: Path) -> None:
    """A symlink, or a copy where the system allows no links (Windows without developer mode)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.symlink_to(source, target_is_directory=source.is_dir())
    except OSError:
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(".*", "node_modules", "__pycache__"))
        else:
            shutil.copy2(source, target)


def prepare_base(base: Path, packs: Mapping[str, Path], models: Iterable[Path]) -> None:
    """Lay out a ComfyUI base directory: the packs in custom_nodes, the model files in models/diffusion_models."""
    for folder in ("custom_nodes", "models/diffusion_models", "models/checkpoints", "input", "output", "temp", "user"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    for name, source in packs.items():
        link(source, base / "custom_nodes" / name)
    for model in models:
        link(model, base / "models" / "diffusion_models" / model.name)


def golden_models() -> list[Path]:
    """The small golden checkpoints of tests/data (without the input/output files beside them)."""
    return [path for path in sorted(DATA.glob("*.safetensors")) if not path.stem.endswith("_io")]


def comfy_arguments(base: Path) -> list[str]:
    """The options every ComfyUI of ours runs with: CPU, offline, nothing written outside `base`."""
    offline = ["--cpu", "--disable-api-nodes", "--disable-auto-launch", "--database-url", "sqlite:///:memory:"]
    return [*offline, "--base-directory", str(base)]


def why_it_does_not_start(python: Path, comfy: Path) -> str | None:
    """What stops this interpreter from importing a ComfyUI: the last line of the traceback; None where nothing does."""
    code = (
        "import sys; sys.argv[:] = ['main.py', '--cpu']; import comfy.options; comfy.options.enable_args_parsing(); "
        "import comfy.sd, nodes"
    )
    done = subprocess.run([str(python), "-c", code], cwd=comfy, stdin=subprocess.DEVNULL, capture_output=True)
    lines = done.stderr.decode("utf-8", "replace").split("\n")
    if done.returncode == 0:
        return None
    return next((line.strip() for line in reversed(lines) if line.strip()), f"it ends with {done.returncode}")


class ComfyServer:
    """One running ComfyUI with a pack (this one); a context manager. `client` talks to it, `base` is its directory."""

    def __init__(
        self,
        comfy: Path,
        base: Path,
        *,
        pack: Path = ROOT,
        packs: Mapping[str, Path] | None = None,
        models: Iterable[Path] | None = None,
        arguments: Iterable[str] = (),
    ) -> None:
        self.comfy, self.base, self.port = comfy, base, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = base / "comfyui.log"
        self.arguments = [*comfy_arguments(base), "--port", str(self.port), *arguments]
        self.client: Any = load_client().ComfyClient(f"127.0.0.1:{self.port}")
        self.process: subprocess.Popen[bytes] | None = None
        prepare_base(base, {PACK_NAME: pack, **(packs or {})}, golden_models() if models is None else models)

    def start(self, seconds: float = START_SECONDS) -> ComfyServer:
        """Start the process and wait until it answers. Raises ComfyUIError when it does not."""
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COMFYUI_DIR")}
        environment |= {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(self.comfy / "main.py"), *self.arguments],
                cwd=self.comfy, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1):
                    self.client.call("GET", "/system_stats")
                    return self
            except Exception:  # not listening yet, or not answering yet
                time.sleep(0.2)
        state = "did not answer in time" if self.process.poll() is None else f"ended with {self.process.returncode}"
        self.stop()
        raise ComfyUIError(f"ComfyUI at {self.comfy} {state}. The end of its log:\n{self.log_tail()}")

    def stop(self) -> None:
        """Stop the process; safe to call twice."""
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self) -> ComfyServer:
        return self if self.process else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def log(self) -> str:
        """Everything the server printed so far."""
        return self.log_path.read_text("utf-8", "replace") if self.log_path.exists() else ""

    def log_tail(self, lines: int = LOG_LINES) -> str:
        """The last lines of the log, for failure messages."""
        return "\n".join(self.log().splitlines()[-lines:])

    def queue(self, prompt: dict[str, Any], workflow_id: str | None = None) -> str:
        """POST /prompt, as a page with that workflow on it where one is named; the prompt's id."""
        if workflow_id is None:
            return str(self.client.queue(prompt))
        extra = {"extra_pnginfo": {"workflow": {"id": workflow_id}}}
        body = {"prompt": prompt, "client_id": self.client.client_id, "extra_data": extra}
        return str(self.client.call("POST", "/prompt", body)["prompt_id"])

    def wait(self, prompt_id: str, seconds: float = 120.0) -> dict[str, Any]:
        """The finished prompt's entry of /history, failed or not."""
        return dict(self.client.wait(prompt_id, seconds))

    def run(self, prompt: dict[str, Any], seconds: float = 120.0) -> dict[str, Any]:
        """Queue, wait, and raise ComfyUIError with the reason and the log when the prompt fails."""
        entry = self.wait(self.queue(prompt), seconds)
        reason = load_client().failure(entry)
        if reason:
            raise ComfyUIError(f"{reason}\nThe end of the server's log:\n{self.log_tail()}")
        return entry

    def interrupt(self) -> None:
        """Interrupt whatever runs."""
        self.client.call("POST", "/interrupt", {})

    def events(self) -> EventLog:
        """Record the server's websocket events from now on; use as a context manager."""
        return EventLog(self.client.events())


class EventLog:
    """The server's events, collected by a thread. `wait_for` blocks until one matches."""

    def __init__(self, stream: Any) -> None:
        self.items: list[dict[str, Any]] = []
        self._stream, self._changed = stream, threading.Condition()
        threading.Thread(target=self._collect, daemon=True).start()

    def _collect(self) -> None:
        try:
            for event in self._stream:
                with self._changed:
                    self.items.append(event)
                    self._changed.notify_all()
        except (OSError, ValueError):
            return  # closed, by us or by the server

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The data of all events of one type so far."""
        return [event.get("data") or {} for event in list(self.items) if event.get("type") == kind]

    def wait_for(self, kind: str, seconds: float = 60.0, **fields: Any) -> dict[str, Any]:
        """The data of the first event of this type whose fields have these values. Raises TimeoutError."""
        end = time.monotonic() + seconds

        def match() -> dict[str, Any] | None:
            wanted = fields.items()
            return next((d for d in self.of(kind) if all(d.get(k) == v for k, v in wanted)), None)

        with self._changed:
            while (found := match()) is None:
                if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    raise TimeoutError(f"no {kind} event with {fields} in {seconds:g} s; saw {self.items[-5:]}")
            return found

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
