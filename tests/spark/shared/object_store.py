"""A real S3 server as a process: moto's, one request at a time, so that each request is atomic, as in S3 itself.

It can lose responses: after `lose_responses(N)` the next N new Delta commits are stored, and answered with an error. A
client that retries such a commit then finds its own commit in its way.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "quiver-tests",
    "AWS_SECRET_ACCESS_KEY": "never-in-any-log",
    "AWS_REGION": "us-east-1",
}
_LOSE = "/lose-responses/"

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class ObjectStore:
    """Run the server; it has one bucket, `lakes`."""

    def __init__(self) -> None:
        command = [sys.executable, os.path.abspath(__file__)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        assert port, "moto's server did not start: is it installed? Run make setup"
        self.endpoint = f"http://127.0.0.1:{port}"
        self._put("/lakes")

    def lose_responses(self, count: int) -> None:
        """Store the next new commits, and answer each with an error."""
        self._put(f"{_LOSE}{count}")

    def close(self) -> None:
        """End the server; idempotent."""
        self._process.kill()
        self._process.communicate()

    def _put(self, path: str) -> None:
        request = urllib.request.Request(self.endpoint + path, method="PUT")
        with urllib.request.urlopen(request, timeout=30) as response:
            assert response.status == 200


def losing_responses(app: App) -> App:
    """Return an application that answers some commits with an error after it has stored them."""
    left = 0

    def answer(environment: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        nonlocal left
        path, is_new = environment["PATH_INFO"], environment.get("HTTP_IF_NONE_MATCH") == "*"
        if path.startswith(_LOSE):
            left = int(path.removeprefix(_LOSE))
            start_response("200 OK", [("Content-Length", "0")])
            return []
        if not left or not is_new or "/_delta_log/" not in path:
            return app(environment, start_response)
        left -= 1
        b"".join(app(environment, lambda *_: None))
        start_response("500 Internal Server Error", [("Content-Length", "0")])
        return []

    return answer


def serve() -> None:
    """Run the server in this process; print its port."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, losing_responses(DomainDispatcherApplication(create_backend_app)))
    print(server.server_port, flush=True)  # noqa: T201 - for the process that started it
    server.serve_forever()


if __name__ == "__main__":
    serve()
