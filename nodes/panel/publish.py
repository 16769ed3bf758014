"""From a run to the page: reports while it goes on, a few a second at most, and notices once each."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Literal

import torch
from comfy_execution.utils import get_executing_context
from server import PromptServer

from ...fold.report.counters import BlockStats, PeakCopy, peak_copy, stats_of
from ...fold.report.messages import CONSEQUENCES, Message, message
from ...fold.report.report import Remedy, Report, State
from ..engines.dtypes import unused_dtypes
from ..state import FixState, Run
from .prompts import report_nodes_of
from .remedy import report_of
from .store import STORE

log = logging.getLogger(__name__)

REPORT_EVENT, NOTICE_EVENT = "moss_fp16.report", "moss_fp16.notice"
SECONDS_BETWEEN = 0.4

#: What a toast is about.
Kind = Literal["black_image", "image_affected", "model_broken", "input_fault", "out_of_range", "self_check", "rescue"]


def where_now() -> tuple[str | None, str | None]:
    """(prompt id, workflow id) of the job that the server executes; None where that is not known."""
    context = get_executing_context()
    prompt_id = context.prompt_id if context else None
    return prompt_id, workflow_id_of(_running(prompt_id)[1])


def _running(prompt_id: str | None) -> tuple[Mapping[str, Any], Any]:
    """(prompt, extra data) of a prompt that the server is executing; empty where it is not."""
    server = getattr(PromptServer, "instance", None)
    for item in list(server.prompt_queue.currently_running.values()) if server and prompt_id else ():
        if item[1] == prompt_id:
            return item[2], item[3]
    return {}, None


def workflow_id_of(extra_data: Any) -> str | None:
    """The id in what the page, or a script, sent along with the prompt."""
    found = extra_data
    for key in ("extra_pnginfo", "workflow", "id"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, str) else None


def publish(node_id: str, prompt_id: str | None, workflow_id: str | None, report: Report) -> None:
    """Keep a report as the node's last and send it to the pages."""
    entry = {
        "node_id": node_id,
        "prompt_id": prompt_id,
        "workflow_id": workflow_id,
        "state": report.state,
        "report": report.to_json(),
    }
    STORE.put(entry)
    _send(REPORT_EVENT, entry)


def notice(fix: FixState, run: Run, kind: Kind, said: Message, remedy: Remedy | None = None) -> None:
    """A toast, once per kind and run, with the remedy in it; it never blocks. A black image's stays until closed."""
    if kind in run.notices:
        return
    run.notices.add(kind)
    text = message("with_remedy", said=said, remedy=remedy.said) if remedy else said
    event = {
        "node_id": fix.node_id,
        "prompt_id": run.prompt_id,
        "kind": kind,
        "sticky": kind == "black_image",
        **text.to_json(),
        "severity": said.severity,
    }
    _send(NOTICE_EVENT, event)


def _send(event: str, data: dict[str, Any]) -> None:
    """To the pages, if there is a server; a server that is going down must not end a run."""
    server = getattr(PromptServer, "instance", None)
    if server is not None:
        try:
            server.send_sync(event, data)
        except Exception:
            log.debug("%s could not be sent.", event, exc_info=True)


class LivePanel:
    """Sends the running totals a few times a second. They are copied from the device without a wait."""

    def __init__(self, fix: FixState, run: Run) -> None:
        self.fix, self.run = fix, run
        self.sent_at = 0.0
        self.copy: PeakCopy | None = None

    def update(self) -> None:
        """Called after every step."""
        if self.copy is not None:
            if (rows := self.copy.arrived()) is not None:
                self.copy = None
                self._publish(rows)
        elif time.monotonic() - self.sent_at >= SECONDS_BETWEEN:
            self.sent_at = time.monotonic()
            self._start_copy()

    def _start_copy(self) -> None:
        packed = self.run.counters.packed()
        self.copy = peak_copy(packed)
        if self.copy is None:
            # on other devices there is no way to ask: the step itself goes out, the numbers come at the end
            rows = packed if packed.device.type == "cpu" else torch.zeros(packed.shape)
            self._publish(rows.tolist())

    def _publish(self, rows: list[list[float]]) -> None:
        publish_running(self.fix, self.run, stats_of(self.run.counters.names, rows))


def publish_running(fix: FixState, run: Run, rows: tuple[BlockStats, ...]) -> None:
    """Send the page the report of a run in progress."""
    publish(fix.node_id, run.prompt_id, run.workflow_id, report_of(fix, run, "running", rows))


def finish(fix: FixState, run: Run, state: State) -> None:
    """Read the totals (the run's one wait for the device), close the run, tell the page.

    A run that stopped never reaches its Report nodes, so its report is published for them here.
    """
    if state == "done" and (said := unused_dtypes(fix.own_dtypes)):
        run.messages.append(said)
    report = report_of(fix, run, state, run.counters.read())
    fix.last_report, fix.last_prompt_id = report, run.prompt_id
    stopped = state in ("failed", "interrupted")
    reporters = report_nodes_of(_running(run.prompt_id)[0], fix.node_id) if stopped else []
    for node_id in (fix.node_id, *reporters):
        publish(node_id, run.prompt_id, run.workflow_id, report)
    for said in report.messages:
        if said.key in CONSEQUENCES:  # it has the remedy in it
            notice(fix, run, "image_affected" if said.key == "image_affected" else "black_image", said)
