"""A worker's start: ComfyUI and this pack in one process, as ComfyUI itself would have them.

ComfyUI's top-level module `nodes` and this repository's folder of that name exclude each other on sys.path, so a worker
is a script in a process of its own. It reads a job (JSON, argv[1]) and prints its result as the last line.
"""

from __future__ import annotations

import asyncio
import atexit
import compileall
import importlib
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "tools"))
from repo import load_module  # noqa: E402

PACK = "moss_fp16_pack"


def job() -> dict[str, Any]:
    """What this worker was asked for."""
    return dict(json.loads(sys.argv[1]))


def answer(result: Any) -> None:
    """Hand the result back."""
    print(json.dumps(result), flush=True)


def enter(comfyui: str, *, cpu: bool = True) -> dict[str, Any]:
    """Import ComfyUI, then the pack; returns what the pack's import cost."""
    from comfy_server import comfy_arguments, prepare_base

    base = Path(tempfile.mkdtemp(prefix="moss-bench-base-"))
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    prepare_base(base, {}, [])
    sys.path.insert(0, comfyui)
    arguments = comfy_arguments(base)
    sys.argv = ["main.py", *(a for a in arguments if cpu or a != "--cpu")]
    import comfy.options

    comfy.options.enable_args_parsing()
    for name in ("comfy_api.latest", "execution", "nodes", "server"):
        importlib.import_module(name)  # what ComfyUI has imported by the time it comes to custom nodes

    return import_pack()


def import_pack() -> dict[str, Any]:
    """Seconds of importing the pack with all its nodes and schemas, and the modules it brought that are not its own."""
    for folder in ("fold", "nodes"):
        compileall.compile_dir(ROOT / folder, quiet=1)  # as on every start but the first
    before = set(sys.modules)
    started = time.perf_counter()
    module = load_module(PACK, ROOT)

    async def nodes() -> None:
        extension = await module.comfy_entrypoint()
        for node in await extension.get_node_list():
            node.GET_SCHEMA()

    asyncio.run(nodes())
    seconds = time.perf_counter() - started
    new = {name.partition(".")[0] for name in set(sys.modules) - before}
    return {"seconds": seconds, "modules": sorted(new - {PACK} - sys.stdlib_module_names)}


def foreign_class() -> None:
    """Give ComfyUI a MOSS-Image class of its own, as native support does: the one of the tests."""
    load_module("foreign_moss_pack", ROOT / "tests" / "comfy" / "foreign_pack").register()
