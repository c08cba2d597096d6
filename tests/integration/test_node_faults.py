"""A real node that an error ends: exit code 70 and a sentence, never silence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = {
    "callback": "loop.call_soon(fail)",
    "task": "self._tasks_of_the_test = loop.create_task(fail_later())\n    await asyncio.sleep(0)",
}
PROGRAM = """
import asyncio, sys
from quiver.cli import main
from quiver.node import Node

def fail():
    raise KeyError("the defect of this test")

async def fail_later():
    fail()

async def become_ready(self):
    loop = asyncio.get_running_loop()
    %s
    self._tasks_of_the_test = None

Node._become_ready = become_ready
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", FAULTS)
def test_error_that_escapes_the_nodes_own_code_ends_it_with_70_and_a_sentence(tmp_path: Path, kind: str) -> None:
    arguments = [
        "node",
        "--id",
        "1",
        "--data",
        str(tmp_path / "node"),
        "--wire",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
    ]
    command = [sys.executable, "-c", PROGRAM % FAULTS[kind], *arguments, "--join", "1@127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 70, done.stderr
    assert "error defect: KeyError: 'the defect of this test'" in done.stderr
    assert "error escaped, node stops" in done.stderr
