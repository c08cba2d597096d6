"""Throw thousands of made-up HTTP requests at a live node and hold its answers to its own OpenAPI document.

    python tests/fuzz/live/http_contract.py [--cases 5000] [--seed N]

A finding is an answer that the document does not allow (status, type, schema), a valid request that is refused as
invalid, no answer in time, any 500, or a node that has ended. The node is real: its own process, its own disk in a
temporary directory. What takes the only broker away comes last, alone.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

OPERATIONS = 16
"""How many operations take parameters, and so get many cases each."""
CHECKS = (
    "status_code_conformance,content_type_conformance,response_schema_conformance,unsupported_method,"
    "positive_data_acceptance"
)
HOOKS = Path(__file__).with_name("http_hooks.py")
"""What OpenAPI cannot say about parameters that depend on each other or on the running program."""
DANGEROUS = ("drain_broker", "remove_broker")
LEFT_OUT = {
    "console_events": "a stream that never ends; tests/browser",
    "console_file": "files, whose types depend on their names; tests/security/test_console_files.py",
}
"""Operations that are not called, why, and what tests them."""
START_TIMEOUT_S = 60
REQUEST_TIMEOUT_S = 30
"""More than any request may take: beyond it the node hangs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000, help="how many requests at least (default: 5000)")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", nargs="+", metavar="OPERATION", help="only these, such as receive_jobs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quiver-fuzz-") as directory, running_node(Path(directory)) as address:
        prepare(address)
        if options.only:
            chosen = [flag for name in options.only for flag in ("--include-operation-id", name)]
            chosen += ["--phases", "examples,coverage,fuzzing"]  # a few operations have no links to others
            return fuzz(address, chosen, cases_each=max(1, options.cases // len(options.only)), seed=options.seed)
        calm = [flag for name in (*DANGEROUS, *LEFT_OUT) for flag in ("--exclude-operation-id", name)]
        rough = [flag for name in DANGEROUS for flag in ("--include-operation-id", name)]
        statuses = [fuzz(address, calm, cases_each=max(1, options.cases // OPERATIONS), seed=options.seed)]
        while not any(statuses) and (left := options.cases - count_answers(address)) > 0:
            more = [*calm, "--phases", "fuzzing"]
            statuses.append(fuzz(address, more, cases_each=left // OPERATIONS + 1, seed=None))
        statuses.append(fuzz(address, [*rough, "--phases", "coverage,fuzzing"], cases_each=20, seed=options.seed))
        answers, bugs = count_answers(address), count_answers(address, status="500")
    sys.stdout.write(f"answers: {answers}, with status 500: {bugs}\n")
    return 1 if any(statuses) or bugs else 0


@contextmanager
def running_node(directory: Path) -> Iterator[str]:
    """Run a node until it is no longer needed; it must still run then, and end well."""
    command = [sys.executable, "-m", "quiver", "node", "--id", "1", "--data", str(directory / "data")]
    command += ["--wire", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    with (directory / "node.log").open("wb") as log:
        node = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield wait_ready(node)
            assert node.poll() is None, f"the node has ended: {(directory / 'node.log').read_text()[-2000:]}"
        finally:
            node.send_signal(signal.SIGTERM)
            assert node.wait(timeout=60) == 0, (directory / "node.log").read_text()[-2000:]


def wait_ready(node: subprocess.Popen[str]) -> str:
    """Return the HTTP address that the node prints when it is ready."""
    assert node.stdout is not None
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        line = node.stdout.readline()
        if found := re.search(r"^ready .*http=(\S+)", line):
            return found[1]
        assert line, "the node ended before it was ready"
    raise TimeoutError("the node was not ready in time")


def prepare(address: str) -> None:
    """Make something to be found: without it most made-up requests end with 404."""
    for topic in ("logs", "0"):
        ask(address, "POST", "/topics", {"topic_name": topic})
        for _ in range(3):
            producer = ask(address, "POST", "/producer/register", {"topic": topic})
            ask(address, "POST", "/consumer/register", {"topic": topic})
        batch = {"topic": topic, "producer_id": producer["producer_id"], "messages": ["a job"] * 20}
        ask(address, "POST", "/producer/produce_batch", batch)
        ask(address, "POST", "/queue/receive", {"topic": topic, "group": "workers"})


def fuzz(address: str, operations: Sequence[str], *, cases_each: int, seed: int | None) -> int:
    """Run schemathesis; return its exit status."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://{address}/openapi.json", *operations]
    command += ["--checks", CHECKS, "--max-examples", str(cases_each), "--request-timeout", str(REQUEST_TIMEOUT_S)]
    command += ["--suppress-health-check", "all", "--warnings", "off", "--no-color"]
    command += [] if seed is None else ["--seed", str(seed)]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS)}
    return subprocess.run(command, check=False, env=environment).returncode


def count_answers(address: str, *, status: str = r"\d+") -> int:
    """Return how many requests were answered, all or with a status, by the node's own count."""
    connection = http.client.HTTPConnection(address, timeout=REQUEST_TIMEOUT_S)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    counts = re.findall(rf'^quiver_http_requests_total\{{.*status="{status}"\}} (\d+)$', page, re.M)
    return sum(map(int, counts))


def ask(address: str, method: str, path: str, parameters: dict[str, object]) -> dict[str, object]:
    """Return the answer of a call that must succeed."""
    connection = http.client.HTTPConnection(address, timeout=REQUEST_TIMEOUT_S)
    connection.request(method, path, body=json.dumps(parameters))
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    assert response.status < 300, f"{method} {path}: {response.status} {answer!r}"
    found: dict[str, object] = json.loads(answer) if answer else {}
    return found


if __name__ == "__main__":
    sys.exit(main())
