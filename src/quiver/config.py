"""The one declaration of every setting, and how its value is found.

Each setting is declared once, here, with its default, its bounds and its sentence. A value comes
from the default, then the TOML file, then the environment (`QUIVER_LOG__SEGMENT_BYTES_MAX`), then a
flag (`--log-segment-bytes-max`); later wins. Flags and `docs/operations/configuration.md` are made
from this tree. An unknown key is an error: a misspelt setting must never be silently ignored.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from quiver.addresses import parse_address
from quiver.errors import ConfigError, RequestError

KIB = 1024
MIB = 1024 * KIB
ENVIRONMENT_PREFIX = "QUIVER_"

Durability = Literal["fsync", "interval", "none"]
ROLES = ("manager", "broker", "gateway")
"""What a node can do."""


class NodeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who a node is and where it is found."""

    id: Annotated[
        int, Meta(ge=0, le=2**31, description="The node's number in the cluster, from 1; 0 stands for none given.")
    ] = 0
    cluster: Annotated[
        str, Meta(min_length=1, max_length=64, description="The cluster's id; nodes of another one are refused.")
    ] = "quiver"
    roles: Annotated[
        str, Meta(description="What the node does, with commas between: any of manager, broker, gateway.")
    ] = "manager,broker,gateway"
    data: Annotated[str, Meta(min_length=1, description="The directory of all that the node keeps.")] = "quiver-data"
    wire: Annotated[str, Meta(description="Where nodes and the SDK reach it, as host:port.")] = "127.0.0.1:9002"
    http: Annotated[str, Meta(description="Where HTTP clients reach it, as host:port.")] = "127.0.0.1:8002"
    advertise: Annotated[
        str, Meta(description="The host that others are told for both addresses; empty for the ones listened on.")
    ] = ""
    join: Annotated[
        str,
        Meta(
            description="The cluster's managers, as id@host:port with commas between, the same on every node; "
            "empty for a cluster of this one manager."
        ),
    ] = ""
    rack: Annotated[str, Meta(max_length=300, description="Where the node stands; replicas are spread over racks.")] = (
        ""
    )
    metadata_db: Annotated[
        str,
        Meta(
            description="URL of the metadata's database (postgresql+psycopg://…); empty for SQLite in the data "
            "directory."
        ),
    ] = ""

    def __post_init__(self) -> None:
        unknown = sorted(self.role_names - set(ROLES))
        if unknown or not self.role_names:
            raise ConfigError(f"node.roles must name one or more of {', '.join(ROLES)}, not {self.roles!r}")
        for key, address in (("wire", self.wire), ("http", self.http)):
            _check_address(address, key=f"node.{key}")
        managers = self.managers
        if self.id and ("manager" in self.role_names) != (self.id in managers):
            raise ConfigError(f"node.join must name node {self.id} if it is a manager, and only then")

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
                raise ConfigError(f"node.join: {item.strip()!r} is not id@host:port with an id of its own, from 1")
            found[int(number)] = address
        return found


def _check_address(address: str, *, key: str) -> None:
    try:
        parse_address(address)
    except RequestError as error:
        raise ConfigError(f"{key}: {error}") from None


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one partition's log is kept on disk."""

    durability: Annotated[
        Durability,
        Meta(
            description="When a batch counts as durable: `fsync` after fdatasync, `interval` after the write with "
            "an fdatasync every flush_interval_ms, `none` after the write."
        ),
    ] = "fsync"
    flush_interval_ms: Annotated[
        int, Meta(ge=1, le=60_000, description="Time between fdatasyncs when durability is `interval`.")
    ] = 50
    segment_bytes_max: Annotated[
        int,
        Meta(
            ge=KIB,
            le=4096 * MIB,
            description="Size at which a segment is sealed and a new one begun; after a crash so much of each "
            "partition is read again at most.",
        ),
    ] = 16 * MIB
    segment_age_ms_max: Annotated[
        int, Meta(ge=100, description="Age at which a segment is sealed at the next append or trim.")
    ] = 7 * 24 * 3_600_000
    index_interval_bytes: Annotated[
        int, Meta(ge=64, le=16 * MIB, description="Distance between two entries of a segment's sparse index.")
    ] = 64 * KIB
    tail_cache_bytes_max: Annotated[
        int, Meta(ge=0, le=4096 * MIB, description="Bytes of a partition's newest batches kept in memory for readers.")
    ] = 16 * MIB
    tail_caches_bytes_max: Annotated[
        int, Meta(ge=0, description="The same for all partitions of a node; those written longest ago go first.")
    ] = 256 * MIB
    pending_bytes_max: Annotated[
        int, Meta(ge=KIB, le=4096 * MIB, description="Bytes appended but not yet written at which appends are refused.")
    ] = 64 * MIB
    free_bytes_min: Annotated[
        int, Meta(ge=0, description="Room left on the disk below which new records are refused (HTTP 507).")
    ] = 256 * MIB
    free_check_interval_ms: Annotated[
        int, Meta(ge=10, le=600_000, description="Time between two looks at the room that the disk has left.")
    ] = 2_000


class PartitionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How replicas of partitions keep their state and let old records go."""

    checkpoint_bytes: Annotated[
        int,
        Meta(
            ge=KIB, description="Bytes of records after which a replica saves its state, to replay less at its start."
        ),
    ] = 16 * MIB
    summary_bytes: Annotated[
        int,
        Meta(
            ge=KIB,
            description="Bytes of records between two summaries of the state in the log: the places it can be cut at.",
        ),
    ] = 64 * MIB
    summary_entries: Annotated[
        int, Meta(ge=10, description="Entries of any kind after which a summary is written, however small they are.")
    ] = 100_000
    retention_interval_ms: Annotated[
        int, Meta(ge=10, le=24 * 3_600_000, description="Time between two looks at which records may go.")
    ] = 30_000


class ReplicationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How Raft groups elect, replicate and rest."""

    election_timeout_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=600_000,
            description="Silence of a leader after which members look for another; each waits up to twice as long.",
        ),
    ] = 400
    heartbeat_interval_ms: Annotated[
        int, Meta(ge=1, le=60_000, description="Time between two heartbeats; well below election_timeout_ms.")
    ] = 100
    append_bytes_max: Annotated[
        int, Meta(ge=KIB, le=32 * MIB, description="Bytes of batches in one message to a follower.")
    ] = MIB
    inflight_bytes_max: Annotated[
        int, Meta(ge=KIB, le=1024 * MIB, description="Bytes sent to a follower but not acknowledged by it yet.")
    ] = 16 * MIB
    inflight_messages_max: Annotated[
        int, Meta(ge=1, le=100_000, description="Messages sent to a follower but not acknowledged by it yet.")
    ] = 64
    catch_up_bytes_per_second: Annotated[
        int, Meta(ge=KIB, le=2**40, description="Bytes a second that a node sends new replicas, all groups together.")
    ] = 128 * MIB
    uncommitted_bytes_max: Annotated[
        int, Meta(ge=KIB, le=4096 * MIB, description="Proposed but uncommitted bytes at which proposals are refused.")
    ] = 64 * MIB
    hibernation: Annotated[
        bool, Meta(description="Whether idle groups stop their timers and rely on the nodes' own heartbeats.")
    ] = True


class WireSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Connections between nodes, and from clients to nodes."""

    frame_bytes_max: Annotated[
        int,
        Meta(
            ge=64 * KIB,
            le=1024 * MIB,
            description="Greatest frame that is sent or received; must hold the largest batch (64 MiB) and what "
            "goes with it.",
        ),
    ] = 72 * MIB
    peer_buffer_bytes_max: Annotated[
        int,
        Meta(
            ge=64 * KIB,
            le=4096 * MIB,
            description="Bytes waiting to be sent to one node at which further messages to it are dropped; at "
            "least frame_bytes_max.",
        ),
    ] = 144 * MIB
    connections_max: Annotated[
        int, Meta(ge=1, le=100_000, description="Incoming connections with a finished handshake, at most.")
    ] = 1024
    handshakes_max: Annotated[
        int, Meta(ge=1, le=100_000, description="Incoming connections that have not said who they are yet, at most.")
    ] = 64
    handshake_timeout_ms: Annotated[
        int, Meta(ge=10, le=60_000, description="Time for both sides of a new connection to say who they are.")
    ] = 3_000
    connect_timeout_ms: Annotated[
        int, Meta(ge=10, le=60_000, description="Time for a connection to a node to be made.")
    ] = 2_000
    reconnect_delay_ms_min: Annotated[
        int, Meta(ge=1, le=60_000, description="Wait before the first new attempt to reach a node; then doubled.")
    ] = 50
    reconnect_delay_ms_max: Annotated[
        int, Meta(ge=1, le=60_000, description="Longest wait between two attempts to reach a node.")
    ] = 1_000
    unanswered_timeout_ms: Annotated[
        int,
        Meta(
            ge=100,
            le=600_000,
            description="Time without any sign of life from the other machine's TCP after which a connection is given "
            "up (Linux; elsewhere the system's own).",
        ),
    ] = 5_000
    client_connections_max: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Incoming connections of clients, at most.")
    ] = 4_096
    connection_requests_max: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="Requests of one connection under way: no more are sent, and beyond it nothing is read.",
        ),
    ] = 512
    connection_bytes_max: Annotated[
        int,
        Meta(
            ge=64 * KIB,
            le=4096 * MIB,
            description="Bytes of one connection's requests under way and unsent responses: no more are sent, and "
            "beyond it nothing is read.",
        ),
    ] = 64 * MIB
    requests_max: Annotated[
        int,
        Meta(ge=1, le=10_000_000, description="Clients' requests under way at which further ones are refused."),
    ] = 16_384
    requests_bytes_max: Annotated[
        int,
        Meta(
            ge=64 * KIB,
            le=1024 * 1024 * MIB,
            description="Bytes of clients' requests under way and unsent responses at which further ones are refused.",
        ),
    ] = 512 * MIB
    idle_timeout_ms: Annotated[
        int,
        Meta(
            ge=100, le=24 * 3_600_000, description="Time without a request after which one's own connection is closed."
        ),
    ] = 60_000

    def __post_init__(self) -> None:
        if self.peer_buffer_bytes_max < self.frame_bytes_max:
            raise ConfigError("wire.peer_buffer_bytes_max must be at least wire.frame_bytes_max")
        if self.reconnect_delay_ms_max < self.reconnect_delay_ms_min:
            raise ConfigError("wire.reconnect_delay_ms_max must be at least wire.reconnect_delay_ms_min")


class TlsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Encryption of the wire: between nodes, and from clients to nodes."""

    is_enabled: Annotated[
        bool, Meta(description="Whether connections are made and accepted with TLS (1.3), and no others.")
    ] = False
    certificate_file: Annotated[
        str,
        Meta(
            description="PEM file with the certificate that is shown, and those between it and the authority's. A node "
            "needs one; it names the node's host, and `node-<id>`."
        ),
    ] = ""
    key_file: Annotated[
        str, Meta(description="PEM file with the certificate's key, not encrypted; empty: it is in certificate_file.")
    ] = ""
    ca_file: Annotated[
        str, Meta(description="PEM file with the authorities whose certificates are believed; empty: the system's.")
    ] = ""
    client_certificates: Annotated[
        Literal["none", "nodes", "all"],
        Meta(
            description="Who must show a certificate when it connects: `nodes` one that names `node-<id>`, `all` "
            "clients as well, `none` nobody: then whoever reaches the port can pass for a node."
        ),
    ] = "nodes"

    def __post_init__(self) -> None:
        if self.key_file and not self.certificate_file:
            raise ConfigError("tls.key_file needs tls.certificate_file")


class MetadataSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every node keeps of the cluster's metadata."""

    staleness_ms_max: Annotated[
        int,
        Meta(ge=100, le=3_600_000, description="Silence of the primary after which a node refuses to answer reads."),
    ] = 10_000
    snapshot_entries: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000_000,
            description="Entries applied since the last snapshot of the metadata at which the next one is saved and "
            "the log shortened.",
        ),
    ] = 10_000


class ManagerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How managers watch nodes and clients, place replicas and heal the cluster."""

    heartbeat_interval_ms: Annotated[
        int, Meta(ge=10, le=60_000, description="Time between two heartbeats of a node to the primary.")
    ] = 1_000
    suspect_after_ms: Annotated[
        int, Meta(ge=20, le=600_000, description="Silence after which a node is suspected to be dead.")
    ] = 3_000
    dead_after_ms: Annotated[
        int, Meta(ge=30, le=3_600_000, description="Silence after which a node counts as dead; above suspect_after_ms.")
    ] = 10_000
    rebuild_after_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=7 * 24 * 3_600_000,
            description="Time for which a node must have been dead before its replicas are built anew elsewhere.",
        ),
    ] = 300_000
    client_alive_ms: Annotated[
        int,
        Meta(ge=100, le=24 * 3_600_000, description="Time since its last request for which a client counts as alive."),
    ] = 60_000
    record_interval_ms: Annotated[
        int, Meta(ge=10, le=600_000, description="Time between two records of who was heard of when.")
    ] = 5_000
    reconcile_interval_ms: Annotated[
        int, Meta(ge=10, le=600_000, description="Time after which the primary looks for work without a reason.")
    ] = 1_000
    moves_max: Annotated[int, Meta(ge=1, le=10_000, description="Replicas on their way at once, in the cluster.")] = 8
    broker_moves_max: Annotated[
        int, Meta(ge=1, le=10_000, description="Replicas on their way at once to or from one broker.")
    ] = 2
    rebalance: Annotated[
        Literal["on_request", "always"],
        Meta(description="When replicas are moved only to spread them evenly: when asked to, or also by itself."),
    ] = "on_request"
    purge_delay_ms: Annotated[
        int, Meta(ge=0, le=365 * 24 * 3_600_000, description="Time for which a deleted topic can be restored.")
    ] = 24 * 3_600_000

    def __post_init__(self) -> None:
        if not self.heartbeat_interval_ms < self.suspect_after_ms < self.dead_after_ms:
            raise ConfigError("manager: heartbeat_interval_ms < suspect_after_ms < dead_after_ms must hold")


class BrokerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How brokers hold replicas and answer for them."""

    openings_max: Annotated[int, Meta(ge=1, le=1_000, description="Replicas that are opened or closed at once.")] = 16
    report_delay_ms: Annotated[
        int, Meta(ge=0, le=10_000, description="Time for which new leaders are gathered before the primary is told.")
    ] = 20
    long_polls_max: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Requests that wait for records at once; more are answered empty.")
    ] = 10_000
    leader_balance_delay_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=24 * 3_600_000,
            description="Time after which leadership that fell to this node is handed back to the preferred replica.",
        ),
    ] = 10_000
    leader_transfers_max: Annotated[
        int, Meta(ge=1, le=10_000, description="Partitions whose leadership is handed back at once.")
    ] = 4
    stop_timeout_ms: Annotated[
        int, Meta(ge=0, le=600_000, description="Time for a stopping node to hand on what it leads.")
    ] = 5_000


class GatewaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What HTTP clients may cost."""

    connections_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Connections at once; beyond it the one that has been idle for longest makes room, or, if none "
            "is idle, the new one is told 503.",
        ),
    ] = 16_384
    requests_max: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Requests being answered at once; beyond it they are told 503.")
    ] = 8_192
    head_bytes_max: Annotated[
        int, Meta(ge=KIB, le=MIB, description="Bytes of a request's target and headers; beyond it 431.")
    ] = 16 * KIB
    body_bytes_max: Annotated[
        int, Meta(ge=KIB, le=64 * MIB, description="Bytes of a request's body; beyond it 413.")
    ] = 16 * MIB
    bodies_bytes_max: Annotated[
        int,
        Meta(
            ge=KIB,
            le=64 * 1024 * MIB,
            description="Bytes of all bodies that have come and are not answered; beyond it 503. At least "
            "body_bytes_max.",
        ),
    ] = 128 * MIB
    idle_timeout_ms: Annotated[
        int, Meta(ge=10, le=3_600_000, description="Time for the next request to begin before a connection is closed.")
    ] = 75_000
    receive_timeout_ms: Annotated[
        int, Meta(ge=10, le=3_600_000, description="Time for a request to arrive whole; beyond it 408.")
    ] = 20_000
    send_timeout_ms: Annotated[
        int, Meta(ge=10, le=3_600_000, description="Time for a client to read what is sent to it before it is cut off.")
    ] = 20_000
    request_timeout_ms: Annotated[
        int,
        Meta(
            ge=10,
            le=600_000,
            description="Time for a request to be carried out, beside what a long poll asks for; beyond it 503 or 504.",
        ),
    ] = 10_000
    wait_ms_max: Annotated[
        int, Meta(ge=0, le=600_000, description="Longest wait of a long poll; one that asks for more waits this long.")
    ] = 30_000
    shutdown_grace_ms: Annotated[
        int, Meta(ge=0, le=600_000, description="Time for requests under way to be answered when the node stops.")
    ] = 5_000
    access_log: Annotated[bool, Meta(description="Whether every request is written to the log.")] = False
    tls: Annotated[
        Literal["auto", "on", "off"],
        Meta(description="Whether HTTP is served over TLS with the certificate of [tls]; `auto`: if that is enabled."),
    ] = "auto"

    def __post_init__(self) -> None:
        if self.bodies_bytes_max < self.body_bytes_max:
            raise ConfigError("gateway.bodies_bytes_max must be at least gateway.body_bytes_max")


class LoggingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the program says on standard error."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severity that is written.")
    ] = "info"
    format: Annotated[Literal["text", "json"], Meta(description="One line of text, or one JSON object, per event.")] = (
        "text"
    )


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting of a node, by section."""

    node: NodeSettings = NodeSettings()
    log: LogSettings = LogSettings()
    partition: PartitionSettings = PartitionSettings()
    replication: ReplicationSettings = ReplicationSettings()
    wire: WireSettings = WireSettings()
    tls: TlsSettings = TlsSettings()
    metadata: MetadataSettings = MetadataSettings()
    manager: ManagerSettings = ManagerSettings()
    broker: BrokerSettings = BrokerSettings()
    gateway: GatewaySettings = GatewaySettings()
    logging: LoggingSettings = LoggingSettings()


