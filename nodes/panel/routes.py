"""Read-only routes for the panel: the last report of each node."""

from __future__ import annotations

import json
import re

from aiohttp import web
from server import PromptServer

from .history import last_reports

NODE_ID = re.compile(r"[0-9A-Za-z:._-]{1,128}")
WORKFLOW_ID = re.compile(r"[0-9A-Za-z-]{1,64}")
MAX_BYTES = 4 * 1024 * 1024


def register() -> None:
    """Add the routes to the running server, if there is one."""
    server = getattr(PromptServer, "instance", None)
    if server is None:
        return

    @server.routes.get("/moss_fp16/reports")
    async def reports(request: web.Request) -> web.Response:
        if (bad := _bad_workflow(request)) is not None:
            return bad
        return _json(last_reports(request.query.get("workflow_id")))

    @server.routes.get("/moss_fp16/reports/{node_id}")
    async def report(request: web.Request) -> web.Response:
        node_id = request.match_info["node_id"]
        if not NODE_ID.fullmatch(node_id):
            return _json({"error": "That is no node id: letters, digits and : . _ - only."}, 400)
        if (bad := _bad_workflow(request)) is not None:
            return bad
        entry = last_reports(request.query.get("workflow_id")).get(node_id)
        if entry is None:
            return _json({"error": f"There is no report for node {node_id} yet."}, 404)
        return _json(entry)


def _bad_workflow(request: web.Request) -> web.Response | None:
    found = request.query.get("workflow_id")
    if found is not None and not WORKFLOW_ID.fullmatch(found):
        return _json({"error": "That is no workflow id."}, 400)
    return None


def _json(value: object, status: int = 200) -> web.Response:
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        text, status = json.dumps({"error": "A report holds a number that JSON does not know."}), 500
    if len(text) > MAX_BYTES:
        text, status = json.dumps({"error": "The reports are too large to send at once: ask for one node."}), 413
    return web.Response(
        text=text,
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
    )
