"""A real Kafka broker and Spark's own source for it, for comparison: fetched by Maven, run on loopback, then removed.

Only for `bench_spark.py --kafka`: Quiver itself needs none of this. There is no connector for Spark 4.3 yet; the newest
published connector and token provider run on it.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from processes import wait_until
from replicas import free_ports

KAFKA = "3.9.1"
BROKER = (f"org.apache.kafka:kafka_2.13:{KAFKA}", f"org.apache.kafka:kafka-tools:{KAFKA}")
CONNECTOR = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    f"org.apache.kafka:kafka-clients:{KAFKA}",
    "org.apache.commons:commons-pool2:2.12.0",
)
_ALONE = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"


def fetch_connector(directory: Path) -> str:
    """Return the connector's jars in the format of Spark's setting `spark.jars`."""
    jars = _fetch(directory / "connector", CONNECTOR, with_dependencies=False)
    return ",".join(map(str, sorted(jars.glob("*.jar"))))


def _fetch(directory: Path, artifacts: Sequence[str], *, with_dependencies: bool) -> Path:
    """Download artifacts and their dependencies with Maven into a directory."""
    directory.mkdir(parents=True)
    wanted = ""
    for artifact in artifacts:
        group, name, version = artifact.split(":")
        place = f"<groupId>{group}</groupId><artifactId>{name}</artifactId><version>{version}</version>"
        wanted += f"<dependency>{place}{'' if with_dependencies else _ALONE}</dependency>"
    project = (
        "<modelVersion>4.0.0</modelVersion><groupId>bench</groupId><artifactId>peer</artifactId><version>1</version>"
    )
    (directory / "pom.xml").write_text(f"<project>{project}<dependencies>{wanted}</dependencies></project>")
    command = ["mvn", "-q", "-f", str(directory / "pom.xml"), "dependency:copy-dependencies"]
    subprocess.run([*command, f"-DoutputDirectory={directory}"], check=True)
    return directory


class Kafka:
    """One broker that is also its own controller."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._jars = _fetch(directory / "broker", BROKER, with_dependencies=True)
        client, controller = free_ports(2)
        self.address = f"127.0.0.1:{client}"
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://127.0.0.1:{controller}",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "log.dirs": str(directory / "data"),
            "offsets.topic.replication.factor": "1",
        }
        self._settings = directory / "server.properties"
        self._settings.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))

    @contextmanager
    def running(self) -> Iterator[Kafka]:
        """Run the broker for the duration of the context."""
        cluster_id = self._run("kafka.tools.StorageTool", "random-uuid").strip().splitlines()[-1]
        self._run("kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(self._settings))
        with (self._directory / "broker.log").open("wb") as log:
            broker = subprocess.Popen(self._java("kafka.Kafka", str(self._settings)), stdout=log, stderr=log)
            try:
                wait_until(self._is_up, what="Kafka")
                yield self
            finally:
                broker.terminate()
                broker.wait()

    def fill(self, topic: str, *, partitions: int, records: int, size: int) -> None:
        """Create a topic with random values."""
        where = ("--bootstrap-server", self.address)
        self._run(
            "org.apache.kafka.tools.TopicCommand", *where, "--create", "--topic", topic, "--partitions", str(partitions)
        )
        load = ("--topic", topic, "--num-records", str(records), "--record-size", str(size), "--throughput", "-1")
        producer = ("--producer-props", f"bootstrap.servers={self.address}")
        self._run("org.apache.kafka.tools.ProducerPerformance", *load, *producer)

    def _is_up(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port))).close()
        except OSError:
            return False
        return True

    def _java(self, *arguments: str) -> list[str]:
        return ["java", "-Xmx1g", "-cp", f"{self._jars}/*", *arguments]

    def _run(self, *arguments: str) -> str:
        return subprocess.run(self._java(*arguments), check=True, capture_output=True, text=True).stdout
