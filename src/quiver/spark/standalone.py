"""A Spark cluster on this machine: one master and one worker on loopback, started from the pip package alone.

For tests, and for trying a job on a real cluster: executors are separate processes that share nothing with the driver.
`python -m quiver.spark.standalone` (`make spark-cluster`) runs it until Ctrl-C. Leaving the context stops both
processes and removes their work directory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pyspark

from quiver.errors import UnavailableError
from quiver.spark.session import cache_directory, find_java_home

HOST: Final = "127.0.0.1"
START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 20.0
_LOG_BYTES_SHOWN: Final = 2000


class StandaloneCluster:
    """A master and a worker. Use as ``with``; pass `master` to `quiver.spark.session`.

    Example:
        with StandaloneCluster(cores=2) as cluster:
            spark = quiver.spark.session(master=cluster.master)
    """

    def __init__(
        self, *, port: int = 0, cores: int = 2, memory: str = "2g", environment: Mapping[str, str] | None = None
    ) -> None:
        self._environment = dict(os.environ if environment is None else environment)
        self._cores, self._memory = cores, memory
        self._port, self._page_port = port or _free_port(), _free_port()
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def master(self) -> str:
        """Return the master URL for sessions."""
        return f"spark://{HOST}:{self._port}"

    def __enter__(self) -> Self:
        """Start both processes; return when the worker has registered with the master.

        Raises:
            ConfigError: no Java 17 or newer was found (`no_java`).
            UnavailableError: a process exited or did not start in time (`no_spark_cluster`).
        """
        try:
            folder = tempfile.mkdtemp(prefix="quiver-spark-")
            self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
            self._start("master.Master", "--port", str(self._port), "--webui-port", str(self._page_port))
            self._wait(lambda: self._workers() is not None)
            worker = ("--cores", str(self._cores), "--memory", self._memory, "--work-dir", folder, "--webui-port", "0")
            self._start("worker.Worker", *worker, self.master)
            self._wait(lambda: self._workers() == 1)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def wait(self) -> None:
        """Wait until the master or the worker exits."""
        while all(process.poll() is None for process in self._processes):
            time.sleep(0.5)

    def _start(self, name: str, *arguments: str) -> None:
        home = Path(pyspark.__file__).parent
        environment = self._environment | {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": HOST, "SPARK_NO_DAEMONIZE": "1"}
        environment["SPARK_MASTER_OPTS"] = "-Dspark.master.rest.enabled=false"
        java_home = find_java_home(self._environment, cache_directory(self._environment))
        if java_home is not None:
            environment["JAVA_HOME"] = java_home
        command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", "--host", HOST, *arguments]
        self._log = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        process = subprocess.Popen(  # noqa: S603 - Spark's own script
            command, env=environment, stdout=self._log, stderr=self._log, start_new_session=True
        )
        self._processes.append(process)
        self._stack.callback(_end, process)

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline_s or self._processes[-1].poll() is not None:
                self._log.seek(max(0, self._log.tell() - _LOG_BYTES_SHOWN))
                output = self._log.read().decode(errors="replace")
                raise UnavailableError(
                    f"the Spark cluster did not start; last output: {output}", code="no_spark_cluster"
                )
            time.sleep(0.1)

    def _workers(self) -> int | None:
        """Return the number of registered workers; None while the master does not answer."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self._page_port}/json/", timeout=5) as page:
                return int(json.load(page)["aliveworkers"])
        except OSError:
            return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    process.kill()
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Run a cluster until Ctrl-C or SIGTERM, on Spark's default port if it is free."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with StandaloneCluster(port=_usual_port(), cores=os.cpu_count() or 1) as cluster:
        sys.stdout.write(f"{cluster.master}\nCtrl-C ends it\n")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            cluster.wait()
    return 0


def _usual_port(port: int = 7077) -> int:
    with socket.socket() as probe:
        return 0 if probe.connect_ex((HOST, port)) == 0 else port


if __name__ == "__main__":
    sys.exit(main())
