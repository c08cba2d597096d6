"""Every setting of a node, declared once, with its default, its bounds and its description.

Flags, environment variables and `docs/operations/configuration.md` are generated from this tree. A description says
what the setting controls, its unit, and when to change it at what cost.
"""

from __future__ import annotations

from ipaddress import AddressValueError, IPv6Address
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quiver.addresses import parse_address
from quiver.config.managers import ManagerSettings, MetadataSettings
from quiver.config.network import KIB, MIB, GatewaySettings, TlsSettings, WireSettings
from quiver.config.oidc import OidcSettings
from quiver.config.quotas import QuotaSettings
from quiver.config.security import AuditSettings, SecuritySettings
from quiver.config.storage import EncryptionSettings, ExecutorSettings, LogSettings
from quiver.errors import ConfigError, RequestError

ROLES = ("manager", "broker", "gateway")
"""The roles that a node can have."""


class NodeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Identity, roles and addresses of a node."""

    id: Annotated[
        int,
        Meta(
            ge=0,
            le=2**31,
            description="Number of this node in the cluster, from 1; 0 means not set. Never reuse the number of a "
            "node whose disk was lost.",
        ),
    ] = 0
    cluster: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=64,
            description="Id of the cluster, the same on every node; a node rejects connections from nodes of another "
            "cluster.",
        ),
    ] = "quiver"
    roles: Annotated[
        str,
        Meta(
            description="Roles of the node, comma-separated: any of manager, broker, gateway. Separate them to scale "
            "each on its own machines."
        ),
    ] = "manager,broker,gateway"
    data: Annotated[
        str, Meta(min_length=1, description="Directory of all files of the node. One process uses it at a time.")
    ] = "quiver-data"
    wire: Annotated[str, Meta(description="Address on which nodes and SDK clients connect, as host:port.")] = (
        "127.0.0.1:9002"
    )
    http: Annotated[str, Meta(description="Address on which HTTP clients connect, as host:port.")] = "127.0.0.1:8002"
    advertise: Annotated[
        str,
        Meta(
            description="Host name that the node publishes for both addresses; empty publishes the listen addresses. "
            "Set it when the node listens on 0.0.0.0 or is reached through NAT."
        ),
    ] = ""
    join: Annotated[
        str,
        Meta(
            description="Managers that form the cluster, as comma-separated id@host:port; empty for a cluster whose "
            "only manager is this node. A node that is not in the list finds the cluster by it; one of them must be "
            "reachable when it first starts. Later starts find the managers from the metadata."
        ),
    ] = ""
    rack: Annotated[
        str,
        Meta(
            max_length=300,
            description="Failure domain of the node (rack or zone); the replicas of a partition are spread over racks. "
            "Empty: the host that the node publishes, so that the nodes of one host count as one rack.",
        ),
    ] = ""
    metadata_db: Annotated[
        str,
        Meta(
            description="URL of the metadata database (postgresql+psycopg://…); empty for SQLite in the data directory."
        ),
    ] = ""
    loop_lag_alarm_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=60_000,
            description="Time after which an event loop that stands still is logged with its stack, at most every 10 "
            "seconds; 0 turns the alarm off. Lower it to find what delays answers, at the cost of more log lines.",
        ),
    ] = 500

    def __post_init__(self) -> None:
        unknown = sorted(self.role_names - set(ROLES))
        if unknown or not self.role_names:
            raise ConfigError(
                f"node.roles is {self.roles!r}; it must be one or more of {', '.join(ROLES)}, comma-separated"
            )
        for key, address in (("wire", self.wire), ("http", self.http)):
            _check_address(address, key=f"node.{key}")
        if self.advertise:
            _check_host(self.advertise, key="node.advertise")
        managers = self.managers
        if self.id and self.id in managers and "manager" not in self.role_names:
            reason = f"lists node {self.id}" if self.join else "is empty, which makes this node the only manager"
            raise ConfigError(f"node.join {reason}, but node.roles does not include manager")

    @property
    def role_names(self) -> frozenset[str]:
        """Return the roles one by one."""
        return frozenset(role.strip() for role in self.roles.split(",") if role.strip())

    @property
    def managers(self) -> dict[int, str]:
        """Return the managers' addresses by node id."""
        if not self.join:
            return {self.id: self.wire}
        found: dict[int, str] = {}
        for item in self.join.split(","):
            number, _, address = item.strip().partition("@")
            _check_address(address, key="node.join")
            if not number.isdigit() or not 0 < int(number) <= 2**31 or int(number) in found:
                raise ConfigError(f"node.join: {item.strip()!r} must be id@host:port, with a unique id from 1")
            found[int(number)] = address
        return found


