"""Namespaces of the kernel: a network and file systems of one's own, gone when the last process in them ends.

Root enters them directly; anybody else through a user namespace in which they may mount and configure. Nothing outside
is touched, so that nothing has to be cleaned up, however a run ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

_INSIDE = "CHAOS_INSIDE"


def is_inside() -> bool:
    """Tell whether this process runs in namespaces of its own."""
    return bool(os.environ.get(_INSIDE))


def run_inside(program: str, arguments: Sequence[str], *, is_alone: bool = False) -> int:
    """Run a Python program in namespaces of its own and return its exit code.

    With `is_alone`, it has its processes for itself, too: those that it leaves end with it.
    """
    command = [*_unshare(is_alone=is_alone), sys.executable, program, *arguments]
    return subprocess.call(command, env={**os.environ, _INSIDE: "1"})


def find_obstacle() -> str:
    """Return why this user cannot have hosts of their own with files of their own; empty if they can."""
    layers = "lowerdir=/etc,upperdir=$0/upper,workdir=$0/work"
    files = f"mount -t tmpfs tmpfs $0 && mkdir $0/upper $0/work && mount -t overlay overlay -o {layers} /etc"
    attempt = f"{files} && ip link add name bridge0 type bridge"
    with tempfile.TemporaryDirectory() as directory:
        command = [*_unshare(is_alone=True), "sh", "-c", attempt, directory]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return str(error)
    return done.stderr.strip() if done.returncode else ""


def _unshare(*, is_alone: bool) -> list[str]:
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    alone = ("--pid", "--fork", "--kill-child", "--mount-proc") if is_alone else ()
    return ["unshare", "--mount", "--net", *alone, *user]


def run_ip(*arguments: str) -> None:
    """Run `ip`, which must succeed."""
    done = subprocess.run(["ip", *arguments], capture_output=True, check=False, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr}")