class Setting(msgspec.Struct, frozen=True):
    """One leaf of the tree, as flags and the reference page need it."""

    section: str
    name: str
    default: object
    choices: tuple[str, ...]
    description: str
    at_least: float | None
    at_most: float | None

    @property
    def key(self) -> str:
        """Return the dotted key, as in TOML."""
        return f"{self.section}.{self.name}"

    @property
    def environment_variable(self) -> str:
        """Return the environment variable that sets it."""
        return f"{ENVIRONMENT_PREFIX}{self.section}__{self.name}".upper()

    @property
    def flag(self) -> str:
        """Return the command-line flag that sets it; those of `node` are too common for a prefix."""
        if self.section == "node":
            return f"--{self.name}".replace("_", "-")
        return f"--{self.section}-{self.name}".replace("_", "-")


def all_settings() -> Iterator[Setting]:
    """Walk the tree in the order of its declaration."""
    for section in msgspec.structs.fields(Settings):
        section_type = type(section.default)
        hints = get_type_hints(section_type, include_extras=True)
        for field in msgspec.structs.fields(section_type):
            annotated = get_args(hints[field.name])
            meta: Meta = annotated[1]
            yield Setting(
                section=section.name,
                name=field.name,
                default=field.default,
                choices=tuple(str(choice) for choice in get_args(annotated[0])),
                description=meta.description or "",
                at_least=meta.ge,
                at_most=meta.le,
            )


def load_settings(
    toml: str = "", *, environment: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None
) -> Settings:
    """Combine defaults, the text of a TOML file, environment variables and flags (`{"log.durability": "none"}`).

    Raises:
        ConfigError: a key is unknown or a value is not allowed; the message names the key.
    """
    tree = _parse_toml(toml)
    known = {setting.key: setting for setting in all_settings()}
    for variable, value in sorted((environment or {}).items()):
        if variable.startswith(ENVIRONMENT_PREFIX):
            key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".", 1)
            _assign(tree, key, value, known, where=f"environment variable {variable}")
    for key, value in (flags or {}).items():
        _assign(tree, key, value, known, where=f"flag for {key}")
    try:
        # strict=False turns the strings of flags and variables into the declared types.
        return msgspec.convert(tree, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings: {error}; docs/operations/configuration.md lists what is allowed") from None


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"settings file is not valid TOML: {error}") from None


def _assign(tree: dict[str, Any], key: str, value: str, known: Mapping[str, Setting], *, where: str) -> None:
    setting = known.get(key)
    if setting is None:
        raise ConfigError(f"{where}: there is no setting {key!r}; docs/operations/configuration.md lists them")
    section = tree.setdefault(setting.section, {})
    if not isinstance(section, dict):
        raise ConfigError(f"settings: [{setting.section}] must be a table of settings")
    section[setting.name] = value
