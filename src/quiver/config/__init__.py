"""The settings of a node: `settings` and the modules of its sections declare them, `loading` finds their values."""

from quiver.config.loading import (
    ENVIRONMENT_PREFIX,
    Setting,
    all_settings,
    find_sources,
    list_shared,
    load_settings,
    redact,
    redact_url,
)
from quiver.config.managers import ManagerSettings, MetadataSettings
from quiver.config.network import KIB, MIB, GatewaySettings, TlsSettings, WireSettings
from quiver.config.quotas import QuotaSettings
from quiver.config.security import AuditSettings, NodeProof, SecurityMode, SecuritySettings, decide_mode, decide_proof
from quiver.config.settings import (
    ROLES,
    BrokerSettings,
    LoggingSettings,
    NodeSettings,
    PartitionSettings,
    ReplicationSettings,
    Settings,
)
from quiver.config.storage import Durability, EncryptionSettings, ExecutorSettings, LogSettings

__all__ = [
    "ENVIRONMENT_PREFIX",
    "KIB",
    "MIB",
    "ROLES",
    "AuditSettings",
    "BrokerSettings",
    "Durability",
    "EncryptionSettings",
    "ExecutorSettings",
    "GatewaySettings",
    "LogSettings",
    "LoggingSettings",
    "ManagerSettings",
    "MetadataSettings",
    "NodeProof",
    "NodeSettings",
    "PartitionSettings",
    "QuotaSettings",
    "ReplicationSettings",
    "SecurityMode",
    "SecuritySettings",
    "Setting",
    "Settings",
    "TlsSettings",
    "WireSettings",
    "all_settings",
    "decide_mode",
    "decide_proof",
    "find_sources",
    "list_shared",
    "load_settings",
    "redact",
    "redact_url",
]
