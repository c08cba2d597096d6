"""Run benches and print their tables: `make bench`, or `make bench BENCH="record storage"`.

A bench is a file `bench_<name>.py` in this directory. It runs in its own process, so that no bench warms up or slows
down another. It prints its tables and exits with 0, or with `MISSED` if a target was not reached. Targets apply to the
machine that the documentation names: a miss is shown, and only a bench that crashes makes the run fail.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

from table import MISSED

HERE = Path(__file__).parent


def main(names: list[str]) -> int:
    """Run the named benches, by default all; return 1 if one is unknown or crashed."""
    known = {path.stem.removeprefix("bench_"): path for path in sorted(HERE.glob("bench_*.py"))}
    if unknown := set(names) - known.keys():
        print(f"error: no bench {', '.join(sorted(unknown))}; there are {', '.join(known)}", file=sys.stderr)
        return 1
    print(f"{platform.platform()}, {platform.machine()}, Python {platform.python_version()}", flush=True)
    runs = {name: subprocess.run([sys.executable, str(known[name])], check=False) for name in names or known}
    missed = [name for name, run in runs.items() if run.returncode == MISSED]
    crashed = [name for name, run in runs.items() if run.returncode not in (0, MISSED)]
    print(f"\n{'targets missed by: ' + ', '.join(missed) if missed else 'every target was reached'}")
    if crashed:
        print(f"crashed: {', '.join(crashed)}", file=sys.stderr)
    return 1 if crashed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
