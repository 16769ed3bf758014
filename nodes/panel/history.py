"""Reports of runs that ComfyUI answered from its cache: no node of ours ran then, so they are in its history alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from server import PromptServer

from .prompts import source_of_report
from .publish import workflow_id_of
from .store import STORE

#: How many of the last jobs are looked through.
MOST = 64

Entry = dict[str, Any]


def last_reports(workflow_id: str | None = None) -> dict[str, Entry]:
    """The newest entry per node id, of one workflow where it is named: of runs, or of the cache where that is newer."""
    jobs = _jobs()
    found = STORE.all(workflow_id)
    for place, (prompt_id, job) in enumerate(jobs):
        if workflow_id is not None and workflow_id_of(_extra_data(job)) != workflow_id:
            continue
        for entry in _cached(prompt_id, job):
            if not _is_newer(found.get(entry["node_id"]), jobs[place:]):
                found[entry["node_id"]] = entry
    return found


def _jobs() -> list[tuple[str, Mapping[str, Any]]]:
    """(prompt id, history's record), the oldest first."""
    server = getattr(PromptServer, "instance", None)
    queue = getattr(server, "prompt_queue", None)
    return list(queue.get_history(max_items=MOST).items()) if queue is not None else []


def _is_newer(entry: Entry | None, jobs: list[tuple[str, Mapping[str, Any]]]) -> bool:
    """Whether an entry is of one of the jobs that came after the first of `jobs`, or of that one, or runs now."""
    if entry is None:
        return False
    return entry["state"] == "running" or any(prompt_id == entry["prompt_id"] for prompt_id, _ in jobs)


def _cached(prompt_id: str, job: Mapping[str, Any]) -> Iterator[Entry]:
    """The entries of a job's Report nodes that came from the cache, and of the nodes their MODELs came from."""
    cached, prompt = _cached_nodes(job), job["prompt"][2]
    for node_id, output in (job.get("outputs") or {}).items():
        reports = output.get("moss_fp16_report") if isinstance(output, Mapping) else None
        if not reports or node_id not in cached:
            continue
        workflow_id = workflow_id_of(_extra_data(job))
        source = source_of_report(prompt, node_id)
        for name in (node_id, source):
            if name is not None:
                yield {
                    "node_id": name,
                    "prompt_id": prompt_id,
                    "workflow_id": workflow_id,
                    "state": "done",
                    "report": {**reports[0], "cached": True},
                }


def _cached_nodes(job: Mapping[str, Any]) -> set[str]:
    messages = (job.get("status") or {}).get("messages") or ()
    return {node for kind, data in messages if kind == "execution_cached" for node in data.get("nodes") or ()}


def _extra_data(job: Mapping[str, Any]) -> Any:
    return job["prompt"][3]
