"""What the `server` fixtures of tests/comfy and tests/web share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from comfy_server import ComfyServer, ComfyUIError


def serve(running: ComfyServer) -> Iterator[ComfyServer]:
    """Start it, yield it, stop it. One that does not start is a sentence and the end of its log, no traceback."""
    try:
        running.start()
    except ComfyUIError as error:
        pytest.fail(str(error), pytrace=False)
    with running:
        yield running
