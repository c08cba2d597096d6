"""Waiting for what real processes do in their own time; the limit is only there so that a test ends."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 120


def wait_until(condition: Callable[[], object]) -> None:
    """Return once a condition holds; fail if it never does."""
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.05)
