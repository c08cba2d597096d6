"""Namespaces of the kernel: a network and file systems of one's own, gone when the last process in them ends.

Root enters them directly; anybody else through a user namespace in which they may mount and configure. Nothing outside
is touched, so that nothing has to be cleaned up, however a run ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

_INSIDE = "CHAOS_INSIDE"


def is_inside() -> bool:
    """Tell whether this process runs in namespaces of its own."""
    return bool(os.environ.get(_INSIDE))


def run_inside(program: str, arguments: Sequence[str]) -> int:
    """Run a Python program in namespaces of its own and return its exit code."""
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    command = ["unshare", "--mount", "--net", *user, sys.executable, program, *arguments]
    return subprocess.call(command, env={**os.environ, _INSIDE: "1"})


def run_ip(*arguments: str) -> None:
    """Run `ip`, which must succeed."""
    done = subprocess.run(["ip", *arguments], capture_output=True, check=False, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr}")
