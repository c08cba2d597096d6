"""One PySyncObj replica in its own process: the peer that Quiver is compared with.

    python pysyncobj_peer.py DIRECTORY OWN_PORT OTHER_PORT OTHER_PORT

It uses its journal and default batching, as its users run it, and prints its answers as JSON lines, like replica.py.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pysyncobj import SyncObj, SyncObjConf, replicated

from peer_clients import sent_at
from peer_load import age_s, is_stamped, quantiles_ms, stamp


class Store(SyncObj):  # type: ignore[misc]  # the package has no types
    """A replicated object that sums values."""

    def __init__(self, own: str, others: list[str], journal: str) -> None:
        super().__init__(own, others, SyncObjConf(journalFile=journal))
        self.size_bytes = 0
        self.ages_s: list[float] | None = None

    @replicated  # type: ignore[untyped-decorator]  # the package has no types
    def add(self, value: bytes) -> None:
        self.size_bytes += len(value)
        if self.ages_s is not None and is_stamped(value):  # a node may still apply what came before
            self.ages_s.append(age_s(value))


def load(store: Store, *, entries: int, in_flight: int, value_bytes: int) -> dict[str, Any]:
    """Write `entries` values, `in_flight` at a time; return the time it took."""
    done = threading.Event()
    counts = {"sent": 0, "answered": 0}
    value = os.urandom(value_bytes)

    def send() -> None:
        counts["sent"] += 1
        store.add(value, callback=answered)

    def answered(_: object, __: object) -> None:
        counts["answered"] += 1
        if counts["sent"] < entries:
            send()
        elif counts["answered"] >= entries:
            done.set()

    start = time.perf_counter()
    for _ in range(in_flight):
        send()
    done.wait(120)
    return {"seconds": time.perf_counter() - start, "entries": counts["answered"]}


def single(store: Store, *, entries: int, value_bytes: int) -> dict[str, Any]:
    """Write one value after the other, each awaited."""
    latencies = []
    value = os.urandom(value_bytes)
    for _ in range(entries):
        start = time.perf_counter()
        store.add(value, sync=True, timeout=10)
        latencies.append(time.perf_counter() - start)
    latencies_ms = quantiles_ms(latencies)
    return {"p50_s": latencies_ms["p50"] / 1000, "p99_s": latencies_ms["p99"] / 1000}


def pace(store: Store, *, entries: int, per_s: int) -> dict[str, Any]:
    """Write stamped values at a steady rate, none of them awaited."""
    begun = time.perf_counter()
    for number in range(entries):
        due = begun + number / per_s
        time.sleep(max(0.0, due - time.perf_counter()))
        store.add(stamp(sent_at(due)), callback=lambda _, __: None)
    return {"seconds": time.perf_counter() - begun}


def watch(store: Store) -> dict[str, Any]:
    """Take the age of every value from now on, when it is applied here."""
    store.ages_s = []
    return {}


def ages(store: Store, *, entries: int) -> dict[str, Any]:
    """Wait until so many values were applied since `watch`; only the second half is counted."""
    end = time.monotonic() + 60
    while len(store.ages_s or ()) < entries and time.monotonic() < end:
        time.sleep(0.05)
    found, store.ages_s = store.ages_s or [], None
    if len(found) < entries:
        raise TimeoutError(f"{len(found)} of {entries} values were applied")
    return quantiles_ms(found[entries // 2 :])


def main(directory: str, own: str, *others: str) -> None:
    Path(directory).mkdir(parents=True, exist_ok=True)
    store = Store(f"127.0.0.1:{own}", [f"127.0.0.1:{port}" for port in others], str(Path(directory) / "journal"))
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "status": lambda: {"leads": int(store._isLeader()), "ready": store.isReady()},
        "load": lambda **arguments: load(store, **arguments),
        "single": lambda **arguments: single(store, **arguments),
        "pace": lambda **arguments: pace(store, **arguments),
        "watch": lambda: watch(store),
        "ages": lambda **arguments: ages(store, **arguments),
    }
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(commands[request.pop("command")](**request)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
