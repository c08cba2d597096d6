"""Run the users' own system test for longer: more lines, and more rounds of kills.

    python tests/chaos/run_system.py --rounds 5

Five producers, three consumers and three topics for each of plain HTTP, the HTTP-only library and the SDK, all at the
same time, on three nodes. Exit code 1 if anything was lost, doubled, reordered or refused; what the nodes said then
stays in the directory.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
import traceback
from pathlib import Path
from tempfile import mkdtemp

from chaos_cluster import running_cluster
from system_scenarios import five_producers_three_consumers
from system_ways import WAYS

LINES_PER_ROUND = 120


def main() -> int:
    parser = argparse.ArgumentParser(description="System test with real processes, over all ways of using a cluster.")
    parser.add_argument("--rounds", type=int, default=5, help="how often a broker, the primary, and all are killed")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    directory = Path(mkdtemp(prefix="quiver-system-"))
    began = time.monotonic()
    try:
        with running_cluster(directory) as cluster:
            heard = five_producers_three_consumers(
                cluster,
                WAYS,
                directory,
                lines=LINES_PER_ROUND * arguments.rounds,
                rounds=arguments.rounds,
                seed=arguments.seed,
            )
            cluster.stop()
    except Exception:  # noqa: BLE001 - the edge of a program: whatever it is, it is the finding
        traceback.print_exc()
        print(f"FAILED; what the nodes said is in {directory}")
        return 1
    shutil.rmtree(directory)
    kills = 5 * arguments.rounds
    print(f"ok: {heard} lines heard in order, {kills} kills, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