def _check_host(host: str, *, key: str) -> None:
    """Refuse a host that other nodes could not dial: they would all get it from the metadata."""
    try:
        is_valid = bool(IPv6Address(host)) if ":" in host else parse_address(f"{host}:1")[0] == host
    except (AddressValueError, RequestError):
        is_valid = False
    if not is_valid:
        raise ConfigError(f"{key} is {host!r}; it must be a host name or an IP address, without port and brackets")


def _check_address(address: str, *, key: str) -> None:
    try:
        parse_address(address)
    except RequestError as error:
        raise ConfigError(f"{key}: {error}") from None


class PartitionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Checkpoints, summaries and retention of partition replicas."""

    checkpoint_bytes: Annotated[
        int,
        Meta(
            ge=KIB,
            description="Bytes of records between two checkpoints of a replica's state; lower it to replay less at a "
            "restart, at the cost of more writes.",
        ),
    ] = 16 * MIB
    summary_bytes: Annotated[
        int,
        Meta(
            ge=KIB,
            description="Bytes of records between two state summaries in the log. Retention can remove records only "
            "up to a summary: lower it for finer retention, at the cost of more writes.",
        ),
    ] = 64 * MIB
    summary_entries: Annotated[
        int,
        Meta(
            ge=10,
            description="Entries of any kind after which a summary is written, whatever their size; bounds the replay "
            "of partitions with tiny records.",
        ),
    ] = 100_000
    retention_interval_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=24 * 3_600_000,
            description="Milliseconds between two retention runs of a partition; lower it to free disk space sooner, "
            "at the cost of idle CPU.",
        ),
    ] = 30_000
    dedup_window_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=24 * 3_600_000,
            description="Milliseconds during which a retry of a registered producer is always recognised. If a "
            "partition nearly runs out of room for producers, it drops the state of those that were idle for longer.",
        ),
    ] = 900_000


class ReplicationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Elections, replication and hibernation of Raft groups."""

    election_timeout_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=600_000,
            description="Milliseconds without a message of the leader after which a member starts an election; each "
            "member waits a random time between this and twice this. Raise it on slow or distant "
            "networks; failover takes longer then.",
        ),
    ] = 400
    heartbeat_interval_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=60_000,
            description="Milliseconds between two heartbeats of a leader; keep it well below election_timeout_ms.",
        ),
    ] = 100
    append_bytes_max: Annotated[
        int,
        Meta(
            ge=KIB,
            le=32 * MIB,
            description="Bytes of batches in one append message to a follower; raise it for throughput on links with "
            "high latency.",
        ),
    ] = MIB
    inflight_bytes_max: Annotated[
        int,
        Meta(
            ge=KIB,
            le=1024 * MIB,
            description="Bytes in flight to one follower: sent, but not acknowledged. Raise it for throughput on "
            "links with high latency, at the cost of memory.",
        ),
    ] = 16 * MIB
    inflight_messages_max: Annotated[
        int,
        Meta(ge=1, le=100_000, description="Append messages in flight to one follower: sent, but not acknowledged."),
    ] = 64
    catch_up_bytes_per_second: Annotated[
        int,
        Meta(
            ge=KIB,
            le=2**40,
            description="Rate limit, in bytes per second, of all traffic of a node to replicas that are being added; "
            "lower it if moves slow down clients, raise it to repair faster.",
        ),
    ] = 128 * MIB
    uncommitted_bytes_max: Annotated[
        int,
        Meta(
            ge=KIB,
            le=4096 * MIB,
            description="Proposed but uncommitted bytes of one group; proposals beyond it are rejected. Raise it to "
            "absorb bursts while followers are slow, at the cost of memory.",
        ),
    ] = 64 * MIB
    hibernation: Annotated[
        bool,
        Meta(
            description="Whether idle groups stop their timers and rely on the heartbeats between nodes; saves CPU "
            "with many partitions. Disable it only to diagnose elections."
        ),
    ] = True


class BrokerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Replicas and requests on brokers."""

    openings_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000,
            description="Replicas that are opened or closed concurrently; raise it for faster starts on fast disks.",
        ),
    ] = 64
    report_delay_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000,
            description="Milliseconds to collect leadership changes before they are reported to the primary in one "
            "message.",
        ),
    ] = 20
    long_polls_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Fetch requests that wait for records at once; further ones are answered immediately, without "
            "records. Raise it for more idle consumers, at the cost of memory.",
        ),
    ] = 10_000
    leader_balance_delay_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=24 * 3_600_000,
            description="Milliseconds after which leadership is transferred back to the preferred replica; raise it "
            "if nodes restart often.",
        ),
    ] = 10_000
    metric_topics_max: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000,
            description="Topics that have a label of their own in metrics; the traffic of further ones is summed as "
            "`other`. Raise it for more detail, at the cost of the monitoring system's memory.",
        ),
    ] = 100
    leader_transfers_max: Annotated[
        int, Meta(ge=1, le=10_000, description="Leadership transfers to preferred replicas in progress at once.")
    ] = 4
    stop_timeout_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=600_000,
            description="Milliseconds for a stopping node to transfer leadership to other nodes; raise it for nodes "
            "with many partitions.",
        ),
    ] = 5_000


class LoggingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Logging to standard error."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Lowest severity that is logged; `debug` to diagnose a problem, at the cost of log volume."),
    ] = "info"
    format: Annotated[
        Literal["text", "json"],
        Meta(description="Format of log lines on standard error: `text` for people, `json` for log collectors."),
    ] = "text"


class TracingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Traces by OpenTelemetry."""

    is_enabled: Annotated[
        bool,
        Meta(
            description="Whether this node makes spans of HTTP produce calls and of appends; needs "
            "`pip install 'quivermq[otel]'`. Off costs nothing; docs/operations/tracing.md has what on costs."
        ),
    ] = False
    endpoint: Annotated[
        str,
        Meta(
            description="URL of a collector that takes OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`; "
            "empty leaves it to the variable OTEL_EXPORTER_OTLP_ENDPOINT."
        ),
    ] = ""
    samples_per_million: Annotated[
        int,
        Meta(
            ge=0,
            le=1_000_000,
            description="Of a million calls that begin a trace, how many are sampled. Calls and records that "
            "continue a trace of their sender follow its decision.",
        ),
    ] = 10_000


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting of a node, by section."""

    node: NodeSettings = NodeSettings()
    log: LogSettings = LogSettings()
    encryption: EncryptionSettings = EncryptionSettings()
    executor: ExecutorSettings = ExecutorSettings()
    partition: PartitionSettings = PartitionSettings()
    replication: ReplicationSettings = ReplicationSettings()
    wire: WireSettings = WireSettings()
    tls: TlsSettings = TlsSettings()
    security: SecuritySettings = SecuritySettings()
    oidc: OidcSettings = OidcSettings()
    audit: AuditSettings = AuditSettings()
    metadata: MetadataSettings = MetadataSettings()
    manager: ManagerSettings = ManagerSettings()
    broker: BrokerSettings = BrokerSettings()
    gateway: GatewaySettings = GatewaySettings()
    quotas: QuotaSettings = QuotaSettings()
    logging: LoggingSettings = LoggingSettings()
    tracing: TracingSettings = TracingSettings()
