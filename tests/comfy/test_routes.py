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
from moss_fp16_pack.nodes.panel import history, prompts, publish, routes, store
from server import PromptServer


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> store.ReportStore:
    """A store of its own for the routes."""
    own = store.ReportStore(limit=5)
    monkeypatch.setattr(history, "STORE", own)
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


def test_the_routes_give_all_reports_one_report_and_those_of_a_workflow(
    ask: Callable[..., Any], kept: store.ReportStore
) -> None:
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


def test_without_a_server_nothing_is_registered_or_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Server:
        def __init__(self) -> None:
            self.routes, self.sent = web.RouteTableDef(), list[str]()

        def send_sync(self, event: str, data: dict[str, Any]) -> None:
            self.sent.append(event)

    server = Server()
    monkeypatch.setattr(PromptServer, "instance", server, raising=False)
    for there in (True, False):
        routes.register()
        publish._send("moss_fp16.report", {})
        assert (len(server.routes), server.sent) == (2, ["moss_fp16.report"]), there
        monkeypatch.delattr(PromptServer, "instance", raising=False)


# ---- jobs that came from the cache ---------------------------------------------------------------------------------

PROMPT = {
    "1": {"class_type": "MossFP16Loader", "inputs": {"c": ""}},
    "2": {"class_type": "LoraLoaderModelOnly", "inputs": {"model": ["1", 0], "strength_model": 1.0}},
    "3": {"class_type": "MossFP16Fix", "inputs": {"model": ["2", 0]}},
    "4": {"class_type": "EmptyLatentImage", "inputs": {}},
    "12:5": {"class_type": "KSampler", "inputs": {"model": ["3", 0], "latent_image": ["4", 0]}},
    "6": {"class_type": "MossFP16Report", "inputs": {"model": ["3", 0], "passthrough": ["12:5", 0]}},
    "7": {"class_type": "MossFP16Report", "inputs": {"passthrough": ["12:5", 0], "model": ["2", 0]}},
    "8": {"class_type": "MossFP16Report", "inputs": {"model": ["9", 0]}},
    "9": {"class_type": "UNETLoader", "inputs": {}},
    "10": {"class_type": "NodeOfAnotherPack", "inputs": {"anything": ["3", 0]}},
    "11": {"class_type": "MossFP16Report", "inputs": {"model": ["10", 1]}},
}


def test_a_report_belongs_to_the_nearest_node_that_made_its_model() -> None:
    found = {name: prompts.source_of_report(PROMPT, name) for name in ("6", "7", "8", "11")}
    assert found == {"6": "3", "7": "1", "8": None, "11": "3"}
    assert prompts.report_nodes_of(PROMPT, "3") == ["6", "11"]
    assert prompts.report_nodes_of(PROMPT, "1") == ["7"]
    assert prompts.report_nodes_of({}, "1") == []


@pytest.mark.parametrize("inputs", [None, [], {"model": ["6", 0]}, {"model": ["no", 0]}, {"model": [1, "0"]}])
def test_a_prompt_of_any_shape_is_read(inputs: Any) -> None:
    prompt = {"6": {"class_type": "MossFP16Report", "inputs": inputs}, "7": "text", "8": {}}
    assert prompts.source_of_report(prompt, "6") is None
    assert prompts.report_nodes_of(prompt, "1") == []


def test_a_circle_in_a_prompt_ends_the_search() -> None:
    """ComfyUI refuses such a prompt; a report must not hang on one."""
    loop = {name: {"class_type": "NodeOfAnotherPack", "inputs": {"model": [other, 0]}} for name, other in ("ab", "ba")}
    prompt = {"6": {"class_type": "MossFP16Report", "inputs": {"model": ["a", 0]}}, **loop}
    assert prompts.source_of_report(prompt, "6") is None


def job(number: int, workflow: str, cached: list[str], **report: Any) -> tuple[str, dict[str, Any]]:
    """One record of ComfyUI's history."""
    extra = {"extra_pnginfo": {"workflow": {"id": workflow}}}
    messages = [("execution_cached", {"nodes": cached, "prompt_id": f"p{number}"})]
    output = {"6": {"moss_fp16_report": [report]}, "20": {"images": []}}
    status = {"status_str": "success", "completed": True, "messages": messages}
    return f"p{number}", {"prompt": (number, f"p{number}", PROMPT, extra, ["6"]), "outputs": output, "status": status}


@pytest.fixture
def jobs(kept: store.ReportStore, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """ComfyUI's history."""
    found: dict[str, Any] = {}
    queue = SimpleNamespace(get_history=lambda max_items: found)
    monkeypatch.setattr(PromptServer, "instance", SimpleNamespace(prompt_queue=queue), raising=False)
    return found


def test_a_cached_job_has_its_report_under_its_own_workflow(jobs: dict[str, Any], kept: store.ReportStore) -> None:
    kept.put(entry("6", "w-1", peak=1) | {"prompt_id": "p1"})
    kept.put(entry("3", "w-1", peak=1) | {"prompt_id": "p1"})
    jobs.update([job(1, "w-1", [], peak=1), job(2, "w-2", ["3", "6"], peak=1)])
    found = history.last_reports("w-2")
    assert set(found) == {"6", "3"}
    for name, one in found.items():
        assert one["report"] == {"peak": 1, "cached": True} and one["state"] == "done" and one["node_id"] == name
        assert one["prompt_id"] == "p2" and one["workflow_id"] == "w-2"
    assert history.last_reports("w-1")["6"]["report"] == {"peak": 1}
    assert history.last_reports()["6"]["prompt_id"] == "p2"
    jobs.update([job(3, "w-3", ["1"], peak=1)])  # its Report node ran, so its report is not from the cache
    assert history.last_reports("w-3") == {}


def test_the_newer_of_a_cached_job_and_a_run_is_shown(jobs: dict[str, Any], kept: store.ReportStore) -> None:
    jobs.update([job(1, "w-1", ["6"], peak=1), job(2, "w-1", [], peak=2), job(3, "w-1", ["6"], peak=1)])
    kept.put(entry("6", "w-1", peak=2) | {"prompt_id": "p2"})
    assert history.last_reports("w-1")["6"]["report"] == {"peak": 1, "cached": True}
    jobs.pop("p3")
    assert history.last_reports("w-1")["6"]["report"] == {"peak": 2}
    kept.put(entry("6", "w-1", peak=4) | {"prompt_id": "p4", "state": "running"})
    jobs.update([job(3, "w-1", ["6"], peak=1)])
    assert history.last_reports("w-1")["6"]["report"] == {"peak": 4}
