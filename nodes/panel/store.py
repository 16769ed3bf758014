"""The last report of each node, for a page that was reloaded or comes back in mid-run."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

LIMIT = 200


class ReportStore:
    """Entries {node_id, prompt_id, workflow_id, state, report} by (workflow, node), the oldest dropped past LIMIT."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._entries: OrderedDict[tuple[str | None, str], dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._limit = limit

    def put(self, entry: dict[str, Any]) -> None:
        key = (entry["workflow_id"], entry["node_id"])
        with self._lock:
            self._entries[key] = entry
            self._entries.move_to_end(key)
            while len(self._entries) > self._limit:
                self._entries.popitem(last=False)

    def all(self, workflow_id: str | None = None) -> dict[str, dict[str, Any]]:
        """The newest entry per node id, of one workflow where it is named."""
        with self._lock:
            return {
                entry["node_id"]: entry
                for (workflow, _), entry in self._entries.items()
                if workflow_id is None or workflow == workflow_id
            }

    def get(self, node_id: str, workflow_id: str | None = None) -> dict[str, Any] | None:
        """A node's newest entry, of one workflow where it is named; None where there is none."""
        return self.all(workflow_id).get(node_id)


STORE = ReportStore()
