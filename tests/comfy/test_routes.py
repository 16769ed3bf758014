"""The panel's routes: their own data only, checked ids, bounded answers, nothing to change by them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer
from moss_fp16_pack.nodes.panel import publish, routes, store
from server import PromptServer


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> store.ReportStore:
    """A store of its own for the routes."""
    own = store.ReportStore(limit=5)
    monkeypatch.setattr(routes, "STORE", own)
    monkeypatch.setattr(publish, "STORE", own)
    return own


@pytest.fixture
def ask(kept: store.ReportStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Requests to a server that has nothing but our routes: (method, path) -> status, headers, JSON or text."""
    table = web.RouteTableDef()
    monkeypatch.setattr(PromptServer, "instance", SimpleNamespace(routes=table), raising=False)
    routes.register()
    app = web.Application()
    app.add_routes(table)

    async def once(method: str, path: str, options: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        async with TestClient(TestServer(app)) as client:
            answer: ClientResponse = await client.request(method, path, **options)
            text = await answer.text()
            is_json = answer.content_type == "application/json"
            return answer.status, dict(answer.headers), json.loads(text) if is_json and text else text

    def run(method: str, path: str, **options: Any) -> tuple[int, dict[str, str], Any]:
        work: Awaitable[Any] = once(method, path, options)
        return asyncio.run(work)  # type: ignore[arg-type]

    # an application can be served once; give each request one of its own
    def fresh(method: str, path: str, **options: Any) -> tuple[int, dict[str, str], Any]:
        nonlocal app
        app = web.Application()
        app.add_routes(table)
        return run(method, path, **options)

    yield fresh


def entry(node: str = "5", workflow: str | None = "w-1", **report: Any) -> dict[str, Any]:
    return {"node_id": node, "prompt_id": "p", "workflow_id": workflow, "state": "done", "report": report}


def test_all_and_one(ask: Callable[..., Any], kept: store.ReportStore) -> None:
    assert ask("GET", "/moss_fp16/reports")[2] == {}
    kept.put(entry("5", peak=1))
    kept.put(entry("12:3", peak=2))
    kept.put(entry("5", "w-2", peak=3))
    status, headers, found = ask("GET", "/moss_fp16/reports")
    assert status == 200 and set(found) == {"5", "12:3"} and found["5"]["report"] == {"peak": 3}
    assert headers["Content-Type"].startswith("application/json")
    assert headers["Cache-Control"] == "no-store" and headers["X-Content-Type-Options"] == "nosniff"
    assert not any(name.lower().startswith("access-control") for name in headers)
    assert ask("GET", "/moss_fp16/reports/12:3")[2]["report"] == {"peak": 2}
    assert ask("GET", "/moss_fp16/reports/5?workflow_id=w-1")[2]["report"] == {"peak": 1}
    assert set(ask("GET", "/moss_fp16/reports?workflow_id=w-2")[2]) == {"5"}


@pytest.mark.parametrize("node", ["7", "5x", "a" * 128])
def test_unknown_ids_are_404(ask: Callable[..., Any], kept: store.ReportStore, node: str) -> None:
    kept.put(entry("5"))
    status, _, found = ask("GET", f"/moss_fp16/reports/{node}")
    assert status == 404 and set(found) == {"error"} and found["error"].endswith(".")


@pytest.mark.parametrize(
    "node",
    ["a" * 129, "a" * 5000, "%00", "a%00b", "%3Cscript%3E", "a%20b", "%E2%98%83", "a%2Fb", "%0a", "..%2f..%2fetc"],
)
def test_bad_ids_are_400(ask: Callable[..., Any], node: str) -> None:
    status, headers, found = ask("GET", f"/moss_fp16/reports/{node}")
    assert status in (400, 404)
    if status == 400:
        assert set(found) == {"error"} and "script" not in found["error"]
        assert headers["Content-Type"].startswith("application/json")


@pytest.mark.parametrize("workflow", ["", "a" * 65, "a/b", "%00", "..", "a%20b", "%3Cb%3E"])
def test_bad_workflow_ids_are_400(ask: Callable[..., Any], workflow: str) -> None:
    for path in ("/moss_fp16/reports", "/moss_fp16/reports/5"):
        status, _, found = ask("GET", f"{path}?workflow_id={workflow}")
        assert status == 400 and set(found) == {"error"}


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(ask: Callable[..., Any], kept: store.ReportStore, method: str) -> None:
    kept.put(entry("5"))
    for path in ("/moss_fp16/reports", "/moss_fp16/reports/5"):
        assert ask(method, path, data=b"{}")[0] == 405
    assert kept.get("5") is not None


def test_the_store_and_the_answers_are_bounded(
    ask: Callable[..., Any], kept: store.ReportStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        kept.put(entry(str(number)))
    assert set(kept.all()) == {"15", "16", "17", "18", "19"}
    assert ask("GET", "/moss_fp16/reports/3")[0] == 404
    kept.put(entry("19", text="x" * 2_000_000))
    kept.put(entry("18", text="x" * 3_000_000))
    status, _, found = ask("GET", "/moss_fp16/reports")
    assert status == 413 and set(found) == {"error"}
    assert ask("GET", "/moss_fp16/reports/19")[0] == 200


def test_numbers_that_json_does_not_know(ask: Callable[..., Any], kept: store.ReportStore) -> None:
    """A report never holds them; should one all the same, the answer is a sentence and no traceback."""
    kept.put(entry("5", peak=float("nan")))
    status, _, found = ask("GET", "/moss_fp16/reports/5")
    assert status == 500 and set(found) == {"error"} and found["error"].endswith(".")


def test_without_a_server_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(PromptServer, "instance", raising=False)
    routes.register()
    publish._send("moss_fp16.report", {})
