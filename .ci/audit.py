"""Compares the pinned versions of `constraints.txt` with the index of known vulnerabilities, by `pip-audit`.

It fails only if a pinned version has a known vulnerability. Without a network, or with an index that has no data about
vulnerabilities, as many mirrors, it says that nothing was compared. A release that is known to be vulnerable is asked
for, too: only an index that knows it can be believed about the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

TOOL = "pip-audit==2.10.1"
CANARY = "django==2.0"
"""Vulnerable, and not among the pinned versions."""
ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
PYTHON = BUILD / "audit" / "bin" / "python"


def main() -> int:
    """Return 1 if a pinned version has a known vulnerability, else 0."""
    BUILD.mkdir(exist_ok=True)
    if not _install():
        print("audit: skipped: pip-audit cannot be installed, the package index is not reachable")
        return 0
    report = _ask()
    if report is None:
        print("audit: skipped: the index of vulnerabilities is not reachable")
        return 0
    found = judge(report)
    if found is None:
        print(f"audit: skipped: the index knows no vulnerability of {CANARY}, so it has no data about them")
        return 0
    print("\n".join(found) or "audit: the pinned versions have no known vulnerability")
    if found:
        print("error: raise these versions in pyproject.toml, and run `make lock`", file=sys.stderr)
    return 1 if found else 0


def judge(report: str) -> list[str] | None:
    """Return a line for each vulnerability in a report of pip-audit; None if the index has no data."""
    by_name = {one["name"].lower(): one for one in json.loads(report)["dependencies"]}
    canary = by_name.pop(CANARY.partition("==")[0], {})
    if not canary.get("vulns"):
        return None
    return [
        f"{name}=={one['version']}: {flaw['id']}, fixed in {', '.join(flaw['fix_versions']) or 'no version'}"
        for name, one in sorted(by_name.items())
        for flaw in one.get("vulns", ())
    ]


def _install() -> bool:
    if not PYTHON.exists():
        venv.create(PYTHON.parents[1], with_pip=True)
    return _run("-m", "pip", "install", "--quiet", "--retries", "1", TOOL).returncode == 0


def _ask() -> str | None:
    wanted = BUILD / "audit.txt"
    wanted.write_text(f"{(ROOT / 'constraints.txt').read_text()}\n{CANARY}\n")
    # It exits with 1 both if it finds something and if it fails: only a report tells them apart.
    asked = _run("-m", "pip_audit", "-r", str(wanted), "--no-deps", "--disable-pip", "--timeout", "10", "-f", "json")
    return asked.stdout or None


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(PYTHON), *arguments], capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
