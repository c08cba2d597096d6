"""Real Kafka brokers and Spark's own source for them, for comparison: fetched by Maven, run on loopback, then removed.

Only for `bench_spark.py --kafka` and `run_peers.py`: Quiver itself needs none of this. There is no connector for Spark
4.3 yet; the newest published connector and token provider run on it.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
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
NEWEST = ("org.apache.kafka:kafka_2.13:[4.0,)",)
"""The broker alone, in the newest version that is published; its jars tell which one that is."""
JAVA_OPTIONS = (
    *("-server", "-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"),
    *("-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent", "-Djava.awt.headless=true"),
)
"""As in Kafka's own start script."""
STARTING_TIMEOUT_S = 120
STOPPING_TIMEOUT_S = 30
FETCH_TIMEOUT_S = 900
_ALONE = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"


def fetch_connector(directory: Path) -> str:
    """Return the connector's jars in the format of Spark's setting `spark.jars`."""
    jars = fetch_jars(directory / "connector", CONNECTOR, with_dependencies=False)
    return ",".join(map(str, sorted(jars.glob("*.jar"))))


def fetch_jars(directory: Path, artifacts: Sequence[str], *, with_dependencies: bool = True) -> Path:
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
    subprocess.run([*command, f"-DoutputDirectory={directory}"], check=True, timeout=FETCH_TIMEOUT_S)
    return directory


def has_ended(processes: Sequence[subprocess.Popen[bytes]]) -> bool:
    return any(process.poll() is not None for process in processes)


class Kafka:
    """Brokers that are also their controllers: one, or several that replicate."""

    def __init__(
        self, directory: Path, *, jars: Path | None = None, nodes: int = 1, settings: Mapping[str, str] | None = None
    ) -> None:
        self._directory = directory
        self._jars = jars or fetch_jars(directory / "broker", BROKER)
        directory.mkdir(parents=True, exist_ok=True)
        ports = free_ports(2 * nodes)
        self.addresses = tuple(f"127.0.0.1:{port}" for port in ports[:nodes])
        self.address = ",".join(self.addresses)
        self.pids: tuple[int, ...] = ()
        controllers = [f"127.0.0.1:{port}" for port in ports[nodes:]]
        majority = str(nodes // 2 + 1)
        shared = {
            "process.roles": "broker,controller",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": ",".join(f"{at}@{place}" for at, place in enumerate(controllers, start=1)),
            "default.replication.factor": str(nodes),
            "min.insync.replicas": majority,
            "offsets.topic.replication.factor": str(nodes),
            "transaction.state.log.replication.factor": str(nodes),
            "transaction.state.log.min.isr": majority,
            "share.coordinator.state.topic.replication.factor": str(nodes),
            "share.coordinator.state.topic.min.isr": majority,
            **(settings or {}),
        }
        self._settings = []
        for at, (address, controller) in enumerate(zip(self.addresses, controllers, strict=True), start=1):
            own = {
                "node.id": str(at),
                "listeners": f"PLAINTEXT://{address},CONTROLLER://{controller}",
                "log.dirs": str(directory / f"data-{at}"),
            }
            path = directory / f"server-{at}.properties"
            path.write_text("".join(f"{name}={value}\n" for name, value in {**shared, **own}.items()))
            self._settings.append(path)

    @contextmanager
    def running(self) -> Iterator[Kafka]:
        """Run the brokers for the duration of the context."""
        cluster_id = self._run("kafka.tools.StorageTool", "random-uuid").strip().splitlines()[-1]
        for settings in self._settings:
            self._run("kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(settings))
        brokers: list[subprocess.Popen[bytes]] = []
        try:
            for settings in self._settings:
                with settings.with_suffix(".log").open("wb") as log:
                    command = self._java("kafka.Kafka", str(settings))
                    brokers.append(subprocess.Popen(command, stdout=log, stderr=log))
            self.pids = tuple(broker.pid for broker in brokers)
            wait_until(lambda: has_ended(brokers) or self._is_up(), what="Kafka", timeout_s=STARTING_TIMEOUT_S)
            if has_ended(brokers):
                raise RuntimeError(f"Kafka ended: {self._settings[0].with_suffix('.log').read_text()[-2000:]}")
            yield self
        finally:
            for broker in brokers:
                broker.terminate()
            for broker in brokers:
                try:
                    broker.wait(STOPPING_TIMEOUT_S)
                except subprocess.TimeoutExpired:  # the last ones wait for a majority of controllers
                    broker.kill()
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
        for address in self.addresses:
            host, _, port = address.rpartition(":")
            try:
                socket.create_connection((host, int(port))).close()
            except OSError:
                return False
        return True

    def _java(self, *arguments: str) -> list[str]:
        return ["java", *JAVA_OPTIONS, "-cp", f"{self._jars}/*", *arguments]

    def _run(self, *arguments: str) -> str:
        return subprocess.run(self._java(*arguments), check=True, capture_output=True, text=True).stdout
