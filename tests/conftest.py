"""Settings and the closing report that all tests share."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

# No test may depend on how fast the machine is: a busy one would make it fail.
settings.register_profile("quiver", deadline=None)
settings.load_profile("quiver")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A run in the background ignores Ctrl-C, and every process that a test starts would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were skipped, and why: a missing program must not go unnoticed."""
    skipped = terminalreporter.stats.get("skipped", [])
    terminalreporter.write_line(f"skipped: {len(skipped) or 'none'}")
    for report in skipped:
        terminalreporter.write_line(f"  {report.nodeid}: {report.longrepr[2]}")
