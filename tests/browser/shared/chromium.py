"""Finds Chromium, or installs it where that is possible, or says in one line how."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
APT_GET = (
    ("update", "--quiet"),
    ("-o", "DPkg::Lock::Timeout=300", "install", "--yes", "--no-install-recommends", "chromium"),
)
"""A fresh machine has no list of packages, and several workers of pytest may want to install at a time."""
CHECKS = Path(__file__).parents[2] / "console"
"""Where the packages that check the console are installed."""


@lru_cache(maxsize=1)
def find_chromium() -> str:
    """Return the path of Chromium; as root on Debian and Ubuntu, it is installed first. Empty if there is none."""
    found = _find_installed()
    if not found and os.geteuid() == 0 and shutil.which("apt-get"):
        for arguments in APT_GET:
            subprocess.run(["apt-get", *arguments], capture_output=True, check=False)
        found = _find_installed()
    return found


def _find_installed() -> str:
    return next((path for name in NAMES if (path := shutil.which(name))), "")


@lru_cache(maxsize=1)
def find_axe() -> str:
    """Return the source of axe-core, which is fetched from the package registry once. Empty if it cannot be had."""
    path = CHECKS / "node_modules" / "axe-core" / "axe.min.js"
    with _alone(CHECKS):  # another worker of pytest may be fetching it
        if not path.exists() and shutil.which("npm"):
            fetch = ["npm", "ci", "--no-audit", "--no-fund", "--silent"]
            subprocess.run(fetch, cwd=CHECKS, capture_output=True, check=False)
        return path.read_text(encoding="utf-8") if path.exists() else ""


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time do something in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
