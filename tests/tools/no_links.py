"""A pytest hook: on Windows without the right to make links, a test that makes one is skipped, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

PRIVILEGE_NOT_HELD = 1314


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Turn Windows' refusal into a skip."""
    outcome = yield
    error = outcome.excinfo[1] if outcome.excinfo else None  # type: ignore[attr-defined]
    if isinstance(error, OSError) and getattr(error, "winerror", None) == PRIVILEGE_NOT_HELD:
        outcome.force_exception(  # type: ignore[attr-defined]
            pytest.skip.Exception("Windows lets only administrators and developer mode make links")
        )
